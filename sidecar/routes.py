"""The sidecar's own HTTP surface: what other sidecars ask of it, and what people and probes may see.

Never asks who it is: the door does (door.py), for everything under /peer.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from prometheus_client.exposition import choose_encoder

from sidecar.app import Sidecar
from sidecar.door import Door
from sidecar.handoff import HandoffStream
from sidecar.protocol import HandoffState, PeerClaim, PeerClaimAnswer, PeerDropStale


def sidecar_of(request: Request) -> Sidecar:
    found: Sidecar = request.app.state.sidecar
    return found


# Peers have proven themselves at the door before a route is asked.
Own = Annotated[Sidecar, Depends(sidecar_of)]

peer = APIRouter(prefix="/peer", tags=["peer"])
own = APIRouter(tags=["own"])


@peer.post("/claim")
async def claim(body: PeerClaim, sidecar: Own) -> PeerClaimAnswer:
    try:
        return await sidecar.claims.claimed(body)
    except TimeoutError as error:
        raise HTTPException(504, "the plugin did not answer in time: ask once more under the same id") from error


class _Streamed(Response):
    """Lets a handler return an ASGI response of its own."""

    def __init__(self, stream: HandoffStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._stream(scope, receive, send)


@peer.post("/handoff", response_class=Response)
async def handoff(body: HandoffState, sidecar: Own) -> Response:
    return _Streamed(HandoffStream(sidecar.adoptions, body))


@peer.post("/drop_stale")
async def drop_stale(body: PeerDropStale, sidecar: Own) -> dict[str, bool]:
    if not await sidecar.stale.told(body):
        raise HTTPException(409, "the plugin here cannot drop what is cached about a bootstrap server, or did not answer")
    return {"dropped": True}


@own.get("/healthz")
async def healthz(sidecar: Own) -> dict[str, Any]:
    reasons = sidecar.degraded()
    return {"status": "degraded" if reasons else "ok", "reasons": reasons}


@own.get("/healthz/live")
async def live() -> dict[str, str]:
    return {"status": "ok"}


@own.get("/state")
async def state(sidecar: Own) -> dict[str, Any]:
    return sidecar.state()


@own.get("/metrics")
async def metrics(request: Request, sidecar: Own) -> Response:
    """OpenMetrics or the text format, as the scraper prefers it."""
    encoder, kind = choose_encoder(request.headers.get("accept", ""))
    return Response(encoder(sidecar.registry), headers={"Content-Type": kind})


def create_app(sidecar: Sidecar) -> FastAPI:
    app = FastAPI(title="FluidPD sidecar", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.sidecar = sidecar
    app.include_router(peer)
    app.include_router(own)
    app.add_middleware(
        Door,
        secret=sidecar.secret,
        is_open=sidecar.settings.insecure_no_auth,
        met=sidecar.peers.met,
        epoch=lambda: sidecar.driver.highest_epoch,
        refused_total=sidecar.refused_peers_total,
    )
    return app
