"""Commands that look: status, workers, transitions, decisions.

Never change anything, and never turn an unknown number into 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from cli.client import DEFAULT_SERVER, ServerOption, TimeoutOption, reaching
from cli.output import ABSENT, Exit, Format, OutputOption, cell, emit_json, emit_table, fail, moment, say, span
from fluidpd.shares import percent

STATUS_OLD_S = 5.0  # the controller rewrites its status every second


def status(
    context: typer.Context,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="print nothing when all is well; exit 69 when it is not (for probes)")
    ] = False,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Is the fleet well, what is FluidPD doing, and why.

    \b
    Examples:
      fluidpd status
      fluidpd status --exit-code          # 0 well, 69 in trouble, 6 no controller
      fluidpd status -o json
    """
    seen = fetch(context, server, timeout, "/status")
    if not isinstance(seen, dict):
        fail(f"{server} has no status yet: the controller has just started. Try again in a second.", Exit.UNAVAILABLE)
    troubles = troubles_of(seen, time.time())
    if exit_code:
        for trouble in troubles:
            say(f"fluidpd: {trouble}")
        raise typer.Exit(int(Exit.UNAVAILABLE if troubles else Exit.OK))
    if output is Format.JSON:
        emit_json(seen)
        return
    for label, value in answers(seen):
        typer.echo(f"{label:<12} {value}")
    for trouble in troubles:
        typer.echo(f"{'trouble':<12} {trouble}")
    if seen.get("insecure"):
        typer.echo(f"{'insecure':<12} {cell(seen['insecure'])}")
    for note in seen.get("attention") or ():
        typer.echo(f"{'attention':<12} {note}")


def troubles_of(seen: Mapping[str, Any], now_wall_s: float) -> list[str]:
    """What a probe should fail on: a banner, or a controller that stopped writing."""
    troubles = [str(seen["banner"])] if seen.get("banner") else []
    written = seen.get("wall_s")
    if isinstance(written, int | float) and now_wall_s - written > STATUS_OLD_S:
        troubles.append(f"the controller last wrote its status {span(now_wall_s - written)} ago; is its tick stuck?")
    return troubles


def answers(seen: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of `fluidpd status`, each the answer to one question of the person on call."""
    thresholds = seen.get("thresholds") or {}
    engines = [str(engine) for engine in seen.get("engines") or ()]
    lines = [
        ("users", attainment(seen)),
        ("doing", cell(seen.get("action")) + (" (advisory: nothing is sent)" if seen.get("mode") == "advisory" else "")),
        ("why", " ".join(filter(None, [cell(seen.get("reason")), numbers(seen.get("numbers"))]))),
        ("prefill", f"pressure {cell(seen.get('ppi'))}, high above {cell(thresholds.get('prefill_high'))}"),
        ("decode", f"pressure {cell(seen.get('dpi'))}, high above {cell(thresholds.get('decode_high'))}"),
        ("lending", cell(list(seen.get("lenders") or ()))),
        ("triage", cell(list(seen.get("triage") or ()))),
    ]
    lines += [("refused", refusal(item)) for item in seen.get("refusals") or ()]
    if pause := seen.get("pause"):
        lines.append(
            ("paused", f"by {cell(pause.get('actor'))} until {moment(pause.get('expires_wall_s'))}: {cell(pause.get('reason'))}")
        )
    leader = f" of {seen['leader']}" if seen.get("leader") else ""
    leading = "leading" if seen.get("leading") else f"standby{leader}"
    lines += [
        ("controller", f"{leading}, epoch {cell(seen.get('epoch'))}, version {cell(seen.get('version'))}"),
        ("engines", cell(engines) + (" (emulated: no GPU behind these numbers)" if "emulated" in engines else "")),
    ]
    return lines


def attainment(seen: Mapping[str, Any]) -> str:
    """How many requests met both objectives; unknown stays unknown."""
    total, good = seen.get("requests_total"), seen.get("requests_good")
    objective = (seen.get("targets") or {}).get("joint_objective")
    if not isinstance(total, int | float) or not isinstance(good, int | float):
        return "unknown: nobody counts requests yet"
    if total <= 0:
        return "no request yet"
    share = good / total
    verdict = "" if objective is None else f", objective {percent(objective)}: {'met' if share >= objective else 'MISSED'}"
    return f"{percent(share)} of {total:.0f} requests inside both SLOs{verdict}"


def numbers(values: Any) -> str:
    return f"({cell(values)})" if isinstance(values, Mapping) and values else ""


def refusal(item: Mapping[str, Any]) -> str:
    detail = item.get("detail")
    return f"{cell(item.get('worker'))}: rule {cell(item.get('rule'))}" + (f", {cell(detail)}" if detail else "")


def workers(
    context: typer.Context,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Every worker: role, state, pin, pressure, age of what is known.

    \b
    Examples:
      fluidpd workers
      fluidpd workers -o json | jq -r '.[].name'
    """
    rows = rows_of(fetch(context, server, timeout, "/workers"))
    if output is Format.JSON:
        emit_json(rows)
        return
    if not rows:
        say("no worker has registered: start a sidecar beside each one (`fluidpd sidecar --help`)")
        return
    known = ("pressure", "kv_share", "batch", "waiting", "age_s")
    columns = ("name", "role", "state", "pinned", *known, "engine", "plugin", "flippable")
    emit_table([worker_row(row) for row in rows], columns)


def worker_row(row: Mapping[str, Any]) -> dict[str, Any]:
    flat = {**(row.get("latest") or {}), **row}
    pin = row.get("pin")
    flat["name"] = row.get("name") or row.get("worker")
    flat["pinned"] = pin.get("role") if isinstance(pin, Mapping) else pin
    if row.get("flippable") is False and row.get("not_flippable_why"):
        flat["flippable"] = f"no: {row['not_flippable_why']}"
    flat["engine"] = " ".join(str(row[key]) for key in ("engine", "engine_version") if row.get(key)) or None
    if row.get("plugin_why"):
        flat["plugin"] = f"{row.get('plugin')}: {row['plugin_why']}"
    return flat


def transitions(
    context: typer.Context,
    worker: Annotated[str | None, typer.Option("--worker", help="only this worker's")] = None,
    open_only: Annotated[bool, typer.Option("--open", help="only those still under way")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="how many, newest first")] = 20,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Role moves, newest first: what, why, how far, how it ended.

    \b
    Examples:
      fluidpd transitions
      fluidpd transitions --open
      fluidpd transitions --worker w3 --limit 5 -o json
    """
    asked = {"worker": worker, "open_only": "true" if open_only else None, "limit": limit}
    rows = rows_of(fetch(context, server, timeout, "/transitions", asked))
    if output is Format.JSON:
        emit_json(rows)
        return
    if not rows:
        say("no transition matches")
        return
    columns = ("id", "worker", "move", "trigger", "reason", "started", "phase", "end", "took", "detail")
    emit_table([transition_row(row) for row in rows], columns)


def transition_row(row: Mapping[str, Any]) -> dict[str, Any]:
    started, ended = row.get("started_wall_s"), row.get("ended_wall_s")
    took = span(ended - started) if isinstance(started, int | float) and isinstance(ended, int | float) else ABSENT
    way = " (back)" if row.get("heading") == "back" and not row.get("end") else ""
    move = f"{cell(row.get('from_role'))}->{cell(row.get('to_role'))}"
    return {**row, "move": move, "started": moment(started), "took": took, "phase": f"{cell(row.get('phase'))}{way}"}


def decisions(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="how many, newest first")] = 20,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Decisions, newest first, one row whenever one changed: also why nothing was done.

    \b
    Examples:
      fluidpd decisions
      fluidpd decisions --limit 3 -o json
    """
    rows = rows_of(fetch(context, server, timeout, "/decisions", {"limit": limit}))
    if output is Format.JSON:
        emit_json(rows)
        return
    if not rows:
        say("no decision yet")
        return
    emit_table(
        [decision_row(row) for row in rows], ("at", "action", "reason", "moves", "lenders", "refusals", "advisory", "numbers")
    )


def decision_row(row: Mapping[str, Any]) -> dict[str, Any]:
    moves = [f"{flip.get('worker')}:{flip.get('from')}->{flip.get('to')}" for flip in row.get("flips") or ()]
    refused = [refusal(item) for item in row.get("refusals") or ()]
    return {
        **row,
        "at": moment(row.get("wall_s")),
        "moves": moves,
        "refusals": "; ".join(refused),
        "advisory": row.get("would_have"),
    }


def fetch(context: typer.Context, server: str, timeout_s: float, path: str, params: Mapping[str, Any] | None = None) -> Any:
    with reaching(context, server, timeout_s) as api:
        return api.get(path, params)


def rows_of(body: Any) -> list[dict[str, Any]]:
    """The rows of a listing, whether it is a bare array or a page with `items`."""
    found = body.get("items") if isinstance(body, dict) else body
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
