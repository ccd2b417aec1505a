"""What forms ask for: pin, unpin, pause, resume, move, cancel. Each is checked here, carried out by the controller, and answered.

Never writes a record itself, and never repeats an action.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dashboard import visitor
from dashboard.controller_client import Controller, Problem
from fluidpd.names import Role

TTLS_S: dict[str, int] = {"15 min": 900, "30 min": 1800, "1 h": 3600, "4 h": 14400, "12 h": 43200, "24 h": 86400}
DEFAULT_TTL_S = 3600
MIN_REASON = 5
MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class Note:
    """What became of an action. `problem` is set when nothing was done."""

    text: str
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Typed:
    """What a person had typed into a form that was refused, so that it is still there."""

    form: str = ""
    values: dict[str, str] = field(default_factory=dict)


def choice(worker: str, version: int) -> str:
    """A worker in the form, with the pin version that the page showed: the controller refuses if that has changed since."""
    return f"{version}:{worker}"


def _worker(form: dict[str, str]) -> tuple[str, int | None]:
    version, _, worker = form.get("worker", "").partition(":")
    return worker, int(version) if version.isdecimal() and len(version) < 10 else None


def _version(form: dict[str, str], name: str = "version") -> int | None:
    raw = form.get(name, "")
    return int(raw) if raw.isdecimal() and len(raw) < 10 else None


def _ttl(form: dict[str, str]) -> int | Problem:
    raw = form.get("ttl_s", "")
    if not raw.isdecimal() or not 0 < int(raw[:9]) <= 86400:
        return Problem(422, "How long?", "Choose how long it shall last, at most 24 h.")
    return int(raw)


def _reason(form: dict[str, str]) -> str | Problem:
    reason = form.get("reason", "").strip()
    if not MIN_REASON <= len(reason) <= MAX_REASON:
        told = f"Write {MIN_REASON} to {MAX_REASON} characters: whoever is woken next will read them."
        return Problem(422, "A reason is needed", told)
    return reason


async def pin(controller: Controller, form: dict[str, str]) -> Note:
    """Hold a worker in a role; with `act` move, only take it there."""
    if form.get("act") == "move":
        return await move(controller, form)
    worker, version = _worker(form)
    role = form.get("role", "")
    if not worker or role not in {r.value for r in Role}:
        return Note("", Problem(422, "Which worker, which role?", "Choose a worker and the role it shall keep."))
    ttl, reason = _ttl(form), _reason(form)
    if isinstance(ttl, Problem) or isinstance(reason, Problem):
        return Note("", ttl if isinstance(ttl, Problem) else reason if isinstance(reason, Problem) else None)
    if (problem := await _named(controller, form, worker, role, "pin")) is not None:
        return Note("", problem)
    return Note(f"{worker} is pinned to {role}.", await controller.pin(worker, role, ttl, reason, version))


async def _named(controller: Controller, form: dict[str, str], worker: str, role: str, act: str) -> Problem | None:
    """Whoever takes the last worker that may go from a role types its name: a slip of the hand does not do that."""
    if not visitor.current().may_act:
        return None  # the controller refuses them, and says by which rule
    found = await controller.preview(worker, role, act, form.get("force") == "yes")
    if isinstance(found, Problem):
        return found
    if not found["at_minimum"] or form.get("confirm", "").strip() == worker:
        return None
    left, floor = found["minimum"]["left"], found["minimum"]["floor"]
    told = f"This leaves {left} serving {found['from_role']} workers, and the minimum is {floor}. Type {worker} to confirm it."
    return Problem(422, "Type the worker's name", told, "confirm")


async def move(controller: Controller, form: dict[str, str]) -> Note:
    worker, _ = _worker(form)
    role, force = form.get("role", ""), form.get("force") == "yes"
    if not worker or role not in {r.value for r in Role}:
        return Note("", Problem(422, "Which worker, which role?", "Choose a worker and the role it shall take."))
    reason = _reason(form)
    if isinstance(reason, Problem):
        return Note("", reason)
    if (problem := await _named(controller, form, worker, role, "move")) is not None:
        return Note("", problem)
    return Note(f"{worker} moves to {role}.", await controller.move(worker, role, reason, force))


async def cancel(controller: Controller, form: dict[str, str]) -> Note:
    reason = _reason(form)
    if isinstance(reason, Problem):
        return Note("", reason)
    if not form.get("move"):
        return Note("", Problem(422, "Which move?", "Choose the move that shall go back."))
    return Note("The move was told to go back.", await controller.cancel(form["move"], reason))


async def unpin(controller: Controller, form: dict[str, str]) -> Note:
    worker, version = _worker(form)
    if not worker:
        return Note("", Problem(422, "Which worker?", "Choose the worker whose pin shall go."))
    reason = _reason(form)
    if isinstance(reason, Problem):
        return Note("", reason)
    return Note(f"{worker} is no longer pinned.", await controller.unpin(worker, reason, version))


async def pause(controller: Controller, form: dict[str, str]) -> Note:
    ttl, reason = _ttl(form), _reason(form)
    if isinstance(ttl, Problem) or isinstance(reason, Problem):
        return Note("", ttl if isinstance(ttl, Problem) else reason if isinstance(reason, Problem) else None)
    freeze = form.get("roll_back") == "yes"
    done = "Automation is paused, and moves under way go back where they still can." if freeze else "Automation is paused."
    everywhere = form.get("where") == "everywhere"
    version = _version(form, "version_everywhere" if everywhere else "version")
    return Note(f"{done} FluidPD keeps watching.", await controller.pause(reason, ttl, freeze, version, everywhere))


async def resume(controller: Controller, form: dict[str, str]) -> Note:
    reason = _reason(form)
    if isinstance(reason, Problem):
        return Note("", reason)
    everywhere = form.get("where") == "everywhere"
    ended = "The pause of every pool is ended." if everywhere else "The pause of this pool is ended."
    return Note(ended, await controller.resume(reason, _version(form), everywhere))
