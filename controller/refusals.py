"""Why the controller said no: the exceptions that its API and its command line turn into answers.

Never an internal failure: each of these is a correct answer to a request that cannot be carried out.
"""

from __future__ import annotations

from fluidpd.decision import Refusal


class GuardRefused(Exception):
    """A guard refused; the refusal names the rule and its numbers."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.worker}: {refusal.rule.value}" + (f": {refusal.detail}" if refusal.detail else ""))
        self.refusal = refusal


class NotFound(Exception):
    """There is no such thing here."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Conflict(Exception):
    """The thing changed since it was read, or is busy. `current` is what stands now, ready to be shown."""

    def __init__(self, detail: str, current: object = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.current = current
