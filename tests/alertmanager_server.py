"""A throw-away Alertmanager for tests, with one webhook: its own folder, a free port, gone when its block ends.

Never the machine's own, and never in a cluster: it opens no port but its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from own_server import own_server


class Alertmanager:
    """A running server and its HTTP API."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.url = str(http.base_url).rstrip("/")

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
    arguments = {
        "config.file": folder / "alertmanager.yml",
        "storage.path": folder / "data",
        "cluster.listen-address": "",
    }
    with own_server("prometheus-alertmanager", folder, arguments) as http:
        yield Alertmanager(http)
