"""`python -m cli.reference`: rewrites the parts of docs/ that repeat the code: settings, metrics and the state diagram.

Never writes prose: only what stands between a pair of markers. A test fails when these parts are out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cli.meanings import meaning
from cli.output import cell
from cli.reference_metrics import controller_metrics, engine_readings, page_troubles, sidecar_metrics
from fluidpd.transition import diagram

DOCS = Path(__file__).resolve().parent.parent / "docs"


def models_of(kind: Any) -> list[type[BaseModel]]:
    """The models inside a field's type: itself, or the members of a union or a collection."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in models_of(part)]


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf setting with its dotted path; a list of models continues with []."""
    for name, field in model.model_fields.items():
        inner = models_of(field.annotation)
        if not inner:
            yield f"{prefix}{name}", field
            continue
        listed = "" if isinstance(field.annotation, type) or type(None) in get_args(field.annotation) else "[]"
        for each in inner:
            yield from settings_of(each, f"{prefix}{name}{listed}.")


WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", type(None): "none"}


def words(kind: Any) -> str:
    """A type as a person says it."""
    if kind in WORDS:
        return WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not Ellipsis]
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (tuple, list):
        return ("two of: " if len(parts) == 2 else "list of: ") + words(parts[0])
    if parts:
        return " or ".join(words(part) for part in parts)
    return "text" if "Secret" in str(kind) else getattr(kind, "__name__", str(kind))


def allowed(field: FieldInfo) -> str:
    """Type and bounds, as short as they can be said."""
    bounds = []
    for rule in field.metadata:
        for sign, name in ((">", "gt"), (">=", "ge"), ("<", "lt"), ("<=", "le")):
            if (limit := getattr(rule, name, None)) is not None:
                bounds.append(f"{sign} {limit:,}")
    return ", ".join([words(field.annotation), *bounds])


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default_factory is not None else field.default  # type: ignore[call-arg]
    if value is None or value is PydanticUndefined:
        return "none"
    if value == () or value == "":
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    shown = cell(value) if isinstance(value, float) else str(getattr(value, "value", value))
    return "`" + shown.replace("|", "\\|") + "`"


def table(model: type[BaseModel]) -> str:
    lines = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for path, field in settings_of(model):
        said = (field.description or meaning(model.__name__, path)).replace("|", "\\|")
        lines.append(f"| `{path}` | {default(field)} | {allowed(field)} | {said} |")
    return "\n".join(lines)


def controller_settings() -> str:
    from controller.settings import ControllerSettings

    return table(ControllerSettings)


def sidecar_settings() -> str:
    from sidecar.settings import SidecarSettings

    return table(SidecarSettings)


def dashboard_settings() -> str:
    from dashboard.settings import DashboardSettings

    return table(DashboardSettings)


def emulator_settings() -> str:
    from sidecar.emulator.settings import EmulatorSettings

    return table(EmulatorSettings)


def state_diagram() -> str:
    return f"```text\n{diagram()}\n```"


PARTS: dict[str, Callable[[], str]] = {
    "controller-settings": controller_settings,
    "sidecar-settings": sidecar_settings,
    "dashboard-settings": dashboard_settings,
    "emulator-settings": emulator_settings,
    "state-diagram": state_diagram,
    "controller-metrics": controller_metrics,
    "sidecar-metrics": sidecar_metrics,
    "engine-readings": engine_readings,
    "page-troubles": page_troubles,
}


def rewritten(text: str) -> str:
    """The text with everything between its markers made anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- begin {found[1]} -->\n{PARTS[found[1]]()}\n<!-- end {found[1]} -->"

    return re.sub(r"<!-- begin ([a-z-]+) -->\n.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)


def main() -> int:
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        try:
            after = rewritten(before)
        except ImportError as problem:
            print(f"{page.name} left as it is: {problem}", file=sys.stderr)
            continue
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"rewrote {page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
