"""One receiver from the settings: what it is sent, where, and with which proof.

Never keeps a secret longer than a call: its file is read each time, so that a key can be changed while this runs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from controller.receivers.calling import Call, Caller, NotTaken
from controller.receivers.news import News, for_alertmanager, for_pagerduty, for_slack, for_webhook
from controller.settings_alerting import ReceiverKind, ReceiverSettings
from fluidpd.addresses import Allowed

PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
SIGNATURE, TIMESTAMP = "X-FluidPD-Signature", "X-FluidPD-Timestamp"


class Receiver:
    """`wall`: unix seconds, for signatures and for how long an alert fires on."""

    def __init__(
        self, settings: ReceiverSettings, allowed: Allowed, wall: Callable[[], float], caller: Caller | None = None
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self._wall = wall
        self._caller = caller or Caller(allowed, settings.timeout_s)

    @property
    def refreshes(self) -> bool:
        """Whether what fires must be repeated: an Alertmanager forgets, at a restart and after a while."""
        return self.settings.kind is ReceiverKind.ALERTMANAGER

    def turn(self, fired_s: float) -> int:
        """How many times what has fired for so long was to be told again. An Alertmanager repeats by itself."""
        every_s = self.settings.repeat_s
        return 0 if every_s is None or self.refreshes else max(0, int(fired_s // every_s))

    def wants(self, severity: str) -> bool:
        return self.settings.wants(severity)

    async def tell(self, news: Sequence[News]) -> None:
        """Raises NotTaken. Only an Alertmanager takes more than one at once."""
        for call in self._calls(news):
            await self._caller.post(call)

    async def close(self) -> None:
        await self._caller.close()

    def _calls(self, news: Sequence[News]) -> list[Call]:
        kind = self.settings.kind
        if kind is ReceiverKind.ALERTMANAGER:
            base = self._url().rstrip("/").removesuffix("/api/v2/alerts")
            return [Call(f"{base}/api/v2/alerts", _json(for_alertmanager(news, self._wall())), {})]
        return [self._call(kind, one) for one in news]

    def _call(self, kind: ReceiverKind, news: News) -> Call:
        headers = {"Idempotency-Key": news.key}
        if kind is ReceiverKind.PAGERDUTY:
            url = self._url() if self.settings.url or self.settings.url_file else PAGERDUTY
            return Call(url, _json(for_pagerduty(news, self._secret())), headers)
        if kind is ReceiverKind.SLACK:
            return Call(self._url(), _json(for_slack(news)), {})
        body = _json(for_webhook(news, self.name))
        if self.settings.secret_file is not None:
            stamp = str(int(self._wall()))
            headers |= {TIMESTAMP: stamp, SIGNATURE: f"sha256={signature(self._secret(), stamp, body)}"}
        return Call(self._url(), body, headers)

    def _url(self) -> str:
        if self.settings.url_file is not None:
            return _content(self.settings.url_file)
        assert self.settings.url is not None
        return self.settings.url

    def _secret(self) -> str:
        assert self.settings.secret_file is not None
        return _content(self.settings.secret_file)


def signature(secret: str, stamp: str, body: bytes) -> str:
    """HMAC-SHA256 of `<timestamp>.<body>`, hex: a message that was recorded cannot be sent again later as a new one."""
    return hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _content(name: str) -> str:
    try:
        found = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotTaken(f"its file {name} cannot be read: {error}") from error
    if not found:
        raise NotTaken(f"its file {name} is empty")
    return found
