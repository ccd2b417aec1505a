"""A throw-away Prometheus for tests, in its own folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from own_server import own_server


class Prometheus:
    """A running server and its HTTP API."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query, as the API gives them. Raises on an expression that is none."""
        answer = self.http.get("/api/v1/query", params={"query": expr})
        assert answer.status_code == 200, f"{expr}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def numbers(self, expr: str) -> list[float]:
        """Values that are numbers: a quantile of nothing is none."""
        return [n for one in self.query(expr) if not math.isnan(n := float(one["value"][1]))]

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/api/v1/targets").json()["data"]["activeTargets"]
        return found

    def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/api/v1/alerts").json()["data"]["alerts"]
        return found


def scrape_config(controllers: Sequence[str], discovery: str, bearer_file: Path | None = None) -> list[dict[str, Any]]:
    """As docs/install.md has it: the controllers, and what their /sd lists."""
    auth: Mapping[str, Any] = {"authorization": {"credentials_file": str(bearer_file)}} if bearer_file is not None else {}
    return [
        {"job_name": "fluidpd-controller", "static_configs": [{"targets": list(controllers)}], **auth},
        {"job_name": "fluidpd-workers", "http_sd_configs": [{"url": discovery, "refresh_interval": "1s", **auth}]},
    ]


@contextmanager
def prometheus(
    folder: Path, scrapes: Sequence[Mapping[str, Any]], rules: Path | None = None, every: str = "2s"
) -> Iterator[Prometheus]:
    """Serving. `every` is the interval of scrapes and of rules."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "scrape_configs": list(scrapes),
    }
    if rules is not None:
        config["rule_files"] = [str(rules)]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    arguments = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
    with own_server("prometheus", folder, arguments) as http:
        yield Prometheus(http)
