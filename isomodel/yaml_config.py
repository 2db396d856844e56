"""YAML to nested frozen dataclasses: types, ranges, unknown keys, overrides, and back to YAML.

Types and ranges are checked by pydantic in its strict JSON mode (nothing is coerced but int -> float and list -> tuple);
this module adds what a person who edits YAML needs: every fault at once, each with its dotted path, the nearest known
name for a misspelt key, `path=value` overrides, and shorthands (`numerics: native` for `numerics: {mode: native}`).

A field with `metadata={"shorthand": "mode"}` whose type is a dataclass accepts a bare scalar, which sets that field.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pydantic
import yaml

from isomodel.config import FaultyInput

T = TypeVar("T")


class ConfigError(FaultyInput):
    """A configuration that cannot be used; `faults` has one line each, "path: what is wrong and what to do"."""

    def __init__(self, faults: Iterable[str], source: str = "configuration"):
        super().__init__(source, list(faults))


def check(faults: Iterable[str]) -> None:
    """For a dataclass's `__post_init__`: raises if there are faults. Paths in them are relative to that dataclass."""
    faults = list(faults)
    if faults:
        raise ConfigError(faults)


def load(cls: type[T], path: str | pathlib.Path, overrides: Iterable[str] = ()) -> T:
    """Reads `path` as YAML, applies `overrides` ("a.b=value", values parsed as YAML) and builds a `cls`.

    Raises:
      ConfigError: the file is missing or no YAML mapping, or any key or value is at fault; lists all faults.
    """
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError([f"cannot be read: {e}"], str(path)) from e
    return from_mapping(cls, parse_yaml(text, str(path)), overrides, source=str(path))


def from_mapping(cls: type[T], mapping: Mapping | None, overrides: Iterable[str] = (), source="configuration") -> T:
    """Builds a `cls` (a dataclass of scalars, tuples, dicts and dataclasses) from nested mappings and overrides.

    Raises:
      ConfigError: lists every unknown key, wrong type, value out of range, and fault that a `__post_init__` reports.
    """
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        raise ConfigError([f"must be a mapping of keys to values, not {_kind(mapping)}"], source)
    faults: list[str] = []
    data = _expand(cls, mapping, "", faults)
    for override in overrides:
        _apply_override(cls, data, override, faults)
    try:
        value = _adapter(cls).validate_json(_to_json(data, faults), strict=True)
    except pydantic.ValidationError as e:
        faults += [line for error in e.errors(include_url=False) for line in _explain(error)]
        value = None
    if faults:
        raise ConfigError(dict.fromkeys(faults), source)
    return value


def to_mapping(config: Any) -> dict[str, Any]:
    """Nested plain dicts and lists of a dataclass, every default written out."""
    return _plain(config)


def dump(config: Any) -> str:
    """YAML text that `load` turns into an equal object."""
    return yaml.dump(to_mapping(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def parse_yaml(text: str, source: str = "configuration") -> Any:
    """YAML by the 1.2 core rules that people expect: 1e-6 is a number, `on` and `no` are strings, dates are strings.

    Raises:
      ConfigError: no valid YAML, or a key that appears twice in one mapping.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as e:
        raise ConfigError([" ".join(f"not valid YAML: {e}".split())], source) from e


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say of an unknown name: the known one nearest to it, else all that are known."""
    known = list(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known here: {', '.join(known)}"


class _Loader(yaml.SafeLoader):
    """SafeLoader by YAML 1.2 rules for scalars, refusing duplicate keys."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key_node.tag != "tag:yaml.org,2002:merge" and isinstance(key, str | int | float | bool):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} appears twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes by the same rules as `_Loader` reads."""

    yaml_implicit_resolvers: typing.ClassVar[dict] = {}

    def ignore_aliases(self, data):
        return True


for _cls in (_Loader, _Dumper):
    for _tag, _pattern, _first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
        (
            "float",
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
            "-+.0123456789",
        ),
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("merge", r"<<", "<"),
    ):
        _cls.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _construct_int(loader, node):
    text = loader.construct_scalar(node)
    return int(text, 16) if text.lower().startswith("0x") else int(text, 10)


def _represent_float(dumper, value):
    text = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(value) or (".nan" if value != value else repr(value))
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_str(dumper, value):
    # PyYAML writes these line breaks unescaped into single-quoted text, and reads them back as spaces.
    style = '"' if re.search("[\x85\u2028\u2029]", value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_str)


@functools.cache
def _adapter(cls: type) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(cls)


def _fields(cls: type) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _section(cls: type, name: str) -> type | None:
    """The dataclass that field `name` of `cls` holds (alone, optional or in Annotated), if it holds one."""
    hint = _hints(cls)[name]
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated)
        else (hint,)
    )
    return next((o for o in options if dataclasses.is_dataclass(o)), None)


def _element(cls: type, name: str) -> type | None:
    """The dataclass that a tuple field holds elements of, if it does."""
    hint = _hints(cls)[name]
    if typing.get_origin(hint) is tuple:
        return next((o for o in typing.get_args(hint) if dataclasses.is_dataclass(o)), None)
    return None


def _expand(cls: type, mapping: Mapping, path: str, faults: list[str]) -> dict[str, Any]:
    """A mutable copy of `mapping` with shorthands written out; unknown keys become faults and are left out."""
    known, out = _fields(cls), {}
    for key, value in mapping.items():
        if key not in known:
            faults.append(f"{path}{key}: unknown key; {nearest(str(key), known)}")
            continue
        out[key] = _expand_value(cls, key, value, f"{path}{key}", faults)
    return out


def _expand_value(cls: type, name: str, value: Any, path: str, faults: list[str]) -> Any:
    section, element = _section(cls, name), _element(cls, name)
    if section is not None:
        if isinstance(value, Mapping):
            return _expand(section, value, path + ".", faults)
        shorthand = _fields(cls)[name].metadata.get("shorthand")
        if shorthand and isinstance(value, str | bool | int | float):
            return {shorthand: value}
    if element is not None and isinstance(value, list):
        return [
            _expand(element, v, f"{path}.{i}.", faults) if isinstance(v, Mapping) else v for i, v in enumerate(value)
        ]
    return value


def _apply_override(cls: type, data: dict[str, Any], override: str, faults: list[str]) -> None:
    path, eq, text = override.partition("=")
    path = path.strip()
    if not eq or not path:
        faults.append(f"{override}: an override is written key=value, with dots between levels: train.steps=10")
        return
    try:
        value = parse_yaml(text, path)
    except ConfigError as e:
        faults += [f"{path}: {f}" for f in e.faults]
        return
    names, at, node = path.split("."), cls, data
    for depth, name in enumerate(names):
        here = ".".join(names[: depth + 1])
        if at is not None and name not in _fields(at):
            faults.append(f"{here}: unknown key; {nearest(name, _fields(at))}")
            return
        section = _section(at, name) if at is not None else None
        if depth == len(names) - 1:
            if at is not None:
                value = _expand_value(at, name, value, here, faults)
            merge = section is not None and isinstance(value, dict) and isinstance(node.get(name), dict)
            node[name] = {**node[name], **value} if merge else value
            return
        if section is None and at is not None and not _is_mapping(at, name):
            faults.append(f"{path}: {here} is a value, not a section, and has nothing below it")
            return
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node, at = node[name], section


def _is_mapping(cls: type, name: str) -> bool:
    hint = _hints(cls)[name]
    return any(typing.get_origin(o) is dict or o is dict for o in (hint, *typing.get_args(hint)))


def _to_json(data: dict[str, Any], faults: list[str]) -> str:
    def refuse(value):
        faults.append(f"{value!r}: a {_kind(value)} has no place in a configuration")

    return json.dumps(data, default=refuse)


def _explain(error: dict[str, Any]) -> list[str]:
    """pydantic's error as lines of ours: "path: what is wrong"."""
    # Union branches and wrapped types add parts to `loc` that are no keys of the user's.
    parts = [str(p) for p in error["loc"] if isinstance(p, int) or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", str(p))]
    if error["type"] == "missing":
        return [f"{'.'.join(parts)}: required and missing"]
    branch = {"str", "int", "float", "bool"}
    if parts and parts[-1] in branch:
        parts.pop()
    path = ".".join(parts)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return [f"{path}.{f}" if path else f for f in cause.faults]
    if isinstance(cause, Exception):
        return [f"{path}: {str(cause).removeprefix(path + ': ')}"]
    message = error["msg"][0].lower() + error["msg"][1:]
    message = message.replace("input should be", "must be").replace("an object", "a section of keys")
    return [f"{path}: {message}, not {_shown(error.get('input'))}"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    return {"list": "a list", "str": "a string", "int": "a number", "float": "a number", "bool": "true or false"}.get(
        type(value).__name__, type(value).__name__
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
