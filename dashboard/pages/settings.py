"""Settings: what is in force, at the controller and here, and where each value came from. To read, never to change.

Never shows a secret: the controller masks its own, and this dashboard's are not among what is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import SecretStr

from dashboard.controller_client import Problem
from dashboard.pages.frame import Frame
from dashboard.settings import DashboardSettings

_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^/@]*@")


@dataclass(frozen=True, slots=True)
class SettingView:
    key: str
    value: str
    default: str
    source: str
    is_default: bool


@dataclass(frozen=True, slots=True)
class SectionView:
    name: str
    settings: tuple[SettingView, ...]


@dataclass(frozen=True, slots=True)
class SettingsPage:
    template: ClassVar[str] = "settings.html"
    frame: Frame
    sections: tuple[SectionView, ...]
    problem: Problem | None
    wanted: str
    changed_only: bool


def page(
    around: Frame, told: list[dict[str, Any]] | Problem, own: DashboardSettings, wanted: str, changed_only: bool
) -> SettingsPage:
    found = [] if isinstance(told, Problem) else _sections(told)
    every = (*found, SectionView("this dashboard", own_settings(own)))
    shown = []
    for section in every:
        kept = tuple(
            s
            for s in section.settings
            if (wanted.lower() in f"{s.key} {s.value} {s.source}".lower()) and not (changed_only and s.is_default)
        )
        if kept:
            shown.append(SectionView(section.name, kept))
    return SettingsPage(around, tuple(shown), told if isinstance(told, Problem) else None, wanted, changed_only)


def _sections(told: Sequence[dict[str, Any]]) -> list[SectionView]:
    named: dict[str, list[SettingView]] = {}
    for s in told:
        section, _, key = str(s["key"]).rpartition(".")
        is_default = s["source"] == "default"
        view = SettingView(str(s["key"]), _shown(s["value"]), _shown(s["default"]), str(s["source"]), is_default)
        named.setdefault(section or key, []).append(view)
    return [SectionView(f"controller: {name}", tuple(views)) for name, views in named.items()]


def own_settings(own: DashboardSettings) -> tuple[SettingView, ...]:
    found = []
    for name, field in DashboardSettings.model_fields.items():
        value, default = getattr(own, name), field.default
        is_set = name in own.model_fields_set
        source = f"environment FLUIDPD_DASHBOARD__{name.upper()}, or the command line" if is_set else "default"
        found.append(SettingView(f"dashboard.{name}", _shown(value), _shown(default), source, not is_set))
    return tuple(found)


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, SecretStr):
        return "***"
    if isinstance(value, str):
        return _PASSWORD.sub(r"\1:***@", value)
    if isinstance(value, list | tuple):
        return ", ".join(_shown(v) for v in value) or "none"
    if isinstance(value, bool | int | float | dict):
        return json.dumps(value)
    return str(value)
