"""Login and logout of people at a dashboard, who they are, and what an act would do before it is done.

Never lets a session do more than its token, and never changes the fleet.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from controller.refusals import NotFound
from controller.routes.access import Actor, address_of, for_everyone, given_token, needs
from controller.routes.bodies import Named, reply
from controller.routes.ports import ControllerPort
from controller.security.audit import AUDITED, Audit
from controller.security.sessions import PREFIX, Desk
from controller.store.queries import Queries
from fluidpd.names import End, Role
from fluidpd.record import AuditRow

_LOOKED_AT = 50  # latest moves, for how long one takes
_AT_LEAST, _AT_MOST = 1, 9
Reader = Annotated[Actor, Depends(needs("read"))]


class LoginBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    token: SecretStr = Field(min_length=1, max_length=200)


def people(controller: ControllerPort, queries: Queries, desk: Desk, audit: Audit) -> APIRouter:
    router = APIRouter(tags=["people"])

    @router.post("/login", dependencies=[Depends(for_everyone)])
    async def login(body: LoginBody, request: Request) -> JSONResponse:
        """A session for a token. Its secret is a bearer token of its own, and is told once."""
        notes = request.scope.setdefault("state", {})
        notes["address"], notes["source"] = address_of(request), request.headers.get("x-fluidpd-source", "api")[:32]
        secret, row = await desk.open(body.token.get_secret_value(), notes["address"])
        told = f"until {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(row.expires_wall_s))}"
        await audit.note(
            AuditRow(
                0,
                time.time(),
                row.actor,
                notes["source"],
                "login",
                "dashboard",
                "done",
                told,
                address=row.address,
                token_id=row.token_id,
                request_id=notes.get("request_id", ""),
            )
        )
        notes[AUDITED] = True
        return reply({"session": secret, "actor": row.actor, "scopes": row.scopes, "expires_wall_s": row.expires_wall_s})

    @router.post("/logout")
    async def logout(request: Request, actor: Reader) -> JSONResponse:
        """End the session that asks. A token that is no session's has nothing to end."""
        given = given_token(request)
        ended = given.startswith(PREFIX) and await desk.close(given)
        await audit.note(actor.row("logout", "dashboard", "done", "" if ended else "there was no session to end"))
        actor.notes[AUDITED] = True
        return reply({"ended": ended})

    @router.get("/session")
    async def session(actor: Reader) -> JSONResponse:
        """Who asks, and what they may do."""
        return reply({"actor": actor.name, "may": sorted(actor.may), "token_id": actor.token_id, "address": actor.address})

    @router.get("/workers/{name}/preview", dependencies=[Depends(needs("read"))])
    async def preview(
        name: Named,
        role: Role,
        act: Annotated[Literal["pin", "move"], Query(description="hold it there, or move it once")] = "pin",
        force: bool = False,
    ) -> JSONResponse:
        """What the act would do now, judged by the guards that judge the act itself. Changes nothing."""
        found = controller.preview(name, role, act == "pin", force)
        if found is None:
            raise NotFound(f"no worker {name!r}; list them with: fluidpd workers")
        took = [
            m.ended_wall_s - m.started_wall_s
            for m in await queries.transitions(limit=_LOOKED_AT)
            if m.end is End.DONE and m.ended_wall_s is not None and m.to_role is role
        ][:_AT_MOST]
        usual: dict[str, Any] = {"seconds": median(took) if len(took) >= _AT_LEAST else None, "moves": len(took)}
        return reply({**found, "usually_takes": usual})

    return router
