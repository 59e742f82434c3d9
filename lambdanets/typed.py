"""Check JSON, configuration fields and constructor arguments against their annotations.

A value that does not match its annotation raises a ValueError that names it.

A dataclass may define `WHEN_ABSENT`: the values of fields that are missing from JSON written before the fields were
added, where they differ from the defaults of new configurations.
"""

import inspect
import reprlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import lru_cache, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

T = TypeVar("T")
P = ParamSpec("P")
WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    type(None): "none",
}


@dataclass(frozen=True)
class Bounds:
    """The range of a number, including both ends. NaN is outside every range."""

    low: float
    high: float = float("inf")

    def __str__(self) -> str:
        return f"at least {self.low}" if self.high == float("inf") else f"from {self.low} to {self.high}"


LARGEST_IMAGE = 8192  # pixels per side
Side = Annotated[int, Bounds(1, LARGEST_IMAGE)]
Count = Annotated[int, Bounds(1)]
Deviation = Annotated[float, Bounds(0, 1e6)]


class WrongKindError(ValueError):
    """A value that does not have the annotated type. `where` is the name of the value."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


def to_json(value: Any) -> Any:
    """Convert dataclasses, tuples and paths to values that JSON can represent."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    return str(value) if isinstance(value, Path) else value


def from_json(kind: type[T], data: Any, where: str = "") -> T:
    """Return a `kind` from JSON data; a ValueError names the key, such as model.name, and what was expected."""
    return read(kind, data, where)


def read(kind: Any, data: Any, where: str) -> Any:
    """Return `data` as a value of the annotation `kind`, or raise a ValueError that names `where`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin is Annotated:
        value = read(arguments[0], data, where)
        for bounds in arguments[1:]:
            if isinstance(bounds, Bounds) and not bounds.low <= value <= bounds.high:
                raise ValueError(f"{where} must be {bounds}, got {shown(data)}")
        return value
    if origin in (Union, types.UnionType):
        return read_union(arguments, data, where)
    if origin is Literal:
        if not any(type(data) is type(a) and data == a for a in arguments):
            raise wrong(where, kind, data)
        return data
    if origin in (tuple, Sequence):
        several = origin is Sequence or arguments[-1] is ...
        is_list = isinstance(data, Sequence if origin is Sequence else list | tuple) and not isinstance(
            data, str | bytes
        )
        if not is_list or (not several and len(data) != len(arguments)):
            raise wrong(where, kind, data)
        kinds = [arguments[0]] * len(data) if several else arguments
        return tuple(read(k, d, f"{where}[{i}]") for i, (k, d) in enumerate(zip(kinds, data, strict=True)))
    if origin is dict:
        if not isinstance(data, dict):
            raise wrong(where, kind, data)
        return {read(arguments[0], k, where): read(arguments[1], d, f"{where}.{k}") for k, d in data.items()}
    if origin is Callable:
        if not callable(data):
            raise wrong(where, kind, data)
        return data
    if is_dataclass(kind) and isinstance(kind, type):
        return read_dataclass(kind, data, where)
    if kind is Path and isinstance(data, str):
        return Path(data)
    if kind is int and isinstance(data, Integral) and not isinstance(data, bool):
        return int(data)  # includes NumPy integers
    if kind is float and isinstance(data, Real) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            raise wrong(where, kind, data) from None
    fits = type(data) is kind if kind in (bool, int, float, str) else isinstance(data, kind)  # type: ignore[arg-type]
    if not fits:
        raise wrong(where, kind, data)
    return data


def read_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        try:
            return read(kind, data, where)
        except ValueError as error:
            errors.append(error)
    # If the type matches and an inner value is wrong, the error about the inner value is more helpful.
    inside = [e for e in errors if not isinstance(e, WrongKindError) or e.where != where]
    raise inside[0] if inside else wrong(where, Union[kinds], data)  # noqa: UP007


def read_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise wrong(where, kind, data)
    hints = get_type_hints(kind, include_extras=True)
    known = {f.name: f for f in fields(kind) if f.init}
    for key in data:
        if key not in known:
            close = get_close_matches(str(key), known, 1)
            hint = f"did you mean {join(where, close[0])}?" if close else f"choose from {', '.join(known)}"
            raise ValueError(f"unknown key {join(where, shown_key(key))} in the configuration; {hint}")
    for name, f in known.items():
        if name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"the configuration has no {join(where, name)}")
    given = {key: read(hints[key], value, join(where, key)) for key, value in data.items()}
    return kind(**(getattr(kind, "WHEN_ABSENT", {}) | given))


def as_before(config: T, data: dict[str, Any]) -> T:
    """Return `config` with the fields that the older JSON `data` lacks set to their values in `WHEN_ABSENT`."""
    changes = {key: value for key, value in getattr(config, "WHEN_ABSENT", {}).items() if key not in data}
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        if is_dataclass(value) and isinstance(data.get(f.name), dict):
            changes[f.name] = as_before(value, data[f.name])
    return replace(config, **changes)  # type: ignore[type-var]


def absent(config: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return as JSON the values that the fields missing from the older JSON `data` have: `WHEN_ABSENT` or defaults."""
    meanings, found = getattr(config, "WHEN_ABSENT", {}), {}
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name not in data:
            if f.name in meanings:
                found[f.name] = meanings[f.name]
            elif f.default is not MISSING:
                found[f.name] = f.default
            elif f.default_factory is not MISSING:
                found[f.name] = f.default_factory()
        elif is_dataclass(value) and isinstance(data[f.name], dict):
            found[f.name] = absent(value, data[f.name])
    return to_json(found)


def join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def wrong(where: str, kind: Any, data: Any) -> WrongKindError:
    return WrongKindError(f"{where or 'the configuration'} must be {described(kind)}, got {shown(data)}", where)


def described(kind: Any) -> str:
    """Describe in words the values that an annotation allows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = next((b for b in arguments[1:] if isinstance(b, Bounds)), None)
        return described(arguments[0]) + (f" {'of ' * (bounds.high == float('inf'))}{bounds}" if bounds else "")
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(described(k) for k in arguments))
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is Sequence or (origin is tuple and arguments[-1] is ...):
        return "a list"
    if origin is tuple:
        return f"a list of {len(arguments)} values"
    if origin is dict or is_dataclass(kind):
        return "an object"
    if origin is Callable:
        return "a function"
    return WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def shown(value: Any) -> str:
    """Return a short representation of a value of any size for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    text = reprlib.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def shown_key(key: object) -> str:
    text = str(key)
    return text if len(text) <= 60 else f"{text[:60]}..."


# Configurations and constructors --------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def annotations_of(owner: Any) -> Mapping[str, Any]:
    return get_type_hints(owner, include_extras=True)


def check_fields(config: Any) -> None:
    """Check the fields of a frozen dataclass against their annotations in `__post_init__`; lists become tuples."""
    hints = annotations_of(type(config))
    for f in fields(config):
        object.__setattr__(config, f.name, read(hints[f.name], getattr(config, f.name), f.name))


def unknown_arguments(
    what: str, unknown: Collection[str], known: Collection[str], remedies: Mapping[str, str] | None = None
) -> TypeError:
    """Return the error for unknown argument names.

    Args:
        what: name of the class or function that was called.
        unknown: the unknown argument names.
        known: the valid argument names.
        remedies: what to use instead of argument names of other libraries, by name.
    """
    remedies = remedies or {}
    hints = [remedies[name] for name in sorted(unknown) if name in remedies]
    others = [name for name in sorted(unknown) if name not in remedies]
    close = [match for name in others for match in get_close_matches(name, known, 1)]
    if close:
        hints.append(f"did you mean {', '.join(close)}?")
    if not hints:
        hints.append(f"it takes {', '.join(sorted(known))}")
    return TypeError(f"{what} has no argument {', '.join(map(shown_key, sorted(unknown)))}; {'; '.join(hints)}")


def checked(
    remedies: Callable[[Collection[str]], Mapping[str, str]] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a constructor so that it checks its arguments against their annotations and explains unknown names.

    Args:
        remedies: a function that takes the constructor's argument names and returns what to use instead of argument
            names of other libraries, by name.
    """

    def decorate(init: Callable[P, T]) -> Callable[P, T]:
        parameters = dict(list(inspect.signature(init).parameters.items())[1:])  # without self
        positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        needed = [n for n, p in parameters.items() if p.default is p.empty]

        @wraps(init)
        def checking(*args: P.args, **kwargs: P.kwargs) -> T:
            self, *given = args
            what = type(self).__name__
            unknown = kwargs.keys() - parameters.keys()
            if unknown:
                raise unknown_arguments(what, unknown, parameters, remedies and remedies(parameters))
            if len(given) > len(positional):
                raise TypeError(
                    f"{what} takes only {', '.join(positional)} by position, got {len(given)} values: name the others, "
                    f"as in {next(n for n in parameters if n not in positional)}=..."
                )
            values = dict(zip(positional, given, strict=False))
            twice = values.keys() & kwargs.keys()
            if twice:
                raise TypeError(f"{what} got {', '.join(sorted(twice))} by position and by name: give it once")
            values |= kwargs
            missing = [name for name in needed if name not in values]
            if missing:
                raise TypeError(f"{what} needs {', '.join(missing)}")
            hints = annotations_of(init)
            return init(self, **{n: read_argument(hints.get(n, Any), v, n) for n, v in values.items()})  # type: ignore

        return checking

    return decorate


def named(remedies: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that it explains unknown argument names, see `unknown_arguments`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = tuple(inspect.signature(function).parameters)

        @wraps(function)
        def checking(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    raise unknown_arguments(function.__name__, [name], known, remedies)
            return function(*args, **kwargs)

        return checking

    return decorate


def read_argument(kind: Any, value: Any, name: str) -> Any:
    if name == "device":  # torch accepts more types than the annotation and raises its own errors
        return value
    if name == "dtype" and value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"dtype must be a floating-point dtype such as torch.float32, got {shown(value)}")
    return read(kind, value, name)
