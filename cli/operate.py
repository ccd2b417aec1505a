"""Commands that act: pin, unpin, pause, resume, remap, chunk, cancel. Each asks the controller, which may refuse.

Never act by themselves: no worker, sidecar or router is contacted, and --dry-run only reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.client import DEFAULT_SERVER, PREFIX, Api, ServerOption, TimeoutOption, reaching
from cli.output import Exit, Format, OutputOption, cell, emit_json, fail, moment, parse_span, say, span


class RoleName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


WorkerArgument = Annotated[str, typer.Argument(help="name of the worker, as `fluidpd workers` shows it", metavar="WORKER")]
ReasonOption = Annotated[
    str, typer.Option("--reason", "-m", help="why: at least 5 characters, kept in the audit", metavar="TEXT")
]
TtlOption = Annotated[str, typer.Option("--ttl", help="how long: 90s, 30m, 2h", metavar="SPAN")]
EverywhereOption = Annotated[
    bool, typer.Option("--everywhere", help="in every pool of the database; needs a token with the scope admin")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="check what can be checked by reading, show the request, send nothing")
]
VersionOption = Annotated[
    int | None,
    typer.Option("--expected-version", min=0, help="refuse (exit 5) if it changed since this version was read; 0: none stood"),
]


def pin(
    context: typer.Context,
    worker: WorkerArgument,
    role: Annotated[RoleName | None, typer.Argument(help="the role to keep; without it, the role it has now")] = None,
    reason: ReasonOption = "",
    ttl: TtlOption = "1h",
    expected_version: VersionOption = None,
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Keep a worker in a role. Outranks automation, emergencies included, until it expires.

    \b
    Examples:
      fluidpd pin w3 decode --ttl 30m --reason "bisecting a latency regression"
      fluidpd pin w3 -m "leave it as it is" --dry-run
    """
    said, seconds = reason_of(reason), parse_span(ttl)
    body: dict[str, Any] = {"role": role.value if role else "", "ttl_s": seconds, "reason": said} | seen(expected_version)
    with reaching(context, server, timeout) as api:
        if role is None or dry_run:
            known = known_worker(api, worker)
            body["role"] = body["role"] or str(known.get("role") or "")
        answer = act(api, "POST", f"/workers/{quote(worker, safe='')}/pin", body, dry_run)
    shown(answer, output, f"{worker} pinned to {body['role']} for {span(seconds)}", dry_run)


def unpin(
    context: typer.Context,
    worker: WorkerArgument,
    reason: ReasonOption = "",
    expected_version: VersionOption = None,
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Give a pinned worker back to automation.

    \b
    Examples:
      fluidpd unpin w3
      fluidpd unpin w3 --reason "the regression is found"
    """
    body, path = None, f"/workers/{quote(worker, safe='')}/pin"
    if reason:
        body = {"reason": reason_of(reason)} | seen(expected_version)
    elif expected_version is not None:
        path += f"?expected_version={expected_version}"
    with reaching(context, server, timeout) as api:
        if dry_run:
            known_worker(api, worker)
        answer = act(api, "DELETE", path, body, dry_run)
    shown(answer, output, f"{worker} is no longer pinned", dry_run)


def pause(
    context: typer.Context,
    reason: ReasonOption = "",
    ttl: TtlOption = "1h",
    roll_back: Annotated[
        bool, typer.Option("--roll-back", help="open moves go back, up to the switch, instead of finishing")
    ] = False,
    everywhere: EverywhereOption = False,
    expected_version: VersionOption = None,
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Stop automation: no new grant, no new move. Open moves finish, or go back as chosen. At most 24 hours.

    \b
    Examples:
      fluidpd pause --reason "incident 17: hands off" --ttl 2h
      fluidpd pause --reason "incident 17: hands off" --roll-back
      fluidpd pause --reason "incident 17: hands off" --everywhere
    """
    said, seconds = reason_of(reason), parse_span(ttl)
    body = {"reason": said, "ttl_s": seconds} | ({"roll_back": True} if roll_back else {}) | seen(expected_version)
    body |= {"everywhere": True} if everywhere else {}
    with reaching(context, server, timeout) as api:
        answer = act(api, "POST", "/pause", body, dry_run)
    until = (
        moment(answer.get("expires_wall_s"))
        if isinstance(answer, Mapping) and answer.get("expires_wall_s")
        else f"in {span(seconds)}"
    )
    shown(answer, output, f"paused; automation comes back {until}, or with `fluidpd resume`", dry_run)


def resume(
    context: typer.Context,
    reason: ReasonOption = "",
    everywhere: EverywhereOption = False,
    expected_version: VersionOption = None,
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """End a pause: this pool's, or with --everywhere the one that holds every pool.

    \b
    Examples:
      fluidpd resume --reason "incident 17 is over"
      fluidpd resume --everywhere --reason "incident 17 is over"
    """
    body = {"reason": reason_of(reason)} | ({"everywhere": True} if everywhere else {}) | seen(expected_version)
    with reaching(context, server, timeout) as api:
        answer = act(api, "POST", "/resume", body, dry_run)
    held = isinstance(answer, Mapping) and answer.get("paused") is True
    other = "this pool's own pause still holds it" if everywhere else "a pause of every pool still holds it: see --everywhere"
    shown(answer, output, other if held else "automation is back", dry_run)


def remap(
    context: typer.Context,
    worker: WorkerArgument,
    role: Annotated[RoleName, typer.Argument(help="the role it shall serve")],
    reason: ReasonOption = "",
    force: Annotated[
        bool, typer.Option("--force", help="override guards that may be overridden; needs the admin scope and is audited")
    ] = False,
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Move a worker to a role by hand: preflight, drain, remap, switch, verify, admit. The guards still judge it.

    \b
    Examples:
      fluidpd remap w3 prefill --reason "warm one up before the batch job"
      fluidpd transitions --worker w3        # follow it
    """
    body = {"role": role.value, "reason": reason_of(reason), "force": force}
    with reaching(context, server, timeout) as api:
        if dry_run:
            known = known_worker(api, worker)
            if known.get("role") == role.value:
                fail(f"refused by the rule same_role: {worker} already serves {role.value}", Exit.REFUSED)
        answer = act(api, "POST", f"/workers/{quote(worker, safe='')}/move", body, dry_run)
    name = answer.get("id") if isinstance(answer, Mapping) else None
    follow = f"; follow it with `fluidpd transitions --worker {worker}`, stop it with `fluidpd cancel {name}`" if name else ""
    shown(answer, output, f"{worker} is on its way to {role.value}{follow}", dry_run)


def chunk(
    context: typer.Context,
    worker: WorkerArgument,
    reason: ReasonOption = "",
    ttl: TtlOption = "60s",
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Let a decode worker borrow prompts now: it prefills them in chunks that keep its token gaps inside the SLO.

    \b
    Examples:
      fluidpd chunk w5 --ttl 2m --reason "help with the morning queue"
    """
    said, seconds = reason_of(reason), parse_span(ttl)
    with reaching(context, server, timeout) as api:
        if dry_run:
            known = known_worker(api, worker)
            if known.get("role") == "prefill":
                fail(f"{worker} serves prefill: only a decode worker borrows prompts", Exit.REFUSED)
        answer = act(api, "POST", f"/workers/{quote(worker, safe='')}/grant", {"reason": said, "ttl_s": seconds}, dry_run)
    shown(answer, output, f"{worker} may borrow prompts for {span(seconds)}", dry_run)


def cancel(
    context: typer.Context,
    transition: Annotated[str, typer.Argument(help="id of the move, as `fluidpd transitions --open` shows it", metavar="ID")],
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Stop a move. Before the switch the worker goes home; a switch under way is never interrupted.

    \b
    Examples:
      fluidpd cancel 01J9Z --reason "wrong worker"
    """
    path = f"/transitions/{quote(transition, safe='')}"
    with reaching(context, server, timeout) as api:
        if dry_run:
            api.get(path)
        answer = act(api, "POST", f"{path}/cancel", {"reason": reason_of(reason)}, dry_run)
    shown(answer, output, f"asked {transition} to stop; `fluidpd transitions` shows where it ends", dry_run)


def forget(
    context: typer.Context,
    worker: WorkerArgument,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Deregister a worker that is gone for good. Its history stays; a sidecar that still speaks for it must register anew.

    \b
    Examples:
      fluidpd forget w9 --reason "machine returned to the vendor"
    """
    with reaching(context, server, timeout) as api:
        if dry_run:
            known_worker(api, worker)
        answer = act(api, "DELETE", f"/workers/{quote(worker, safe='')}", {"reason": reason_of(reason)}, dry_run)
    shown(answer, output, f"{worker} is deregistered", dry_run)


# ---------------------------------------------------------------- shared by the commands above


def known_worker(api: Api, name: str) -> Mapping[str, Any]:
    found = api.get(f"/workers/{quote(name, safe='')}")
    return found if isinstance(found, Mapping) else {}


def act(api: Api, method: str, path: str, body: Mapping[str, Any] | None, dry_run: bool) -> Any:
    """Send it, or say what would have been sent."""
    if dry_run:
        return {"dry_run": True, "server": api.server, "method": method, "path": f"{PREFIX}{path}", "body": body}
    return api.post(path, body or {}) if method == "POST" else api.delete(path, body)


def seen(version: int | None) -> dict[str, int]:
    """The part of a request that makes it fail if somebody else was quicker."""
    return {} if version is None else {"expected_version": version}


def reason_of(text: str) -> str:
    said = text.strip()
    if len(said) < 5:
        raise typer.BadParameter("say why in at least 5 characters: it is kept in the audit", param_hint="--reason")
    return said


def shown(answer: Any, output: Format, sentence: str, dry_run: bool) -> None:
    """JSON on stdout, or one sentence; what a dry run would have sent is data, too."""
    if output is Format.JSON:
        emit_json(answer)
    elif dry_run:
        say("dry run: nothing was sent")
        typer.echo(f"{answer['method']} {answer['path']} {cell(answer['body'])}".rstrip(" -"))
    else:
        typer.echo(sentence)
