"""A server of somebody else's for one test: on a free port, its log in the test's folder, gone when its block ends.

Never the machine's own: Debian's packages start theirs where there is systemd, and those are left alone.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cli.children import free_ports


@contextmanager
def own_server(command: str, folder: Path, arguments: Mapping[str, object]) -> Iterator[httpx.Client]:
    """A client of Prometheus or Alertmanager, once `/-/ready` says so. Raises RuntimeError with the end of its log."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    flags: dict[str, object] = {**arguments, "web.listen-address": address, "log.level": "warn"}
    path = folder / f"{command}.log"
    with path.open("w") as log:
        process = subprocess.Popen([command, *(f"--{k}={v}" for k, v in flags.items())], stdout=log, stderr=log)
    with httpx.Client(base_url=f"http://{address}", timeout=10, trust_env=False) as http:
        try:
            _wait(http, process, command, path)
            yield http
        finally:
            process.kill()
            process.wait(10)


def _wait(http: httpx.Client, process: subprocess.Popen[Any], command: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if http.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the test's {command} did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
