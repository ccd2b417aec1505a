"""Stand-ins for the sidecars of a few workers, in this process: they carry claims, renew grants, and lose what they are told to.

Never cleverer than a sidecar: what they do is in docs/protocol.md.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]
EPOCHS = itertools.count(1)  # a leader's epoch never falls


class StubSidecar:
    """One worker's. Serves both parts of its plugin; keeps what each said."""

    def __init__(self, name: str, path: Path, bootstrap: str, tbt_slo_s: float = 0.4) -> None:
        self.name = name
        self.bootstrap = bootstrap
        self.tbt_slo_s = tbt_slo_s
        self.hellos: list[Line] = []
        self.sample: Line = {}
        self.samples_total = 0
        self.history: deque[tuple[float, float, float]] = deque(maxlen=20_000)  # at, lent steps, borrowed tokens still open
        self.claims: list[Line] = []  # every claim that came here as the prefill side, and its answer
        self.results: list[Line] = []  # every answer that the decode side got
        self.replies: dict[str, Line] = {}
        self.lose_given = 0  # the next ones that give a room never arrive
        self.rooms: dict[str, Line] = {}  # claim id -> claim_wanted
        self.peers: tuple[StubSidecar, ...] = ()
        self._parts: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        self._server.bind(str(path))
        self._server.listen(4)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()
        self.drop_connections()  # the plugins look for whoever listens here next

    def send(self, part: str, message: Line) -> bool:
        """False if it is lost: nobody is at the other end. What was lost is asked again, or renewed, as with a real sidecar."""
        with self._lock:
            connection = self._parts.get(part)
            if connection is None:
                return False
            try:
                connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return False
            return True

    def order(self, what: str, timeout_s: float = 30.0, part: str = "scheduler", **fields: Any) -> Line:
        id_ = f"o{next(self._ids)}"
        until = time.monotonic() + timeout_s
        while not self.send(part, {"type": "order", "id": id_, "what": what, **fields}):
            if time.monotonic() > until:
                raise AssertionError(f"{self.name} has no {part} to ask for {what}")
            time.sleep(0.005)  # it was dropped, and comes back
        while id_ not in self.replies:
            if time.monotonic() > until:
                raise AssertionError(f"{self.name} did not answer {what}")
            time.sleep(0.005)
        return self.replies[id_]

    def value(self, name: str) -> float:
        found = self.sample.get("values", {}).get(name)
        return float(found) if isinstance(found, int | float) else 0.0

    def lending_s(self, after_lent_steps: float) -> tuple[float, float]:
        """When lent work began and ended, as the samples told it, since there were so many lent steps."""
        seen = list(self.history)
        active = [i for i, (_, lent, left) in enumerate(seen) if lent > after_lent_steps or (left and lent == after_lent_steps)]
        assert active, "nothing was lent"
        last = next(i for i, (_, lent, _) in enumerate(seen) if lent == seen[-1][1])
        return seen[active[0]][0], seen[max(last, active[0])][0]

    @property
    def given_rooms(self) -> set[int]:
        return {int(said["room"]) for said in self.claims if said["given"]}

    @property
    def given_total(self) -> int:
        return len(self.given_rooms)

    def drop_connections(self) -> None:
        """As if this sidecar had died and come back."""
        for part in list(self._parts.values()):
            with suppress(OSError):  # it has gone by itself
                part.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        part = ""
        try:
            with connection.makefile("rb") as lines:
                hello = json.loads(lines.readline())
                self.hellos.append(hello)
                part = hello["part"]
                self._parts[part] = connection
                welcome = {"type": "welcome", "protocol": 1, "sample_hz": 20.0, "ttft_slo_s": 2.0, "tbt_slo_s": self.tbt_slo_s}
                self.send(hello["part"], welcome)
                for raw in lines:
                    self._hear(json.loads(raw))
        except (OSError, ValueError):
            pass
        finally:
            if self._parts.get(part) is connection:
                del self._parts[part]
            connection.close()

    def _hear(self, said: Line) -> None:
        match said["type"]:
            case "sample":
                if "batch" in said["values"]:
                    self.sample, self.samples_total = said, self.samples_total + 1
                    lent, left = (self.value(name) for name in ("lent_steps_total", "borrow_open_tokens"))
                    self.history.append((time.monotonic(), lent, left))
            case "reply":
                self.replies[said["id"]] = said
            case "claim_wanted":
                self.rooms[said["id"]] = said
                for peer in self.peers:
                    if peer.bootstrap == said["bootstrap"]:
                        peer.send(
                            "scheduler",
                            {"type": "claim", "id": f"{self.name}/{said['id']}", "room": said["room"], "claimer": self.name},
                        )
            case "claim_answer":
                self.claims.append(said)
                claimer, id_ = said["id"].split("/", 1)
                if self.lose_given and said["given"]:
                    self.lose_given -= 1
                    return
                for peer in self.peers:
                    if peer.name == claimer:
                        result = {**said, "type": "claim_result", "id": id_}
                        peer.results.append(result)
                        peer.send("scheduler", result)


class Grants:
    """What the controller would renew every 200 ms: each decode worker may claim from every prefill worker, with etas."""

    def __init__(self, sidecars: tuple[StubSidecar, ...], **terms: Any) -> None:
        self.terms = terms
        self.rate_tokens_per_s: float | None = None  # of the prefill workers; None: what they measured
        self._sidecars = sidecars
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def _renew(self) -> None:
        while not self._stop.wait(0.1):
            prefill = [s for s in self._sidecars if s.sample.get("role") == "prefill"]
            terms = {
                "kind": "grant",
                "prefill": [self._peer(p) for p in prefill],
                "max_outstanding_tokens": 16384,
                "tbt_slo_s": 0.4,
                "guard_s": 0.003,
                "ttl_s": 0.6,
                "claim_margin": 0.25,
                "progress_floor_s": 0.25,
                **self.terms,
            }
            for s in self._sidecars:
                if s.sample.get("role") == "decode":
                    s.send("scheduler", {"type": "grant", "epoch": next(EPOCHS), "terms": terms})

    def _peer(self, p: StubSidecar) -> Line:
        rate = self.rate_tokens_per_s or p.value("prefill_tokens_per_s") or 1000.0
        ahead, etas = p.value("started_tokens"), {}
        for prompt in p.sample.get("queue") or ():
            ahead += prompt["uncached_tokens"]
            etas[str(prompt["room"])] = ahead / rate
        return {"worker": p.name, "sidecar_url": "", "bootstrap": p.bootstrap, "backlog_s": ahead / rate, "etas_s": etas}

    @contextmanager
    def renewed(self) -> Iterator[Grants]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(2)
            for s in self._sidecars:
                if s.sample.get("role") == "decode":
                    s.send("scheduler", {"type": "revoke", "why": "the test is over"})
