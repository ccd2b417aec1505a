"""Proof that a message comes from somebody who knows the secret: signed requests, and sealed frames of one connection.

Never reads a clock and never makes a random number: time and nonces are arguments.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import OrderedDict
from dataclasses import dataclass

SIGNATURE_HEADER = "X-FluidPD-Signature"
WINDOW_S = 60.0
NONCES_KEPT = 200_000
_SHAPE = re.compile(r"v1,t=(\d{1,12}),n=([A-Za-z0-9_-]{16,64}),e=(\d{1,15}),s=([0-9a-f]{64})")
_MAC_CHARS = 64


class NotProven(Exception):
    """Whoever sent this did not prove who they are. `rule` names what was wrong."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(why)
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Signed:
    """What is signed of a request. `sender` is the address that the sender goes by, `epoch` the highest that it has seen."""

    method: str
    path: str
    body: bytes
    sender: str
    epoch: int


def signature(key: bytes, request: Signed, *, at_wall_s: float, nonce: str) -> str:
    """The value of SIGNATURE_HEADER. `nonce`: 16 to 64 characters of A-Z a-z 0-9 _ -, never used before."""
    at = int(at_wall_s)
    return f"v1,t={at},n={nonce},e={request.epoch},s={_mac_of(key, request, str(at), nonce)}"


def _mac_of(key: bytes, request: Signed, at: str, nonce: str) -> str:
    head = "\n".join((at, nonce, str(request.epoch), request.sender, request.method, request.path))
    return hmac.digest(key, head.encode() + b"\n" + hashlib.sha256(request.body).digest(), "sha256").hex()


class Verifier:
    """Judges signed requests. Invariant: no nonce is taken twice, whatever the wall clock does meanwhile."""

    def __init__(self, key: bytes, window_s: float = WINDOW_S, keep: int = NONCES_KEPT) -> None:
        self._key = key
        self._window_s = window_s
        self._keep = keep
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._forgotten_until = 0  # stamps up to here may have been forgotten, so they are too old for good

    def judge(self, header: str, method: str, path: str, body: bytes, sender: str, now_wall_s: float) -> Signed:
        """The request as its sender signed it. Raises NotProven."""
        found = _SHAPE.fullmatch(header)
        if found is None:
            raise NotProven("signature_missing", f"send {SIGNATURE_HEADER}: v1,t=SECONDS,n=NONCE,e=EPOCH,s=HMAC")
        at, nonce, epoch, mac = found.groups()
        request = Signed(method, path, body, sender, int(epoch))
        if not hmac.compare_digest(mac, _mac_of(self._key, request, at, nonce)):
            raise NotProven("signature_wrong", "the signature fits neither the fleet secret nor this request")
        age_s = now_wall_s - int(at)
        if abs(age_s) > self._window_s or int(at) <= self._forgotten_until:
            raise NotProven(
                "signature_old", f"signed {age_s:+.0f} s ago, allowed are {self._window_s:.0f} s: are both clocks right?"
            )
        if nonce in self._seen:
            raise NotProven("replay", "this request was seen before")
        self._forget(now_wall_s)
        if len(self._seen) >= self._keep:
            raise NotProven("too_many_requests", f"more than {self._keep} signed requests within {2 * self._window_s:.0f} s")
        self._seen[nonce] = int(at)
        return request

    def _forget(self, now_wall_s: float) -> None:
        """Oldest arrivals first; one that is still valid holds those behind it, which only costs memory."""
        while self._seen:
            nonce, at = next(iter(self._seen.items()))
            if now_wall_s - at <= self._window_s:
                return
            del self._seen[nonce]
            self._forgotten_until = max(self._forgotten_until, at)


# ---------------------------------------------------------------- one connection


def key_of_secret(secret: str) -> bytes:
    return secret.encode()


def key_of_token(sha256: str) -> bytes:
    """The key of a `sidecar` token: both sides know its digest, and the token itself never travels."""
    return hmac.digest(bytes.fromhex(sha256), b"fluidpd link", "sha256")


def token_id(sha256: str) -> str:
    """How a token is named in lists, in the audit and on the link, without giving it or its digest away."""
    return hashlib.sha256(b"fluidpd token id" + bytes.fromhex(sha256)).hexdigest()[:12]


def session_key(key: bytes, challenge: str, nonce: str, worker: str) -> bytes:
    """The key of one connection: another one for each, since both sides chose a part of it."""
    return hmac.digest(key, "\n".join(("fluidpd session", challenge, nonce, worker)).encode(), "sha256")


class Seal:
    """One direction of a connection. Invariant: frame n is taken once, as it was sent, after frame n - 1."""

    def __init__(self, key: bytes, sender: str) -> None:
        self._key = key
        self._sender = sender.encode()
        self._count = 0

    def close(self, text: str) -> str:
        """The frame to send: the proof, a blank, the text."""
        return f"{self._next(text.encode())} {text}"

    def open(self, frame: str) -> str:
        """The text of a frame. Raises NotProven: nothing that comes after on this connection can be believed either."""
        mac, text = frame[:_MAC_CHARS], frame[_MAC_CHARS + 1 :]
        if not hmac.compare_digest(mac.encode(), self._next(text.encode()).encode()):
            raise NotProven("signature_wrong", "a frame was altered, left out or repeated on the way, or the secrets differ")
        return text

    def _next(self, text: bytes) -> str:
        self._count += 1
        return hmac.digest(self._key, b"%s\n%d\n%s" % (self._sender, self._count, text), "sha256").hex()


def is_sealed(frame: str) -> bool:
    return len(frame) > _MAC_CHARS and frame[_MAC_CHARS] == " " and not frame.startswith("{")


def unverified(frame: str) -> str:
    """The text of a sealed frame before its key is known. Believe nothing of it but where to find the key."""
    return frame[_MAC_CHARS + 1 :] if is_sealed(frame) else frame
