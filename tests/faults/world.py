"""What the tests of a broken world share."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

_MEMORY = Path("/dev/shm")
# The machine is shared with the engines and with whoever breaks them.
CALM = {"judge": "thresholds"}


def needs(missing: str) -> pytest.MarkDecorator:
    """Skips with the remedy where a tool is missing; `missing` is empty where it is there."""
    return pytest.mark.skipif(bool(missing), reason=missing or "there")


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is one: for tests of what is written, not of how long a disk takes."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        yield Path(name)


def free_port() -> int:
    """A port that nobody has now. Below the range that connections are given, and above the one that a fleet takes from.

    Each process looks from a place of its own on, so that two do not find the same one.
    """
    for n in range(700):
        port = 32_000 + (os.getpid() * 37 + n) % 700
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port between 32000 and 32700")


def metric(url: str, name: str, **labels: str) -> float:
    """One sample of a metrics page."""
    page = httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items()):
                return float(sample.value)
    raise AssertionError(f"no {name} with {labels} at {url}/metrics")


def watched(wrong: Callable[[], str], seconds: float) -> list[str]:
    """What was wrong at any moment of so many seconds, looked at over ten times a second where the machine can."""
    found: list[str] = []
    looks, began_s = 0, time.monotonic()
    while time.monotonic() - began_s < seconds:
        if (said := wrong()) and said not in found:
            found.append(said)
        looks += 1
        time.sleep(0.02)
    assert looks > 1, "it was not watched"
    return found
