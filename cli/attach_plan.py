"""What `fluidpd attach` is told about a running fleet, what was found there, and whether the two fit. Pure: it asks nobody.

Never guesses a role and never takes a worker that the router does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fluidpd.names import Role

_NAME = re.compile(r"[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?")
_OPTIONS = ("bootstrap", "socket", "admin_key_file")
SHAPE = "NAME=URL[,bootstrap=PORT][,socket=PATH][,admin_key_file=PATH]"


class CannotAttach(Exception):
    """The fleet is not taken on. The text says why and what to do; nothing was started."""


class NotUnderstood(CannotAttach):
    """The command line or a settings file is wrong, whatever the fleet is like."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One worker as the command line names it."""

    name: str
    url: str
    bootstrap_port: int | None = None
    socket: Path | None = None
    admin_key_file: Path | None = None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, slots=True)
class Found:
    """What one worker says of itself. `trouble`: why it could not be asked."""

    asked: Asked
    role: Role | None = None
    engine: str = "sglang"
    version: str = ""
    bootstrap_port: int | None = None
    flippable: bool = False
    not_flippable_why: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of the router's list."""

    role: Role | None
    healthy: bool


def parse_worker(text: str) -> Asked:
    """Raises NotUnderstood."""
    name, given, rest = text.partition("=")
    if not given or not _NAME.fullmatch(name) or len(name) > 63:
        raise NotUnderstood(f"--workers {text!r}: write {SHAPE}; a name has letters, digits, '-', '_' and '.'")
    url, *options = rest.split(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise NotUnderstood(
            f"--workers {name}: {url!r} is no address: write it as the router knows it, like http://10.0.0.5:30000"
        )
    chosen: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in _OPTIONS or not value:
            raise NotUnderstood(
                f"--workers {name}: no option {option!r}: there are bootstrap=PORT, socket=PATH, admin_key_file=PATH"
            )
        chosen[key] = value
    port = chosen.get("bootstrap")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise NotUnderstood(f"--workers {name}: bootstrap={port}: a port is a number from 1 to 65535")
    return Asked(
        name,
        url.rstrip("/"),
        int(port) if port is not None else None,
        Path(chosen["socket"]).absolute() if "socket" in chosen else None,
        Path(chosen["admin_key_file"]).absolute() if "admin_key_file" in chosen else None,
    )


def parse_workers(texts: Sequence[str]) -> tuple[Asked, ...]:
    """Raises NotUnderstood, also where one thing is named twice."""
    asked = tuple(parse_worker(text) for text in texts)
    if not asked:
        raise NotUnderstood(f"name the fleet's workers: --workers {SHAPE} ...")
    for what, values in (
        ("name", [w.name for w in asked]),
        ("address", [w.url for w in asked]),
        ("socket", [w.socket for w in asked if w.socket is not None]),
    ):
        twice = {str(v) for v in values if values.count(v) > 1}  # type: ignore[arg-type]
        if twice:
            raise NotUnderstood(f"--workers: the {what} {', '.join(sorted(twice))} is there twice: each worker has its own")
    return asked


def objections(found: Sequence[Found], listed: Mapping[str, Listed], router: str) -> list[str]:
    """Why this fleet is not taken on, a sentence for each worker that stands against it. `listed` is by the router's own URLs."""
    said: list[str] = []
    for f in found:
        name, url = f.asked.name, f.asked.url
        entry = listed.get(url)
        if f.trouble:
            said.append(f"{name}: nothing usable answers at {url} ({f.trouble}): is the worker running, and is this its address?")
        elif f.role is None:
            said.append(
                f"{name}: it serves no prefill or decode role: FluidPD is for prefill/decode fleets; "
                "start it with --disaggregation-mode prefill or decode"
            )
        elif f.role is Role.PREFILL and f.bootstrap_port is None:
            said.append(f"{name}: its bootstrap port is not known: add ,bootstrap=PORT")
        elif entry is None:
            others = sorted(u for u in listed if urlsplit(u).port == urlsplit(url).port) or sorted(listed)
            known = f"it knows {', '.join(others[:6])}" if others else "it knows no worker at all"
            said.append(f"{name}: the router at {router} does not know {url}; {known}. Write the address as the router has it")
        elif entry.role is not f.role:
            said.append(
                f"{name}: it serves {f.role}, the router has it as {entry.role or 'neither prefill nor decode'}: put that right"
            )
    return [*said, *_shared_ports(found)]


def _shared_ports(found: Sequence[Found]) -> list[str]:
    at: dict[tuple[str, int], list[str]] = {}
    for f in found:
        if f.bootstrap_port is not None and not f.trouble:
            at.setdefault((f.asked.host, f.bootstrap_port), []).append(f.asked.name)
    return [
        f"{' and '.join(names)}: one bootstrap port, {port}: give each its own with --disaggregation-bootstrap-port"
        for (_, port), names in at.items()
        if len(names) > 1
    ]


def strangers(asked: Sequence[Asked], listed: Mapping[str, Listed]) -> list[str]:
    """Workers of the router that were not named: they are left alone."""
    return sorted(set(listed) - {w.url for w in asked})


# ---------------------------------------------------------------- what may be had of each worker

COLUMNS = ("worker", "role", "engine", "plugin", "lends", "gives", "hands_off", "flippable")
WITHOUT_PLUGIN = (
    "Without a plugin a worker is observed through SGLang's own HTTP surface, and may be moved by waiting until it is idle. "
    "Refused: lending and giving prompts, handing generations off, holding early requests, and the return to prefill of any "
    "worker while one without a plugin would keep what it cached of it (rule peers_hold_stale_bootstrap)."
)
TO_HAVE_IT = (
    "To have it: `pip install --no-deps fluidpd` in SGLang's environment, and start it with FLUIDPD_PLUGIN_SOCKET={socket}"
)


def capability_row(view: Mapping[str, Any]) -> dict[str, Any]:
    """A worker as the controller shows it, as a row of the table."""
    can = set(view.get("capabilities") or ())
    return {
        "worker": view["name"],
        "role": view["role"],
        "engine": f"{view['engine']} {view['engine_version']}",
        "plugin": plugin_of(view),
        "lends": "borrow" in can,
        "gives": "give" in can,
        "hands_off": "handoff" in can,
        "flippable": bool(view.get("flippable")),
    }


def plugin_of(view: Mapping[str, Any]) -> str:
    return str(view.get("plugin") or ("armed" if view.get("capabilities") else "missing"))


def explained(views: Sequence[Mapping[str, Any]], sockets: Mapping[str, Path]) -> list[str]:
    """What the table's "no" means for each worker, and what to do about it."""
    said: list[str] = []
    lacking = False
    for view in views:
        name, plugin = str(view["name"]), plugin_of(view)
        if plugin == "missing":
            said.append(f"{name}: no plugin: {view.get('plugin_why') or f'none is connected to {sockets[name]}'}")
            said.append(f"  {TO_HAVE_IT.format(socket=sockets[name])}")
        elif plugin == "disarmed":
            said.append(f"{name}: its plugin is disarmed: {view.get('plugin_why') or 'its log says why'}")
        else:
            said += [f"{name}: cannot {what}: {why}" for what, why in sorted((view.get("cannot") or {}).items())]
        lacking = lacking or plugin in ("missing", "disarmed")
        if not view.get("flippable"):
            said.append(f"{name}: not flippable: {view.get('not_flippable_why') or 'its engine does not say why'}")
    return [*said, WITHOUT_PLUGIN] if lacking else said
