"""Ends the sleep of an idle scheduler (SGLang's --sleep-on-idle) when the sidecar has something to say: else an order, or the
answer to a claim, would wait for up to a second. Never used where the scheduler does not sleep."""

from __future__ import annotations

import os
from typing import Any

_READABLE = 1  # zmq.POLLIN

USES = ("sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep",)


class Wake:
    def __init__(self, scheduler: Any) -> None:
        poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
        self.is_up = False
        self._fd: int | None = None
        self._stays = False
        if poller is not None:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            poller.register(self._fd, _READABLE)

    def up(self) -> None:
        """From any thread."""
        if self._fd is not None:
            self.is_up = True
            os.eventfd_write(self._fd, 1)

    def stay(self, awake: bool) -> None:
        """On the scheduler's thread: whether it is to stay awake. A level, so that a busy loop makes no system call for it."""
        if awake and not self._stays:
            self.up()
        self._stays = awake

    def seen(self) -> None:
        """On the scheduler's thread, before it looks at what there is: a wake that comes later is not lost."""
        if self.is_up and not self._stays and self._fd is not None:
            self.is_up = False
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                pass  # the flag is set before the event
