"""Entry point `sglang.srt.plugins`: SGLang calls `register` early in each of its processes, before it builds anything.

Never raises, and never imports more than the engine has imported itself.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from types import FrameType
from typing import Any

from sidecar.plugin.arming import Armed, Disarmed, Guard, Hook, judge, shapes
from sidecar.plugin.hello import disarmed_hello
from sidecar.plugin.settings import SOCKET_VARIABLE, PluginSettings
from sidecar.plugin.socket import SidecarLink
from sidecar.plugin.tested import signatures

log = logging.getLogger(__name__)

# Modules whose HOOKS are registered in the process that builds the Scheduler (the part "scheduler"), and in the one with the
# TokenizerManager (the part "http"). Each imports only what that process has anyway.
SCHEDULER_PARTS = ("sidecar.plugin.scheduler_hooks",)
HTTP_PARTS = ("sidecar.plugin.http",)
_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

SETTINGS = PluginSettings()
GUARD = Guard()


def register() -> None:
    """What SGLang calls. Anything that goes wrong here leaves the engine as it was."""
    global SETTINGS
    try:
        SETTINGS = PluginSettings.of(os.environ)
        GUARD.max_errors = SETTINGS.max_errors
        for note in SETTINGS.notes:
            log.warning("fluidpd: %s", note)
        if not SETTINGS.socket_path:
            log.info("fluidpd: %s is not set; the plugin stays out", SOCKET_VARIABLE)
            return
        if _called_by("run_detokenizer_process") or _called_by("run_data_parallel_controller_process"):
            return  # nothing of ours happens there
        if _called_by("run_scheduler_process"):
            _arm(SCHEDULER_PARTS)
        else:
            _keep_metrics_whole()
            _arm(HTTP_PARTS)
    except Exception as error:
        log.exception("fluidpd: the plugin could not be registered; the engine goes on without it")
        GUARD.disarm(f"registration failed: {error!r}")


def link(hello: Any) -> SidecarLink:
    """A link to the sidecar of this process's worker; `hello` makes the hello of each new connection."""
    return SidecarLink(SETTINGS.socket_path, hello)


def touched(parts: tuple[str, ...]) -> tuple[list[Hook], list[str]]:
    """All hooks, and every function of the engine that the plugin hooks or calls: the rows of the tested table."""
    modules = [importlib.import_module(name) for name in parts]
    hooks = [hook for module in modules for hook in module.HOOKS]
    return hooks, sorted({h.target for h in hooks} | {target for module in modules for target in module.USES})


def version() -> str:
    return str(getattr(importlib.import_module("sglang"), "__version__", "unknown"))


def _arm(parts: tuple[str, ...]) -> None:
    # The version first: another version's modules may not even have the functions to look at.
    arming, hooks = judge(version(), signatures(), {}), list[Hook]()
    if isinstance(arming, Armed):
        hooks, targets = touched(parts)
        arming = judge(version(), signatures(), shapes(targets))
    if isinstance(arming, Disarmed):
        GUARD.disarm(arming.why)
        _say_disarmed(arming)
        return
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    for hook in hooks:
        name = hook.target.removeprefix("sglang.srt.")
        registry.HookRegistry.register(hook.target, GUARD.guarded(name, hook), registry.HookType.AROUND)
    if parts is SCHEDULER_PARTS:
        _without_cuda()
    log.info("fluidpd: armed for SGLang %s with %d hooks", version(), len(hooks))


def _keep_metrics_whole() -> None:
    """Looking at the engine's functions imports prometheus_client, which then keeps the store that it finds configured: SGLang
    would choose its shared folder too late, and lose every metric of its HTTP process. So it is chosen here, as a person may."""
    if _METRICS_FOLDER in os.environ or "prometheus_client" in sys.modules or not _wants_metrics():
        return
    folder = tempfile.mkdtemp(prefix="fluidpd-metrics-")
    os.environ[_METRICS_FOLDER] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _wants_metrics() -> bool:
    arguments = (_frame_of("_launch_subprocesses") or {}).get("server_args")
    return bool(getattr(arguments, "enable_metrics", False)) or "--enable-metrics" in sys.argv


def _without_cuda() -> None:
    """On a CPU, SGLang's mooncake sender pins host memory that cannot be pinned, and the scheduler dies of it."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        conn: Any = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
        conn.MooncakeKVSender.supports_host_tensor_indices = False


def _say_disarmed(arming: Disarmed) -> None:
    """Tell the sidecar, from the scheduler's process only, where the engine's arguments are at hand."""
    frame = _frame_of("run_scheduler_process")
    arguments = (frame or {}).get("server_args")
    role = str(getattr(arguments, "disaggregation_mode", ""))
    if role not in ("prefill", "decode"):
        return
    link(lambda: disarmed_hello(role, arming.version, arming.why)).start()


def _called_by(function: str) -> bool:
    return _frame_of(function) is not None


def _frame_of(function: str) -> Mapping[str, Any] | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function:
            return frame.f_locals
        frame = frame.f_back
    return None
