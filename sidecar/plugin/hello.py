"""What each part of the plugin says first. Never states a capability that the part does not serve."""

from __future__ import annotations

import os

from fluidpd.names import Role
from sidecar.protocol import PluginHello

# New for every start of the engine, and the same in all its processes: the first one hands it on to those that it spawns.
BOOT = os.environ.setdefault("FLUIDPD_PLUGIN_BOOT", os.urandom(6).hex())


def disarmed_hello(role: str, version: str, why: str) -> PluginHello:
    return PluginHello(
        part="scheduler",
        engine="sglang",
        engine_version=version,
        boot=BOOT,
        role=Role(role),
        capabilities=(),
        disarmed_why=why,
    )
