"""Addresses of the pages about one thing: a worker, a move, a decision, a result, an incident.

Never builds an address by hand elsewhere.
"""

from __future__ import annotations

from urllib.parse import quote

WORKER, WORKER_DATA = "/worker/{name:path}", "/data/worker/{name:path}"
TRANSITION = "/transition/{id:path}"
DECISION = "/decision/{id:int}"
RESULT = "/replay/{file:path}"
INCIDENT = "/incident"


def worker(name: str) -> str:
    return f"/worker/{quote(name, safe='')}"


def worker_data(name: str) -> str:
    return f"/data/worker/{quote(name, safe='')}"


def transition(id: str) -> str:
    return f"/transition/{quote(id, safe='')}"


def decision(id: int) -> str:
    return f"/decision/{id}"


def result(file: str) -> str:
    return f"/replay/{quote(file, safe='')}"
