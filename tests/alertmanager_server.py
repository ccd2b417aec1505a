"""A throw-away Alertmanager for tests, with one webhook: its own folder, a free port, gone when its block ends.

Never the machine's own, and never in a cluster: it opens no port but its own.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml


class Alertmanager:
    """A running server and its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=10, trust_env=False)

    def alerts(self, **labels: str) -> list[dict[str, Any]]:
        """What it knows, of those with these labels."""
        found: list[dict[str, Any]] = self.http.get("/api/v2/alerts").raise_for_status().json()
        return [a for a in found if labels.items() <= a["labels"].items()]


@contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[Alertmanager]:
    """Serving. A page inhibits the ticket of the same SLO; groups are told within a second, ends too."""
    config = {
        "route": {
            "receiver": "hook",
            "group_by": ["alertname", "cluster", "slo"],
            "group_wait": "100ms",
            "group_interval": "1s",
            "repeat_interval": "1h",
            "routes": [{"receiver": "nobody", "matchers": ['alertname="Watchdog"']}],
        },
        "receivers": [{"name": "hook", "webhook_configs": [{"url": webhook, "send_resolved": True}]}, {"name": "nobody"}],
        "inhibit_rules": [
            {"source_matchers": ['severity="page"'], "target_matchers": ['severity="ticket"'], "equal": ["cluster", "slo"]}
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = {
        "config.file": folder / "alertmanager.yml",
        "storage.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
        "cluster.listen-address": "",
        "log.level": "warn",
    }
    with (folder / "alertmanager.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus-alertmanager", *(f"--{k}={v}" for k, v in arguments.items())], stdout=log, stderr=log
        )
    server = Alertmanager(f"http://127.0.0.1:{port}")
    try:
        _wait(server, process, folder / "alertmanager.log")
        yield server
    finally:
        server.http.close()
        process.kill()
        process.wait(10)


def _wait(server: Alertmanager, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if server.http.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the test Alertmanager did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)
