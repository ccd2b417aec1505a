"""Network namespaces, alone or two joined by a veth pair, and iptables rules in them. Rule counters prove each cut.

Never gives one of them a default route, and keeps both ends of a pair out of the machine's own namespace: what is cut off could
otherwise leave by another way, and would be answered.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

Found = TypeVar("Found")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


def missing() -> str:
    """Why there can be no namespaces here, with what to do; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run `sudo make faults`"
    absent = [name for name in ("ip", "iptables") if shutil.which(name) is None]
    if absent:
        return f"no {' and no '.join(absent)}: apt-get install iproute2 iptables"
    return ""


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Namespace:
    """One of the two; `address` is its end of the veth pair."""

    name: str
    address: str
    device: str

    def argv(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *argv]

    def run(self, *argv: str) -> str:
        return _run(*self.argv(*argv))

    def call(self, work: Callable[[], Found]) -> Found:
        """`work()` in a thread inside the namespace; sockets that it opens belong there."""
        return in_namespace(self.name, work)


def in_namespace(name: str, work: Callable[[], Found]) -> Found:
    found: list[Any] = []

    def inside() -> None:
        try:
            enter(name)
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=inside, daemon=True)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def enter(name: str) -> None:
    """Put the calling thread, and no other, into the namespace."""
    with open(Path("/run/netns") / name) as handle:
        _enter(handle)


def _enter(handle: IO[str]) -> None:
    if _LIBC.setns(handle.fileno(), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {handle.name}")


@contextmanager
def alone() -> Iterator[Namespace]:
    """A namespace with a loopback device and nothing else. The calling thread is in it, and all that it starts, until the end."""
    name = f"fpd{os.getpid() % 100_000}x{next(_numbers)}"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        with open("/proc/thread-self/ns/net") as home:
            enter(name)
            try:
                yield Namespace(name, "127.0.0.1", "lo")
            finally:
                _enter(home)
    finally:
        _run("ip", "netns", "delete", name)


@contextmanager
def pair() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces that reach each other and nothing else. Taken down whatever happens."""
    number = next(_numbers)
    tag = f"fpd{os.getpid() % 100_000}x{number}"
    net = f"10.77.{number % 250}"
    ends = (Namespace(f"{tag}a", f"{net}.1", f"{tag}a"[-15:]), Namespace(f"{tag}b", f"{net}.2", f"{tag}b"[-15:]))
    made: list[str] = []
    try:
        for end in ends:
            _run("ip", "netns", "add", end.name)
            made.append(end.name)
        a, b = ends
        _run("ip", "-n", a.name, "link", "add", a.device, "type", "veth", "peer", "name", b.device, "netns", b.name)
        for end in ends:
            _run("ip", "-n", end.name, "addr", "add", f"{end.address}/24", "dev", end.device)
            for device in ("lo", end.device):
                _run("ip", "-n", end.name, "link", "set", device, "up")
            routes = _run("ip", "-n", end.name, "route", "show")
            assert "default" not in routes, f"{end.name} has a default route: {routes}"
        yield ends
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


@dataclass(slots=True)
class Cut:
    """One DROP rule. `packets` is what it has swallowed so far."""

    where: Namespace
    chain: str
    match: tuple[str, ...]
    comment: str

    @property
    def packets(self) -> int:
        for line in self.where.run("iptables", "-nvxL", self.chain).splitlines():
            if f"/* {self.comment} */" in line:
                return int(line.split()[0])
        return 0


@contextmanager
def cut(where: Namespace, chain: str, *match: str) -> Iterator[Cut]:
    """Drop what `match` matches in INPUT or OUTPUT of a namespace until the block ends."""
    rule = Cut(where, chain, match, f"cut{next(_numbers)}")
    tail = (*match, "-m", "comment", "--comment", rule.comment, "-j", "DROP")
    where.run("iptables", "-A", chain, *tail)
    try:
        yield rule
    finally:
        where.run("iptables", "-D", chain, *tail)
