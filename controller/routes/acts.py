"""POST and DELETE: what a person may ask for. Each request, done or refused, leaves one audit row.

Never decides: the controller's guards do, and their rule is in the answer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import JSONResponse

from controller.refusals import GuardRefused, NotFound
from controller.routes import problems
from controller.routes.access import Actor, needs
from controller.routes.bodies import DropBody, GrantBody, MoveBody, Named, PauseBody, PinBody, ReasonBody, ReasonText, reply
from controller.routes.ports import ControllerPort
from controller.security.audit import AUDITED, Audit
from fluidpd.record import AuditRow

Operator = Annotated[Actor, Depends(needs("operate"))]


def acts(controller: ControllerPort, audit: Audit) -> APIRouter:
    router = APIRouter(tags=["acts"])

    async def audited(actor: Actor, verb: str, subject: str, reason: str, work: Awaitable[Any], detail: str = "") -> Any:
        outcome = "refused"
        try:
            done = await work
            outcome = "done"
            return done
        except Exception as error:
            known = problems.of(error)
            rule = f"{error.refusal.rule.value}: " if isinstance(error, GuardRefused) else ""
            detail = rule + (known.detail if known else type(error).__name__)
            outcome = "refused" if known else "failed"
            raise
        finally:
            await audit.note(AuditRow(0, time.time(), actor.name, actor.source, verb, subject, outcome, detail, reason))
            actor.notes[AUDITED] = True

    @router.post("/workers/{name}/pin")
    async def pin(name: Named, body: PinBody, actor: Operator) -> JSONResponse:
        """Hold a worker in a role, above all automation, until the time is up."""
        work = controller.set_pin(name, body.role, body.ttl_s, body.reason, actor.name, body.expected_version)
        return reply(await audited(actor, "pin", name, body.reason, work, f"as {body.role.value} for {body.ttl_s:g} s"))

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
        dropped = await audited(actor, "unpin", name, said, controller.drop_pin(name, actor.name, said, seen))
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
        work = controller.set_pause(body.reason, body.ttl_s, actor.name, body.roll_back, body.expected_version)
        said = f"for {body.ttl_s:g} s" + (", open moves go back" if body.roll_back else "")
        return reply(await audited(actor, "pause", "automation", body.reason, work, said))

    @router.post("/resume")
    async def resume(body: DropBody, actor: Operator) -> JSONResponse:
        work = controller.resume(actor.name, body.reason, body.expected_version)
        dropped = await audited(actor, "resume", "automation", body.reason, work)
        return reply({"paused": False, "dropped": dropped})

    @router.post("/workers/{name}/move", status_code=202)
    async def move(name: Named, body: MoveBody, actor: Operator) -> JSONResponse:
        """Start a role move by hand. The same guards judge it; the answer is the open move."""

        async def allowed() -> Any:
            if body.force and "admin" not in actor.may:
                raise problems.Problem(403, f"The token {actor.name!r} lacks the scope 'admin', which force needs.")
            return await controller.request_move(name, body.role, body.reason, actor.name, body.force)

        said = f"to {body.role.value}" + (", forced" if body.force else "")
        return reply(await audited(actor, "move", name, body.reason, allowed(), said), 202)

    @router.post("/workers/{name}/grant", status_code=202)
    async def grant(name: Named, body: GrantBody, actor: Operator) -> JSONResponse:
        """Let a decode worker borrow prompts for a while, whatever the policy thinks."""
        work = controller.request_grant(name, body.ttl_s, body.reason, actor.name)
        return reply(await audited(actor, "grant", name, body.reason, work, f"for {body.ttl_s:g} s"), 202)

    @router.post("/transitions/{id}/cancel", status_code=202)
    async def cancel(id: Named, body: ReasonBody, actor: Operator) -> JSONResponse:
        """Turn an open move back. From the switch on it is too late; the answer says where the move stands."""
        return reply(await audited(actor, "cancel", id, body.reason, controller.cancel_move(id, body.reason, actor.name)), 202)

    return router
