"""What a person can set about the plugin: environment variables of the SGLang process. Never reads a file.

Without FLUIDPD_PLUGIN_SOCKET the plugin stays out of the engine wholly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SOCKET_VARIABLE = "FLUIDPD_PLUGIN_SOCKET"
FUSE_VARIABLE = "FLUIDPD_PLUGIN_FUSE"  # auto, on, off: whether a borrowed chunk shares its step with the decode batch
ERRORS_VARIABLE = "FLUIDPD_PLUGIN_MAX_ERRORS"
STATE_VARIABLE = "FLUIDPD_PLUGIN_STATE"
VARIABLES = (SOCKET_VARIABLE, FUSE_VARIABLE, ERRORS_VARIABLE, STATE_VARIABLE)


@dataclass(frozen=True, slots=True)
class PluginSettings:
    socket_path: str = ""
    fuse: bool | None = None  # None: fused where there is a GPU. On a CPU attention recomputes the prefix for every row of a step
    max_errors: int = 5
    state_dir: str = ""  # a folder for what is learned; the socket's own if not given
    notes: tuple[str, ...] = ()  # values that were not understood, and what is used instead

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> PluginSettings:
        notes: list[str] = []
        said = environment.get(FUSE_VARIABLE, "auto").strip().lower()
        if said not in ("auto", "on", "off"):
            notes.append(f"{FUSE_VARIABLE}={said!r} is not auto, on or off: auto is used")
        errors = environment.get(ERRORS_VARIABLE, "5").strip()
        if not errors.isdigit() or int(errors) < 1:
            notes.append(f"{ERRORS_VARIABLE}={errors!r} is not a number above 0: 5 is used")
            errors = "5"
        return cls(
            socket_path=environment.get(SOCKET_VARIABLE, "").strip(),
            fuse={"on": True, "off": False}.get(said),
            max_errors=int(errors),
            state_dir=environment.get(STATE_VARIABLE, "").strip(),
            notes=tuple(notes),
        )
