"""Child processes of a command: started clean, with a log each, and stopped whatever happens.

Never leaves an orphan: children die with this process, even when it is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class FleetTrouble(RuntimeError):
    """The fleet could not start or died. The message says what to do."""


def free_ports(count: int) -> list[int]:
    """Ports that are free now, outside the ephemeral range, so that no outgoing connection takes one before its owner does."""
    found: list[int] = []
    start = 20000 + (os.getpid() * 61) % 9000
    for port in (20000 + (start - 20000 + i) % 12000 for i in range(12000)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise FleetTrouble("no free TCP ports between 20000 and 32000 on 127.0.0.1: stop what holds them")


def refuse_busy(ports: Mapping[str, int]) -> None:
    """Raises FleetTrouble naming the flag of a port that somebody holds."""
    for flag, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as problem:
                raise FleetTrouble(
                    f"port {port} is in use ({problem.strerror}): stop what holds it, or choose another with {flag}"
                ) from None


def fluidpd_argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cli", *arguments]


@dataclass(slots=True)
class Child:
    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    niceness: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which stops children in order
                preexec_fn=_child_setup(self.niceness),
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill_group(self) -> None:
        """An engine's own processes are in its group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all of them are gone

    def dead(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def tail(self, lines: int = 6) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])
        except OSError:
            return ""


def launched(name: str, argv: list[str], logs: Path, *, niceness: int = 0, env: Mapping[str, str] | None = None) -> Child:
    """A started child, with its log in `logs`, in an environment without our settings, the test runner's or a venv's."""
    dropped = ("FLUIDPD_", "PYTEST_", "VIRTUAL_ENV", "PYTHONPATH")
    base = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    root = str(Path(__file__).resolve().parent.parent)
    child = Child(name, argv, {**base, "PYTHONPATH": root, **(env or {})}, logs / f"{name}.log", niceness)
    child.start()
    return child


def stop_children(children: Iterable[Child], within_s: float = 6.0) -> None:
    """SIGTERM in the order dashboard, router, controller, sidecars, engines; SIGKILL to what stays, and to its own children."""
    kinds = ("dashboard", "router", "controller", "sidecar")
    order = sorted(children, key=lambda c: kinds.index(kind) if (kind := c.name.split("-")[0]) in kinds else len(kinds))
    for child in order:
        if child.process is not None and not child.dead():
            child.process.terminate()
    deadline = time.monotonic() + within_s
    for child in order:
        if child.process is None:
            continue
        try:
            child.process.wait(max(0.05, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # the signal that follows cannot be refused
        child.kill_group()
        child.process.wait(5)


def _child_setup(niceness: int) -> Callable[[], None]:
    def setup() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.nice(niceness)  # the engines' clock comes first; what only watches may wait
        except PermissionError:
            pass  # only root may go below 0

    return setup
