"""`fluidpd alerts`: what fires and why, a test message to a receiver, and silences with a time and a reason.

Never talks to a receiver itself: the controller that leads does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.client import DEFAULT_SERVER, ServerOption, TimeoutOption, reaching
from cli.operate import DryRunOption, ReasonOption, act, reason_of, shown
from cli.output import Format, OutputOption, emit_json, emit_table, moment, parse_span, say, span

app = typer.Typer(help="Alerts: what fires, who is told, and silences.", no_args_is_help=True)
_ORDER = {"firing": 0, "nodata": 1, "pending": 2, "resolved": 3}
_OWN = ("alertname", "severity", "cluster")


@app.command(name="list")
def list_(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="also the Watchdog, and alerts that ended")] = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """What fires or is about to, since when, what it is about, and what to type first. Silences and receivers below it.

    \b
    Examples:
      fluidpd alerts list
      fluidpd alerts list --all -o json
    """
    with reaching(context, server, timeout) as api:
        found = api.get("/alerts")
    if output is Format.JSON:
        emit_json(found)
        return
    alerts = [a for a in found["alerts"] if everything or (a["state"] != "resolved" and a["severity"] != "none")]
    if alerts:
        emit_table([_row(a) for a in sorted(alerts, key=_place)], ("severity", "state", "since", "alert", "about", "silenced"))
        for alert in sorted(alerts, key=_place):
            texts = alert["annotations"]
            typer.echo(f"\n{texts.get('summary', alert['rule'])}")
            for name in ("description", "likely_cause", "what_fluidpd_does", "budget_left", "first_command", "runbook_url"):
                if texts.get(name):
                    typer.echo(f"  {name.replace('_', ' ')}: {texts[name]}")
    else:
        typer.echo("nothing fires")
    if found["window_scale"] != 1:
        say(f"windows are scaled 1:{found['window_scale']}: this is a demonstration, not a month")
    for silence in found["silences"]:
        about = ", ".join(f"{k}={v}" for k, v in silence["matchers"].items())
        say(f"silence {silence['id']} until {moment(silence['expires_s'])} by {silence['actor']}: {about} ({silence['reason']})")
    for receiver in found["receivers"]:
        state = receiver["trouble"] or ("told" if receiver["told"] else f"not told in mode {found['mode']}")
        say(f"receiver {receiver['name']} ({receiver['kind']}): {state}; {receiver['waiting']} waiting")
    if not found["receivers"]:
        say("no receiver is set (alerting.receivers): alerts are shown, nobody is told")
    for note in found["notes"]:
        say(note)
    say(f"only Prometheus can raise: {', '.join(found['prometheus_only'])}")


def _place(alert: Mapping[str, Any]) -> tuple[int, int, str]:
    return _ORDER.get(alert["state"], 9), {"page": 0, "ticket": 1}.get(alert["severity"], 2), alert["rule"]


def _row(alert: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "severity": alert["severity"],
        "state": alert["state"],
        "since": moment(alert["started_s"] or alert["pending_s"]),
        "alert": alert["rule"],
        "about": ", ".join(f"{k}={v}" for k, v in sorted(alert["labels"].items()) if k not in _OWN),
        "silenced": ", ".join(map(str, alert["silenced_by"])),
    }


@app.command()
def test(
    context: typer.Context,
    receiver: Annotated[str, typer.Argument(help="name of a receiver, as `fluidpd alerts list` shows it", metavar="RECEIVER")],
    reason: ReasonOption = "checking that it arrives",
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 90.0,
) -> None:
    """Send one receiver a message that says it is a test, and say whether it was taken. Exit 1 if it was not.

    \b
    Examples:
      fluidpd alerts test oncall
    """
    with reaching(context, server, timeout) as api:
        answer = act(api, "POST", f"/alerts/test/{quote(receiver, safe='')}", {"reason": reason_of(reason)}, dry_run)
    taken = dry_run or answer["taken"]
    shown(answer, output, f"{receiver} took it" if taken else f"{receiver} did not take it: {answer['why_not']}", dry_run)
    if not taken:
        raise typer.Exit(1)


@app.command()
def silence(
    context: typer.Context,
    label: Annotated[
        list[str], typer.Argument(help="labels that an alert must have: alertname=.., slo=..", metavar="LABEL=VALUE")
    ],
    reason: ReasonOption = "",
    ttl: Annotated[str, typer.Option("--ttl", help="how long: 90s, 30m, 2h, at most 24h", metavar="SPAN")] = "1h",
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """Tell nobody of alerts with these labels for a while. They are judged and shown all the same; what fires on is told then.

    \b
    Examples:
      fluidpd alerts silence alertname=FluidPDErrorBudgetBurn slo=ttft --ttl 2h -m "load test until noon"
      fluidpd alerts silence worker=w3 --reason "its host is being replaced"
    """
    body = {"matchers": dict(_pair(text) for text in label), "ttl_s": parse_span(ttl), "reason": reason_of(reason)}
    with reaching(context, server, timeout) as api:
        answer = act(api, "POST", "/alerts/silences", body, dry_run)
    number = answer.get("id") if isinstance(answer, Mapping) else None
    after = f"; end it with `fluidpd alerts unsilence {number}`" if number else ""
    shown(answer, output, f"silence {number} stands for {span(body['ttl_s'])}{after}", dry_run)


@app.command()
def unsilence(
    context: typer.Context,
    id: Annotated[int, typer.Argument(help="number of the silence, as `fluidpd alerts list` shows it", metavar="ID")],
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    server: ServerOption = DEFAULT_SERVER,
    output: OutputOption = Format.TABLE,
    timeout: TimeoutOption = 10.0,
) -> None:
    """End a silence before its time. What fires is told at once.

    \b
    Examples:
      fluidpd alerts unsilence 4 --reason "the load test is over"
    """
    with reaching(context, server, timeout) as api:
        answer = act(api, "DELETE", f"/alerts/silences/{id}", {"reason": reason_of(reason)}, dry_run)
    shown(answer, output, f"silence {id} is ended", dry_run)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise typer.BadParameter(f"{text!r} is no LABEL=VALUE, such as alertname=FluidPDErrorBudgetBurn")
    return name, value
