"""POST and DELETE: what a person may ask for. Each request, done or refused, leaves one audit row.

Never decides: the controller's guards do, and their rule is in the answer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import JSONResponse

from controller.refusals import GuardRefused, NotFound
from controller.routes import problems
from controller.routes.access import Actor, needs
from controller.routes.bodies import (
    DropBody,
    GrantBody,
    MoveBody,
    Named,
    PauseBody,
    PinBody,
    ReasonBody,
    ReasonText,
    ResumeBody,
    reply,
    to_json,
)
from controller.routes.ports import ControllerPort
from controller.security.audit import AUDITED, Audit
from controller.store.engine import StoreUnavailable
from controller.store.queries import Queries
from fluidpd.record import TransitionRow

Shown = dict[str, Any] | None
Operator = Annotated[Actor, Depends(needs("operate"))]


def acts(controller: ControllerPort, audit: Audit, queries: Queries) -> APIRouter:
    router = APIRouter(tags=["acts"])

    async def audited(
        actor: Actor,
        verb: str,
        subject: str,
        reason: str,
        work: Awaitable[Any],
        detail: str = "",
        *,
        stood: Callable[[], Awaitable[Any]] | None = None,
        shown: Callable[[Any], tuple[Shown, Shown]] = lambda done: (None, None),
    ) -> Any:
        """Do it, and write down what came of it. `stood` reads what stood, `shown` tells before and after of what was done."""
        row = actor.row(verb, subject, "refused", detail, reason)
        try:
            if stood is not None:
                with suppress(StoreUnavailable):  # then it is not known, and the act says why it cannot be done
                    row = replace(row, before=to_json(await stood()))
            done = await work
            before, after = shown(done)
            row = replace(row, outcome="done", before=before if before is not None else row.before, after=after)
            return done
        except Exception as error:
            known = problems.of(error)
            rule = f"{error.refusal.rule.value}: " if isinstance(error, GuardRefused) else ""
            told = rule + (known.detail if known else type(error).__name__)
            row = replace(row, detail=told, outcome="refused" if known else "failed")
            raise
        finally:
            if hasattr(work, "close"):
                work.close()  # where reading what stood failed, it was never begun
            await audit.note(row)
            actor.notes[AUDITED] = True

    async def pin_of(name: str) -> Any:
        return next((p for p in await queries.pins(time.time()) if p.worker == name), None)

    def the_pause(everywhere: bool) -> Callable[[], Awaitable[Any]]:
        async def found() -> Any:
            return next((p for p in await queries.pauses(time.time()) if p.everywhere is everywhere), None)

        return found

    @router.post("/workers/{name}/pin")
    async def pin(name: Named, body: PinBody, actor: Operator) -> JSONResponse:
        """Hold a worker in a role, above all automation, until the time is up."""
        work = controller.set_pin(name, body.role, body.ttl_s, body.reason, actor.name, body.expected_version)
        said = f"as {body.role.value} for {body.ttl_s:g} s"
        held = await audited(actor, "pin", name, body.reason, work, said, stood=lambda: pin_of(name), shown=_now)
        return reply(held)

    @router.delete("/workers/{name}/pin")
    async def unpin(
        name: Named,
        actor: Operator,
        reason: Annotated[ReasonText | None, Query()] = None,
        expected_version: Annotated[int | None, Query(ge=0, description="the version that was read")] = None,
        body: Annotated[DropBody | None, Body()] = None,
    ) -> JSONResponse:
        said = body.reason if body is not None else reason or ""
        seen = body.expected_version if body is not None else expected_version
        work = controller.drop_pin(name, actor.name, said, seen)
        dropped = await audited(actor, "unpin", name, said, work, stood=lambda: pin_of(name), shown=_gone)
        return reply({"worker": name, "dropped": dropped})

    @router.delete("/workers/{name}")
    async def deregister(
        name: Named,
        actor: Operator,
        reason: Annotated[ReasonText | None, Query()] = None,
        body: Annotated[ReasonBody | None, Body()] = None,
    ) -> JSONResponse:
        """Take a worker out for good: out of the router and of every sum. A sidecar that still runs registers it anew."""
        said = body.reason if body is not None else reason
        if said is None:
            raise problems.Problem(422, "Say why: a reason of at least 5 characters, in the body or the query.")

        async def leave() -> None:
            if not await controller.deregister(name):
                raise NotFound(f"no worker {name!r}; list them with: fluidpd workers")

        await audited(actor, "deregister", name, said, leave())
        return reply({"worker": name, "deregistered": True})

    @router.post("/pause")
    async def pause(body: PauseBody, actor: Operator) -> JSONResponse:
        """Stop all automation: nothing new starts. Open moves finish, or go back where they still can, as chosen."""

        async def allowed() -> Any:
            _may_everywhere(actor, body.everywhere)
            more = (body.roll_back, body.expected_version, body.everywhere)
            return await controller.set_pause(body.reason, body.ttl_s, actor.name, *more)

        said = f"for {body.ttl_s:g} s" + (", open moves go back" if body.roll_back else "")
        subject, stood = _automation(body.everywhere), the_pause(body.everywhere)
        return reply(await audited(actor, "pause", subject, body.reason, allowed(), said, stood=stood, shown=_now))

    @router.post("/resume")
    async def resume(body: ResumeBody, actor: Operator) -> JSONResponse:
        """End the pause of this pool, or that of every pool. `paused` says whether the other still holds it."""

        async def allowed() -> Any:
            _may_everywhere(actor, body.everywhere)
            return await controller.resume(actor.name, body.reason, body.expected_version, body.everywhere)

        subject, stood = _automation(body.everywhere), the_pause(body.everywhere)
        dropped = await audited(actor, "resume", subject, body.reason, allowed(), stood=stood, shown=_gone)
        paused: bool | None = None
        with suppress(StoreUnavailable):
            paused = await queries.pause(time.time()) is not None
        return reply({"paused": paused, "dropped": dropped})

    @router.post("/workers/{name}/move", status_code=202)
    async def move(name: Named, body: MoveBody, actor: Operator) -> JSONResponse:
        """Start a role move by hand. The same guards judge it; the answer is the open move."""

        async def allowed() -> Any:
            if body.force and "admin" not in actor.may:
                told = f"The token {actor.name!r} lacks the scope 'admin', which force needs."
                raise problems.Problem(403, told, rule="scope")
            return await controller.request_move(name, body.role, body.reason, actor.name, body.force)

        said = f"to {body.role.value}" + (", forced" if body.force else "")
        return reply(await audited(actor, "move", name, body.reason, allowed(), said, shown=_moved), 202)

    @router.post("/workers/{name}/grant", status_code=202)
    async def grant(name: Named, body: GrantBody, actor: Operator) -> JSONResponse:
        """Let a decode worker borrow prompts for a while, whatever the policy thinks."""
        work = controller.request_grant(name, body.ttl_s, body.reason, actor.name)
        return reply(await audited(actor, "grant", name, body.reason, work, f"for {body.ttl_s:g} s", shown=_now), 202)

    @router.post("/transitions/{id}/cancel", status_code=202)
    async def cancel(id: Named, body: ReasonBody, actor: Operator) -> JSONResponse:
        """Turn an open move back. From the switch on it is too late; the answer says where the move stands."""
        work = controller.cancel_move(id, body.reason, actor.name)
        return reply(await audited(actor, "cancel", id, body.reason, work, shown=_asked_back), 202)

    return router


def _automation(everywhere: bool) -> str:
    return "automation everywhere" if everywhere else "automation"


def _may_everywhere(actor: Actor, everywhere: bool) -> None:
    if everywhere and "admin" not in actor.may:
        told = f"The token {actor.name!r} lacks the scope 'admin', which a pause of every pool needs."
        raise problems.Problem(403, told, rule="scope")


def _now(done: Any) -> tuple[Shown, Shown]:
    return None, to_json(done)


def _gone(dropped: Any) -> tuple[Shown, Shown]:
    shown = to_json(dropped)
    return (shown if isinstance(shown, dict) else None), None


def _moved(row: TransitionRow) -> tuple[Shown, Shown]:
    return {"role": row.from_role.value}, {"role": row.to_role.value, "move": row.id}


def _asked_back(row: TransitionRow) -> tuple[Shown, Shown]:
    return {"phase": row.phase.value, "heading": row.heading.value, "worker": row.worker}, {"role": row.from_role.value}
