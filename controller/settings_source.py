"""Where settings come from: a YAML file, the environment, flags; and errors that name the place and what is allowed.

Never knows a setting by name: it works for any tree of frozen models.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, PrivateAttr, ValidationError

PREFIX = "FLUIDPD_"
OTHER_PROCESSES = ("sidecar", "dashboard", "emulator", "demo", "plugin")  # their sections may stand in the same environment
_MAX_FILE_BYTES = 1024 * 1024

_KINDS = {
    "number": "a number",
    "integer": "a whole number",
    "string": "text",
    "boolean": "true or false",
    "null": "nothing",
    "array": "a list",
}
_PASSWORD = re.compile(r"://[^/@\s]*@")

Loc = tuple[str, ...]
M = TypeVar("M", bound=BaseModel)


class Sourced(BaseModel):
    """Settings that remember where each of them came from: "a.yaml, line 3" by "section.key". What is not there is a default."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Where a value came from is no part of it."""
        return isinstance(other, type(self)) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


class ConfigError(Exception):
    """The configuration cannot be used. The message says where it is wrong and what is allowed."""


def build(model: type[M], path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]) -> M:
    """Merge the sources and validate the whole. Raises ConfigError listing every fault found."""
    where: dict[Loc, str] = {}
    merged: dict[str, Any] = {}
    if path is not None:
        data, lines = _read_yaml(path)
        _merge(merged, data)
        where |= {loc: f"{path}, line {line}" for loc, line in lines.items()}
    for loc, value, name in _from_env(model, env):
        _put(merged, loc, value)
        where[loc] = f"environment {name}"
    _merge(merged, overrides)
    where |= dict.fromkeys(_leaves(overrides), "the command line")
    for key, value in list(merged.items()):
        if value is None and _section(_annotation(model, (key,))):
            del merged[key]  # a section whose keys are all commented out
    try:
        # As JSON: names may stand for enums and lists for tuples, but text is never taken for a number.
        made = model.model_validate_json(json.dumps(merged, default=str))
    except ValidationError as error:
        faults = [_fault(model, e, where, path) for e in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(faults))) from None
    if isinstance(made, Sourced):
        made._sources.update({".".join(loc): place for loc, place in where.items()})
    return made


def overridden(base: M, words: Mapping[str, str]) -> M:
    """`base` with keys set from text, as an environment would. Raises ConfigError as `build` does."""
    model = type(base)
    typed = {key: _typed(text, _annotation(model, (key,))) for key, text in words.items()}
    return build(model, None, {}, {**base.model_dump(mode="json"), **typed})


# ---------------------------------------------------------------- YAML


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[Loc, int]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}): check the path given with --config") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB, that is no configuration")
    try:
        node = yaml.compose(raw.decode("utf-8"), Loader=yaml.SafeLoader)
        data = yaml.safe_load(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}, line 1: must be sections of keys, for example `server:` with `port: 8070` indented below it")
    lines: dict[Loc, int] = {}
    _walk(node, (), lines, path)
    return data, lines


def _walk(node: Any, loc: Loc, lines: dict[Loc, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*loc, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                raise ConfigError(f"{path}, line {line}: {'.'.join(here)} is set twice (first on line {lines[here]}): keep one")
            lines[here] = line
            _walk(value, here, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines[(*loc, str(i))] = item.start_mark.line + 1


# ---------------------------------------------------------------- environment


def _from_env(model: type[BaseModel], env: Mapping[str, str]) -> Iterator[tuple[Loc, Any, str]]:
    for name in sorted(env):
        if not name.startswith(PREFIX):
            continue
        parts = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if len(parts) == 1:
            # Names without a section are a process's own (FLUIDPD_TOKEN, ...), except for settings at the top.
            annotation = _annotation(model, parts)
            if annotation is not None and _section(annotation) is None:
                yield parts, _typed(env[name], annotation), name
            continue
        if parts[0] in OTHER_PROCESSES:
            continue
        section = _section(_annotation(model, parts[:1]))
        if section is None or len(parts) != 2:
            close = _close(parts[0], [f for f in model.model_fields if _section(_annotation(model, (f,)))])
            raise ConfigError(f"environment {name}: there is no section {parts[0]!r}{close}; write FLUIDPD_SECTION__KEY")
        key = parts[1]
        if key in section.model_fields:
            yield parts, _typed(env[name], _annotation(model, parts)), name
        elif key.endswith("_file") and key.removesuffix("_file") in section.model_fields:
            loc = (parts[0], key.removesuffix("_file"))
            yield loc, _typed(_content(env[name], name), _annotation(model, loc)), name
        else:
            raise ConfigError(f"environment {name}: {parts[0]} has no key {key!r}{_close(key, list(section.model_fields))}")


def _content(file: str, name: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"environment {name}: cannot read the file {file} ({error})") from error


def _typed(text: str, annotation: Any) -> Any:
    """Text for text, else what YAML makes of it: the environment has no types of its own."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if any(isinstance(k, type) and issubclass(k, str | Enum) for k in kinds):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    # YAML 1.1 reads 1e9 as text; in an environment nobody means text by it.
    try:
        return float(value) if isinstance(value, str) and "e" in value.lower() else value
    except ValueError:
        return value


def _annotation(model: type[BaseModel], loc: Loc) -> Any:
    found: Any = model
    for part in loc:
        if not (isinstance(found, type) and issubclass(found, BaseModel)) or part not in found.model_fields:
            return None
        found = found.model_fields[part].annotation
    return found


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


# ---------------------------------------------------------------- faults


def _fault(model: type[BaseModel], error: Any, where: Mapping[Loc, str], path: Path | None) -> str:
    loc = tuple(str(p) for p in error["loc"])
    place = next((where[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in where), str(path) if path else "settings")
    field = ".".join(loc) or "the file"
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        parent = _section(_annotation(model, loc[:-1])) or model
        return f"{place}: {field}: there is no such key{_close(loc[-1], list(parent.model_fields))}"
    said = str(error["msg"]).removeprefix("Value error, ")
    said = said[:1].lower() + said[1:]
    allowed = _allowed(model, loc)
    shown = "" if isinstance(given, dict) else f" (given: {_PASSWORD.sub('://***@', json.dumps(given, default=str))[:80]})"
    hint = "; YAML wants 1.0e+9 for 1e9" if isinstance(given, str) and _looks_exponential(given) else ""
    return f"{place}: {field}: {said}{shown}" + (f"; allowed: {allowed}" if allowed else "") + hint


def _looks_exponential(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "e" in text.lower()


def _allowed(model: type[BaseModel], loc: Loc) -> str:
    """What the field takes, in words, from its own JSON Schema."""
    owner = _section(_annotation(model, loc[:-1])) if loc[:-1] else model
    if not loc or owner is None or loc[-1] not in owner.model_fields:
        return ""
    full = owner.model_json_schema()
    found = full["properties"][loc[-1]]
    if "$ref" in found:
        found = {**full["$defs"][found["$ref"].rsplit("/", 1)[-1]], **found}
    options = found.get("anyOf", [found])
    words = [w for w in (_in_words(o) for o in options) if w]
    default = f" (default {json.dumps(found['default'])})" if "default" in found else ""
    return " or ".join(words) + default if words else ""


def _in_words(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return "one of " + ", ".join(map(str, spec["enum"]))
    kind = {
        "number": "a number",
        "integer": "a whole number",
        "string": "text",
        "boolean": "true or false",
        "null": "nothing",
    }.get(str(spec.get("type")), "a list" if spec.get("type") == "array" else "a section")
    bounds = [("minimum", "from {}"), ("exclusiveMinimum", "above {}"), ("maximum", "to {}"), ("exclusiveMaximum", "below {}")]
    return " ".join([kind, *(text.format(f"{spec[key]:g}") for key, text in bounds if key in spec)])


def _close(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(known)}"


# ---------------------------------------------------------------- trees


def _merge(into: dict[str, Any], data: Mapping[str, Any]) -> None:
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(into.get(str(key)), dict):
            _merge(into[str(key)], value)
        elif isinstance(value, Mapping):
            into[str(key)] = {}
            _merge(into[str(key)], value)
        else:
            into[str(key)] = value


def _put(into: dict[str, Any], loc: Loc, value: Any) -> None:
    for part in loc[:-1]:
        if not isinstance(into.get(part), dict):
            into[part] = {}
        into = into[part]
    into[loc[-1]] = value


def _leaves(data: Mapping[str, Any], loc: Loc = ()) -> Iterator[Loc]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*loc, str(key)))
        else:
            yield (*loc, str(key))
