"""Tables (TOML, JSON) <-> frozen dataclasses, strictly: an unknown key or a wrong type is an error with a hint."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar, Union

from cofire.errors import ConfigError, unknown

T = TypeVar("T")
# Kept: a program has many ops of the same kind, and each annotation is compiled.
_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)


def structure(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """An instance of dataclass ``cls`` from ``table``; ``where`` names the table in errors, e.g. ``[train]``.

    Understands bool, int, float, str, Literal, None, tuples, mappings and nested dataclasses.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, got {table!r}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = _hints(cls)
    for key in table:
        if key not in fields:
            raise unknown(f"key in {where}:", key, fields)
    given = {key: _value(hints[key], value, f"{where} {key}") for key, value in table.items()}
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in given and not has_default:
            raise ConfigError(f"{where} must have the key {name!r}")
    return cls(**given)


def unstructure(value: Any) -> Any:
    """The inverse: dataclasses as tables, tuples as lists; ``None`` entries are left out (TOML has none)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {name: unstructure(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: unstructure(item) for key, item in value.items() if item is not None}
    if isinstance(value, (tuple, list)):
        return [unstructure(item) for item in value]
    return value


def check(instance: Any) -> None:
    """Raise unless every field of a dataclass holds a value of its type: ``Recipe.epochs must be of type int``."""
    hints = _hints(type(instance))
    for field in dataclasses.fields(instance):
        _value(hints[field.name], getattr(instance, field.name), f"{type(instance).__name__}.{field.name}")


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Dotted names of the entries in which two nested tables differ; empty if they are equal."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return [] if one == other else [where or "everything"]
    names = [*one, *(key for key in other if key not in one)]
    inner = [differences(one.get(key), other.get(key), f"{where}.{key}" if where else str(key)) for key in names]
    return [name for names in inner for name in names]


def same_run(mine: Any, stored: Any, where: str = "") -> list[str]:
    """Dotted names of the values in which the ``stored`` description of a run is not ``mine``; empty: the same run.

    ``mine`` is a dataclass, or nested tables with dataclasses in them. Those are compared as parsed values: an option
    that ``stored`` does not have, because it is older, has its default there.
    """
    if dataclasses.is_dataclass(mine) and not isinstance(mine, type):
        with suppress(ConfigError):  # what cannot be parsed, e.g. of a newer version, is compared as it stands
            stored = unstructure(structure(type(mine), stored, where))
        return differences(unstructure(mine), stored, where)
    if not (isinstance(mine, Mapping) and isinstance(stored, Mapping)):
        return differences(unstructure(mine), stored, where)
    names = [*mine, *(key for key in stored if key not in mine)]
    inner = [same_run(mine.get(key), stored.get(key), f"{where}.{key}" if where else str(key)) for key in names]
    return [name for names in inner for name in names]


def override(table: dict[str, Any], assignment: str) -> None:
    """Apply ``a.b=c`` to a nested table in place; ``c`` is read as TOML, or else as a string."""
    path, found, text = assignment.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not found or not all(keys):
        raise ConfigError(f"--set takes section.key=value, got {assignment!r}")
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {assignment}: {key!r} is a value, not a section")
    table[keys[-1]] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or type(value) is hint:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _first_fit([arg for arg in args if arg is not type(None)], value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} must be one of {', '.join(map(repr, args))}, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else structure(hint, value, where)
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{where} must be a list, got {value!r}")
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(inner) != len(value):
            raise ConfigError(f"{where} must have {len(inner)} values, got {value!r}")
        return tuple(_value(arg, item, where) for arg, item in zip(inner, value, strict=True))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, got {value!r}")
        return {_key(args[0], key, where): _value(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value


def _key(hint: Any, key: Any, where: str) -> Any:
    """JSON and TOML know no keys but strings."""
    if hint is not int:
        return str(key)
    try:
        return int(key)
    except ValueError:
        raise ConfigError(f"{where} must have whole numbers as keys, got {key!r}") from None


def _first_fit(hints: list[Any], value: Any, where: str) -> Any:
    errors = []
    for hint in hints:
        try:
            return _value(hint, value, where)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]
