"""A webhook for tests of whole fleets: it keeps what it was sent, and may answer, or do, what a test wants at that moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Told:
    """One message. `answer`: the status it got."""

    headers: dict[str, str]
    body: dict[str, Any]
    answer: int

    @property
    def key(self) -> str:
        return self.headers.get("idempotency-key", "")


@dataclass
class Hook:
    """`told` holds each message, in the order in which their answers were decided."""

    url: str = ""
    told: list[Told] = field(default_factory=list)

    def of(self, status: str, slo: str = "ttft", *, taken: bool = True) -> list[Told]:
        found = [t for t in list(self.told) if t.body["status"] == status and t.body["commonLabels"].get("slo") == slo]
        return [t for t in found if (t.answer == 200) is taken]


@contextmanager
def a_hook(answer: Callable[[dict[str, Any]], int] = lambda body: 200) -> Iterator[Hook]:
    """Serving. `answer` takes the body and gives the status; it may take its time, and the sender waits."""
    hook, one_by_one = Hook(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_by_one:
                status = answer(body)
                hook.told.append(Told({k.lower(): v for k, v in self.headers.items()}, body, status))
            try:
                self.send_response(status)
                self.end_headers()
            except OSError:
                pass  # who asked was killed meanwhile

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hook.url = f"http://127.0.0.1:{server.server_port}/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
