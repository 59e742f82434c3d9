"""A backend with a mistake, which a check has to find."""

from dataclasses import replace

from lambdanets.ops import choose


def break_backend(monkeypatch, name, change):
    """Puts a backend in the registry whose position output, and so all of its output, went through `change`."""
    right = choose.BACKENDS[name]
    wrong = replace(
        right, position_output=lambda problem: change(right.position_output(problem)), whole_output=lambda *_: None
    )
    monkeypatch.setitem(choose.BACKENDS, name, wrong)
