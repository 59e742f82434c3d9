"""A deliberately wrong backend, which checks must detect."""

from dataclasses import replace

from lambdanets.ops import choose


def break_backend(monkeypatch, name, change):
    """Replace a backend by one whose position output is passed through `change`."""
    right = choose.BACKENDS[name]
    wrong = replace(
        right, position_output=lambda problem: change(right.position_output(problem)), whole_output=lambda *_: None
    )
    monkeypatch.setitem(choose.BACKENDS, name, wrong)
