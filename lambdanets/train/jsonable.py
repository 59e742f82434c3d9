"""Typed configurations as JSON and back. Unknown keys and values of another type are refused with a sentence.

A dataclass may have a `WHEN_ABSENT`: what the absence of a field means in JSON that is older than the field, where that
is not the default of new configurations.
"""

import types
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def to_json(value: Any) -> Any:
    """Dataclasses, tuples and paths as what JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    return str(value) if isinstance(value, Path) else value


def from_json(kind: type[T], data: Any, where: str = "") -> T:
    """A `kind` from JSON; the ValueError names the key, as in model.name, and what was expected."""
    return read(kind, data, where)


def read(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin is Annotated:
        return read(arguments[0], data, where)
    if origin in (Union, types.UnionType):
        return read_union(arguments, data, where)
    if origin is Literal:
        if data not in arguments or type(data) not in {type(a) for a in arguments}:
            raise wrong(where, f"one of {', '.join(map(repr, arguments))}", data)
        return data
    if origin is tuple:
        if not isinstance(data, list | tuple) or (arguments[-1] is not ... and len(data) != len(arguments)):
            raise wrong(where, "a list" if arguments[-1] is ... else f"a list of {len(arguments)}", data)
        kinds = [arguments[0]] * len(data) if arguments[-1] is ... else arguments
        return tuple(read(k, d, f"{where}[{i}]") for i, (k, d) in enumerate(zip(kinds, data, strict=True)))
    if origin is dict:
        if not isinstance(data, dict):
            raise wrong(where, "an object", data)
        return {read(arguments[0], k, where): read(arguments[1], d, f"{where}.{k}") for k, d in data.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return read_dataclass(kind, data, where)
    if kind is Path and isinstance(data, str):
        return Path(data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            raise wrong(where, "a number", data) from None
    if type(data) is not kind:
        raise wrong(where, WORDS.get(kind, str(kind)), data)
    return data


def read_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return read(kind, data, where)
            except ValueError as error:
                errors.append(error)
    raise errors[0]


def read_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise wrong(where, "an object", data)
    hints = get_type_hints(kind, include_extras=True)
    known = {f.name: f for f in fields(kind) if f.init}
    for key in data:
        if key not in known:
            close = get_close_matches(str(key), known, 1)
            hint = f"did you mean {join(where, close[0])}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"unknown key {join(where, key)} in the configuration; {hint}")
    for name, f in known.items():
        if name not in data and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"the configuration has no {join(where, name)}")
    given = {key: read(hints[key], value, join(where, key)) for key, value in data.items()}
    return kind(**(getattr(kind, "WHEN_ABSENT", {}) | given))


def as_before(config: T, data: dict[str, Any]) -> T:
    """Set the fields of `config` that the older configuration `data` does not have to what their absence means."""
    changes = {key: value for key, value in getattr(config, "WHEN_ABSENT", {}).items() if key not in data}
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        if is_dataclass(value) and isinstance(data.get(f.name), dict):
            changes[f.name] = as_before(value, data[f.name])
    return replace(config, **changes)  # type: ignore[type-var]


def join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def wrong(where: str, expected: str, data: Any) -> ValueError:
    given = repr(data)
    return ValueError(f"{where or 'the configuration'} is {expected}, not {given[:80]}{'...' * (len(given) > 80)}")
