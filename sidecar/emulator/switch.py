"""POST /pd_role_switch with SGLang's own answers and refusals, and the faults that tests inject into it.

Never drains: a worker that is not idle refuses, as the real one does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Literal, get_args

from pydantic import BaseModel

from fluidpd.names import Role
from sidecar.emulator.engine import Engine
from sidecar.emulator.settings import SwitchTimes

Fault = Literal[
    "ok",
    "busy",
    "dead",
    "timeout_then_done",
    "ok_but_nothing",
    "graph_memory",
    "backend",
    "malformed",  # 200 with a body that is not SGLang's; nothing was done
    "server_error",  # 500, and nothing was done
    "done_but_500",
    "teapot",  # a status that SGLang does not answer with
]
FAULTS: tuple[str, ...] = get_args(Fault)
GRAPH_HEADROOM_GB = 60.0
_NEVER_S = 3600.0

Answered = tuple[int, dict[str, Any]]
_STRANGE: dict[str, Answered] = {
    "malformed": (200, {"message": "done", "success": "yes"}),
    "server_error": (500, {"error": "injected fault"}),
    "teapot": (418, {"success": True, "message": "ok"}),
}


class SwitchBody(BaseModel):
    """The fields of SGLang's PdRoleSwitchReqInput, read as leniently as it reads them."""

    new_role: Literal["prefill", "decode", ""] = ""
    decode_cuda_graph_bs: list[int] | None = None
    decode_cuda_graph_memory_gb: float | None = None
    prepare_only: bool = False


class RoleSwitch:
    """Invariant: once `is_unhealthy`, the engine answers no switch and serves nothing until its process is restarted."""

    def __init__(self, engine: Engine, times: SwitchTimes, seed: str, changed: Callable[[], None]) -> None:
        self.is_unhealthy = False
        self.is_switching = False
        self.switches = 0
        self._engine = engine
        self._times = times
        self._random = random.Random(seed)
        self._changed = changed
        self._has_graphs = engine.model.role is Role.DECODE
        self._fault: str = "ok"
        self._fault_times = 0
        self._spares_preparation = False

    @property
    def state(self) -> Literal["serving", "switching", "unhealthy"]:
        return "unhealthy" if self.is_unhealthy else "switching" if self.is_switching else "serving"

    @property
    def faults_left(self) -> int:
        """How many requests are still to be answered as injected."""
        return self._fault_times

    def inject(self, fault: str, times: int, spares_preparation: bool = False) -> None:
        """The next `times` requests are answered so; with `spares_preparation` only those that ask for the switch itself."""
        self._fault, self._fault_times, self._spares_preparation = fault, times, spares_preparation

    async def ask(self, body: dict[str, Any]) -> Answered:
        """The answer to one request: status and body."""
        old, wanted = self._engine.model.role, body.get("new_role", "")
        fault = self._next_fault(bool(body.get("prepare_only")))

        def no(message: str, safe: bool = True) -> Answered:
            return 400, _answer(False, message, old, wanted, safe)

        if self.is_unhealthy:
            return no("instance is unhealthy after a failed role switch; restart required", False)
        if self.is_switching:
            return no("another role switch is already in progress", False)
        if wanted not in ("prefill", "decode"):
            return no(f"invalid new_role={wanted!r}")
        if fault in _STRANGE:
            return _STRANGE[fault]
        if fault == "backend":
            return no("transfer backend 'nixl' does not support runtime role switch")
        if wanted == old.value:
            return 200, _answer(True, "ready" if body.get("prepare_only") else "ok", old, wanted, False)
        if fault == "busy" or not self._engine.model.idle:
            return no("instance is not idle; drain all requests before switching")
        refusal = self._graph_refusal(Role(wanted), body, fault)
        if refusal:
            return no(refusal)
        if body.get("prepare_only"):
            return 200, _answer(True, "ready", old, wanted, True)
        return await self._switch(old, Role(wanted), fault)

    def _graph_refusal(self, role: Role, body: dict[str, Any], fault: str) -> str:
        if fault == "graph_memory":
            return f"insufficient decode CUDA graph headroom: required={GRAPH_HEADROOM_GB:.3f} GB, available=0.000 GB"
        if role is not Role.DECODE or self._has_graphs:
            return ""
        wanted_gb = body.get("decode_cuda_graph_memory_gb")
        if wanted_gb is None:
            return "decode_cuda_graph_memory_gb is required before capturing decode graphs"
        if wanted_gb < 0:
            return "decode_cuda_graph_memory_gb must be non-negative"
        if wanted_gb > GRAPH_HEADROOM_GB:
            return f"insufficient decode CUDA graph headroom: required={wanted_gb:.3f} GB, available={GRAPH_HEADROOM_GB:.3f} GB"
        return ""

    async def _switch(self, old: Role, new: Role, fault: str) -> Answered:
        self.is_switching = True
        self._changed()
        try:
            low, high = self._times.to_decode if new is Role.DECODE else self._times.to_prefill
            await asyncio.sleep(self._random.uniform(low, high))
            if fault == "dead":
                self.is_unhealthy = True
                message = "role switch failed; instance unhealthy, restart required: injected fault"
                return 400, _answer(False, message, old, new.value, False)
            if fault != "ok_but_nothing":
                self._engine.model.role = new
                self._has_graphs = self._has_graphs or new is Role.DECODE
                self.switches += 1
        finally:
            self.is_switching = False
            self._changed()
            self._engine.wake()
        if fault == "timeout_then_done":
            await asyncio.sleep(_NEVER_S)
        if fault == "done_but_500":
            return _STRANGE["server_error"]
        return 200, _answer(True, "ok", old, new.value, False)

    def _next_fault(self, prepares: bool) -> str:
        if self._fault_times <= 0 or (prepares and self._spares_preparation):
            return "ok"
        self._fault_times -= 1
        return self._fault


def _answer(success: bool, message: str, old: Role, new: str, safe: bool) -> dict[str, Any]:
    said = {"success": success, "message": message, "old_role": old.value, "new_role": new, "safe_to_restore": safe}
    return {"rid": None, "http_worker_ipc": None, **said}
