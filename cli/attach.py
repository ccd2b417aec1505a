"""`fluidpd attach`: takes on a fleet that runs already: looks first, then starts a sidecar for each worker and a controller.

Never touches what it did not start: the router and the workers go on when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.attach_plan import (
    COLUMNS,
    Asked,
    CannotAttach,
    Found,
    Listed,
    NotUnderstood,
    capability_row,
    explained,
    objections,
    parse_workers,
    strangers,
)
from cli.output import Exit, emit_table, fail, say

if TYPE_CHECKING:
    import httpx

    from cli.attach_parts import Parts

ASK_WITHIN_S = 5.0


def attach(
    router: Annotated[str, typer.Option("--router", help="address of the fleet's sglang-router", metavar="URL")],
    workers: Annotated[
        list[str] | None,
        typer.Option(
            "--workers", help="a worker: its name, its address as the router has it, and options", metavar="NAME=URL[,..]"
        ),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(help="further workers", metavar="[NAME=URL[,..]]...")] = None,
    active: Annotated[bool, typer.Option("--active", help="act, too: lend prompts and move workers")] = False,
    state_dir: Annotated[Path, typer.Option("--state-dir", help="database, journals, sockets, logs; kept")] = Path("var/attach"),
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="the controller's settings: policy, slo, cost, security, ...")
    ] = None,
    fleet_secret_file: Annotated[
        Path | None, typer.Option("--fleet-secret-file", help="a secret that the sidecars and the controller share")
    ] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard/--no-dashboard", help="with or without the dashboard")] = True,
    controller_port: Annotated[int, typer.Option("--controller-port", min=0, max=65535, help="0 takes a free one")] = 8070,
    dashboard_port: Annotated[int, typer.Option("--dashboard-port", min=0, max=65535, help="0 takes a free one")] = 8071,
    check: Annotated[bool, typer.Option("--check", help="look and judge, and start nothing")] = False,
) -> None:
    """Take on a running prefill/decode fleet: one sidecar for each worker, a controller and the dashboard, on this machine.

    It starts in ADVISORY mode: it measures, decides and records what it would do, and sends nothing. --active is your decision.
    Roles are read from the workers. Nothing is started unless every worker answers, has a role, and is known to the router.
    Ctrl-C stops FluidPD alone: the router and the workers go on with the roles they have.

    \b
    Options of a worker: bootstrap=PORT (else the worker is asked), socket=PATH (the FLUIDPD_PLUGIN_SOCKET it was started with; by
    default NAME.sock in the state folder), admin_key_file=PATH (for engines that have an admin key).
    Secrets are files, never options. With tokens (security.tokens_file in --config) this command reads its own from
    FLUIDPD_TOKEN_FILE.
    Examples:
      fluidpd attach --router http://127.0.0.1:8000 --workers p1=http://127.0.0.1:30000 d1=http://127.0.0.1:30001
      fluidpd attach --router http://r:8000 --workers p1=http://h1:30000,bootstrap=8998,socket=/run/fluidpd/p1.sock d1=http://h1:30001
      fluidpd attach --router http://127.0.0.1:8000 --workers p1=http://127.0.0.1:30000 --check
      fluidpd attach --config /etc/fluidpd/fluidpd.yaml --active --router http://127.0.0.1:8000 --workers ...
    """
    from cli.attach_parts import Parts, PartTrouble

    signal.signal(signal.SIGINT, _interrupt)  # a shell that starts it in the background has it ignored
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    parts: Parts | None = None
    try:
        asked = parse_workers([*(workers or ()), *(more or ())])
        found, listed = asyncio.run(look(router.rstrip("/"), asked))
        _judge(found, listed, router)
        if check:
            for f in found:
                if not f.flippable:
                    say(f"{f.asked.name}: not flippable: {f.not_flippable_why}")
            say("nothing was started: --check. What the plugins can do shows once their sidecars run")
            return
        parts = Parts(router.rstrip("/"), found, state_dir.absolute(), active=active, controller_port=controller_port)
        parts.configure(config, fleet_secret_file.absolute() if fleet_secret_file else None)
        parts.start(say, dashboard_port if dashboard else None)
        _show(parts, active)
        while True:
            time.sleep(0.5)
            parts.raise_if_died()
    except NotUnderstood as problem:
        fail(str(problem), Exit.USAGE if parts is None else Exit.CONFIG)
    except CannotAttach as problem:
        fail(str(problem), Exit.FAILURE)
    except PartTrouble as problem:
        fail(f"{problem}\nFluidPD stops; the router and the workers go on", Exit.FAILURE)
    except OSError as problem:
        fail(f"{problem.strerror or problem}: {problem.filename or state_dir}: choose another --state-dir", Exit.FAILURE)
    except KeyboardInterrupt:
        say("FluidPD stops; the router and the workers go on")
        raise typer.Exit(0 if parts is not None else 130) from None
    finally:
        if parts is not None:
            parts.stop()


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- looking


async def look(router: str, asked: Sequence[Asked]) -> tuple[list[Found], dict[str, Listed]]:
    """Ask the router, then every worker at once. Raises CannotAttach if the router cannot be asked."""
    from controller.ports import RouterTrouble
    from controller.routers.sglang_router import SglangRouter

    known = SglangRouter(router)
    try:
        members = await known.members()
        found = await asyncio.gather(*(_ask(w) for w in asked))
    except RouterTrouble as problem:
        raise CannotAttach(f"{problem} Nothing was started") from problem
    finally:
        await known.close()
    return list(found), {url.rstrip("/"): Listed(m.role, m.healthy) for url, m in members.items()}


async def _ask(asked: Asked) -> Found:
    import httpx

    from sidecar.clock import Clock
    from sidecar.engines.sglang import SglangEngine

    async with httpx.AsyncClient(base_url=asked.url, trust_env=False) as client:
        try:
            answer = await client.get("/server_info", timeout=ASK_WITHIN_S)
        except httpx.HTTPError as problem:
            return Found(asked, trouble=str(problem) or type(problem).__name__)
        info = _as_dict(answer)
        if info is None:
            return Found(asked, trouble=f"GET /server_info answered HTTP {answer.status_code}, and not as SGLang does")
        name = "emulated" if info.get("emulated") is True else "sglang"
        engine = SglangEngine(client, Clock(), name=name, timeout_s=ASK_WITHIN_S)
        facts, seen = await engine.facts(), await engine.look()
    if facts is None or not seen.reachable:
        return Found(asked, engine=name, trouble=seen.detail or "it stopped answering")
    port = info.get("disaggregation_bootstrap_port")
    said = port if isinstance(port, int) and not isinstance(port, bool) else None
    return Found(
        asked,
        role=seen.role,
        engine=name,
        version=facts.version,
        bootstrap_port=asked.bootstrap_port or said,
        flippable=facts.flippable,
        not_flippable_why=facts.not_flippable_why,
    )


def _as_dict(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        said = answer.json() if answer.status_code == 200 else None
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _judge(found: Sequence[Found], listed: Mapping[str, Listed], router: str) -> None:
    emit_table(
        [
            {
                "worker": f.asked.name,
                "address": f.asked.url,
                "role": f.role,
                "engine": f"{f.engine} {f.version}".strip() if not f.trouble else None,
                "bootstrap": f.bootstrap_port,
                "router": None
                if (entry := listed.get(f.asked.url)) is None
                else f"{entry.role}{'' if entry.healthy else ' (unhealthy)'}",
                "flippable": None if f.trouble else f.flippable,
            }
            for f in found
        ],
        ("worker", "address", "role", "engine", "bootstrap", "router", "flippable"),
    )
    against = objections(found, listed, router)
    if against:
        raise CannotAttach("nothing was started:\n" + "\n".join(f"  {sentence}" for sentence in against))
    for url in strangers([f.asked for f in found], listed):
        say(f"the router also sends requests to {url}, which was not named: FluidPD leaves it alone and does not count it")


# ---------------------------------------------------------------- showing


def _show(parts: Parts, active: bool) -> None:
    views = parts.views()
    print()
    emit_table([capability_row(v) for v in views], COLUMNS)
    for sentence in explained(views, {v["name"]: parts.socket_of(v["name"]) for v in views}):
        say(sentence)
    if active:
        say("mode ACTIVE: FluidPD lends prompts and moves workers as its policy says. `fluidpd pause` stops that at once")
    else:
        say("mode ADVISORY: what FluidPD would do is recorded, nothing is sent. `fluidpd decisions` shows it; --active acts")
    say(f"controller: {parts.controller_url}" + (f"   dashboard: {parts.dashboard_url}" if parts.dashboard_url else ""))
    say(f"state and logs: {parts.folder}. Ctrl-C stops FluidPD alone")
