"""`python bench/build_grafana.py`: writes Grafana's dashboards in config/grafana, from the one list of panels below.

Never edited by hand: a test fails when the JSON is not what this makes, and another asks a real Prometheus every expression.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FOLDER = Path(__file__).resolve().parent.parent / "config" / "grafana"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RANGE = "$__rate_interval"
HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` names the lines by their labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    text: str = ""
    width: int = 12
    is_number: bool = False


def panel(title: str, *queries: tuple[str, str] | str, unit: str = "short", text: str = "", width: int = 12) -> Panel:
    asked = tuple(Query(q) if isinstance(q, str) else Query(*q) for q in queries)
    return Panel(title, asked, unit, text, width)


def number(title: str, expr: str, unit: str = "short", text: str = "") -> Panel:
    return Panel(title, (Query(expr),), unit, text, 4, is_number=True)


def or_none(expr: str) -> str:
    """A rate of what may never have happened: then the line is at 0, not absent."""
    return f"{expr} or on () vector(0)"


BY_ROLE = "* on (worker) group_left (fluidpd_worker_role) (max by (worker, fluidpd_worker_role) (fluidpd_worker_role) == 1)"


def by_role(metric: str) -> str:
    """SGLang's gauge by the role that each worker has now: its own label keeps the role of its start."""
    return f"sum by (fluidpd_worker_role) (sum by (worker) ({metric}) {BY_ROLE})"


def latency(metric: str, share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket[{RANGE}])))"


FLEET: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            number("Leaders", "sum(fluidpd_controller_leader)", text="One leads. None: roles are frozen."),
            number("Workers up", "sum(fluidpd_worker_up)"),
            number("Prefill workers", 'sum(fluidpd_pool_workers{role="prefill", state=~"serving|slow"})'),
            number("Decode workers", 'sum(fluidpd_pool_workers{role="decode", state=~"serving|slow"})'),
            number("Moves under way", 'sum(fluidpd_pool_workers{state="moving"})'),
            number("Overrides", "sum(fluidpd_overrides)", text="Pins and pauses of people."),
        ),
    ),
    (
        "Objectives",
        (
            panel(
                "Requests that missed their target",
                ("slo:sli_error:ratio_rate5m", "{{model}} {{slo}}"),
                unit="percentunit",
                text="Share of the requests judged in the last 5 minutes.",
            ),
            panel(
                "Requests judged",
                (f"sum by (model, slo) (rate(fluidpd_slo_requests_total[{RANGE}]))", "{{model}} {{slo}}"),
                unit="reqps",
            ),
            panel(
                "Error budget left",
                ("slo:period_error_budget_remaining:ratio", "{{model}} {{slo}}"),
                unit="percentunit",
                text="Of the whole window of 30 days. Below 0 it is spent.",
            ),
            panel(
                "Burn rate",
                ("slo:current_burn_rate:ratio", "{{model}} {{slo}}"),
                text="1 spends the budget in exactly its window. 14.4 over an hour pages.",
            ),
        ),
    ),
    (
        "Pressure and decisions",
        (
            panel(
                "Pressure",
                ("max by (pool) (fluidpd_pressure_index)", "{{pool}}"),
                ("max by (pool, bound) (fluidpd_pressure_threshold)", "{{pool}} {{bound}}"),
                text="Above 1 a miss is predicted. Lines: where the policy acts.",
            ),
            panel(
                "Decisions",
                (f"sum by (action, reason) (rate(fluidpd_decisions_total[{RANGE}]))", "{{action}}: {{reason}}"),
                unit="cps",
            ),
            panel(
                "Role of each worker",
                ('max by (worker) (fluidpd_worker_role{fluidpd_worker_role="prefill"})', "{{worker}}"),
                text="1: prefill. 0: decode.",
            ),
            panel("Workers by role and state", ("max by (role, state) (fluidpd_pool_workers)", "{{role}} {{state}}")),
            panel(
                "Role moves that ended",
                ("sum by (outcome) (increase(fluidpd_transitions_total[1h]))", "{{outcome}}"),
                text="In the hour before each point.",
            ),
            panel(
                "Time of a phase, 95 %",
                (
                    or_none(
                        "histogram_quantile(0.95, sum by (le, phase) (increase(fluidpd_transition_duration_seconds_bucket[1h])))"
                    ),
                    "{{phase}}",
                ),
                unit="s",
            ),
        ),
    ),
    (
        "The engines, by the role that they have now",
        (
            panel("Requests running", (by_role("sglang:num_running_reqs"), "{{fluidpd_worker_role}}")),
            panel("Requests waiting", (by_role("sglang:num_queue_reqs"), "{{fluidpd_worker_role}}")),
            panel(
                "Time to first token",
                (latency("sglang:time_to_first_token_seconds", 0.5), "50 %"),
                (latency("sglang:time_to_first_token_seconds", 0.99), "99 %"),
                unit="s",
                text="By SGLang's buckets: a value at the last bound means that or more.",
            ),
            panel(
                "Time between tokens",
                (latency("sglang:inter_token_latency_seconds", 0.5), "50 %"),
                (latency("sglang:inter_token_latency_seconds", 0.99), "99 %"),
                unit="s",
                text="By SGLang's buckets: a value at the last bound means that or more.",
            ),
        ),
    ),
)

ONE = '{worker=~"$worker"}'
WORKERS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Telemetry",
        (
            panel(
                "Age of the newest sample",
                (f"time() - max by (worker) (fluidpd_worker_last_telemetry_timestamp_seconds{ONE})", "{{worker}}"),
                unit="s",
            ),
            panel(
                "Samples sent",
                (f"sum by (worker) (rate(fluidpd_sidecar_samples_sent_total{ONE}[{RANGE}]))", "{{worker}}"),
                unit="cps",
            ),
            panel(
                "Last contact with a controller",
                (f"time() - max by (worker) (fluidpd_sidecar_controller_last_contact_timestamp_seconds{ONE})", "{{worker}}"),
                unit="s",
            ),
            panel(
                "Refused of the engine's metrics page",
                (
                    or_none(f"sum by (worker, reason) (rate(fluidpd_sidecar_page_rejected_total{ONE}[{RANGE}]))"),
                    "{{worker}} {{reason}}",
                ),
                unit="cps",
                text="Read only while no plugin speaks.",
            ),
        ),
    ),
    (
        "Capacity",
        (
            panel(
                "KV in use or promised",
                (f"max by (worker) (fluidpd_worker_kv_usage_ratio{ONE})", "{{worker}}"),
                unit="percentunit",
            ),
            panel(
                "Room in a decode step",
                (or_none(f"max by (worker) (fluidpd_worker_slack_seconds{ONE})"), "{{worker}}"),
                unit="s",
            ),
            panel("Requests running", (f"sum by (worker) (sglang:num_running_reqs{ONE})", "{{worker}}")),
            panel("KV in use, by the engine", (f"max by (worker) (sglang:token_usage{ONE})", "{{worker}}"), unit="percentunit"),
        ),
    ),
    (
        "What FluidPD does with it",
        (
            panel(
                "Commands answered",
                (
                    or_none(f"sum by (command, outcome) (rate(fluidpd_sidecar_commands_total{ONE}[{RANGE}]))"),
                    "{{command}}: {{outcome}}",
                ),
                unit="cps",
            ),
            panel(
                "Prompts asked of peers",
                (
                    or_none(f"sum by (worker, answer) (rate(fluidpd_sidecar_claims_asked_total{ONE}[{RANGE}]))"),
                    "{{worker}} {{answer}}",
                ),
                unit="cps",
            ),
            panel(
                "Borrowed tokens",
                (f"sum by (worker) (rate(fluidpd_sidecar_borrowed_chunk_tokens_sum{ONE}[{RANGE}]))", "{{worker}}"),
                unit="cps",
            ),
            panel(
                "Generations that peers continue",
                (f"max by (worker) (fluidpd_sidecar_relays_open{ONE})", "{{worker}}"),
            ),
            panel(
                "Role moves that ended",
                (f"sum by (worker, end) (increase(fluidpd_sidecar_moves_ended_total{ONE}[1h]))", "{{worker}} {{end}}"),
            ),
            panel(
                "Open role move",
                (or_none(f"max by (worker, phase) (fluidpd_worker_transition_age_seconds{ONE})"), "{{worker}} {{phase}}"),
                unit="s",
            ),
        ),
    ),
    (
        "Standing",
        (
            panel("Plugin armed", (f"max by (worker) (fluidpd_worker_plugin_armed{ONE})", "{{worker}}")),
            panel("May change its role", (f"max by (worker) (fluidpd_worker_flippable{ONE})", "{{worker}}")),
            panel("Ways in which it stands open", (f"max by (worker) (fluidpd_worker_exposed{ONE})", "{{worker}}")),
            panel("Needs its engine restarted", (f"max by (worker) (fluidpd_worker_quarantined{ONE})", "{{worker}}")),
        ),
    ),
)

CONTROLLER: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "The loop",
        (
            panel(
                "Ticks",
                (f"sum by (instance, outcome) (rate(fluidpd_ticks_total[{RANGE}]))", "{{instance}} {{outcome}}"),
                unit="cps",
            ),
            panel(
                "Time of a tick",
                (f"histogram_quantile(0.5, sum by (le) (rate(fluidpd_tick_duration_seconds_bucket[{RANGE}])))", "50 %"),
                (f"histogram_quantile(0.99, sum by (le) (rate(fluidpd_tick_duration_seconds_bucket[{RANGE}])))", "99 %"),
                unit="s",
            ),
            panel(
                "Ticks begun late",
                (f"sum by (instance) (rate(fluidpd_tick_overruns_total[{RANGE}]))", "{{instance}}"),
                unit="cps",
            ),
            panel(
                "Since the last good tick",
                ("time() - max(fluidpd_last_successful_tick_timestamp_seconds)", "seconds"),
                unit="s",
            ),
        ),
    ),
    (
        "Leadership and database",
        (
            panel("Leads", ("fluidpd_controller_leader", "{{instance}}")),
            panel(
                "May act for", ("max by (instance) (fluidpd_lease_expiry_timestamp_seconds) - time()", "{{instance}}"), unit="s"
            ),
            panel("Database", ("fluidpd_db_up", "{{instance}}")),
            panel(
                "History rows that wait, and that were lost",
                ("fluidpd_db_buffered_samples", "{{instance}} waiting"),
                (f"rate(fluidpd_db_dropped_samples_total[{RANGE}])", "{{instance}} lost a second"),
            ),
        ),
    ),
    (
        "What arrives",
        (
            panel(
                "Samples not used",
                (f"sum by (reason) (rate(fluidpd_samples_rejected_total[{RANGE}]))", "{{reason}}"),
                unit="cps",
            ),
            panel(
                "Messages refused",
                (f"sum by (reason) (rate(fluidpd_messages_rejected_total[{RANGE}]))", "{{reason}}"),
                unit="cps",
            ),
            panel("Listeners", ("fluidpd_sse_clients", "{{instance}}")),
            panel("Advisory mode", ("max by (instance) (fluidpd_dry_run)", "{{instance}}")),
        ),
    ),
    (
        "Alerts",
        (
            panel("Alerts of the built-in engine", ("sum by (state, severity) (fluidpd_alerts)", "{{state}} {{severity}}")),
            panel(
                "Notifications",
                (or_none(f"sum by (receiver, outcome) (rate(fluidpd_notifications_total[{RANGE}]))"), "{{receiver}} {{outcome}}"),
                unit="cps",
            ),
        ),
    ),
)
DASHBOARDS: dict[str, tuple[str, tuple[tuple[str, tuple[Panel, ...]], ...]]] = {
    "fluidpd-fleet": ("FluidPD: the fleet", FLEET),
    "fluidpd-workers": ("FluidPD: workers", WORKERS),
    "fluidpd-controller": ("FluidPD: the controller", CONTROLLER),
}


def dashboard(uid: str, title: str, rows: Sequence[tuple[str, Sequence[Panel]]]) -> Dashboard:
    board = Dashboard(title).uid(uid).tags(["fluidpd"]).refresh("30s").time("now-1h", "now").timezone("browser").readonly()
    board.with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    if any("$worker" in q.expr for _, panels in rows for p in panels for q in p.queries):
        workers = QueryVariable("worker").label("Worker").datasource(SOURCE).query("label_values(fluidpd_worker_info, worker)")
        board.with_variable(workers.multi(True).include_all(True).all_value(".+").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    ids = itertools.count(1)
    for name, panels in rows:
        board.with_row(Row(name).id(next(ids)))
        for each in panels:
            board.with_panel(_built(each, next(ids)))
    return board


def _built(each: Panel, id_: int) -> stat.Panel | timeseries.Panel:
    made: stat.Panel | timeseries.Panel = stat.Panel() if each.is_number else timeseries.Panel()
    made.id(id_).title(each.title).unit(each.unit).datasource(SOURCE).span(each.width).height(4 if each.is_number else HEIGHT)
    if each.text:
        made.description(each.text)
    for letter, query in zip("ABCDEF", each.queries, strict=False):
        made.with_target(Dataquery().expr(query.expr).legend_format(query.legend or each.title).ref_id(letter).datasource(SOURCE))
    return made


def expressions() -> list[str]:
    """Every query of every panel, as Grafana would send it but for its variables."""
    return [q.expr for _, rows in DASHBOARDS.values() for _, panels in rows for p in panels for q in p.queries]


def made() -> dict[str, str]:
    """File name and JSON of each dashboard."""
    return {
        f"{uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(dashboard(uid, title, rows).build()) + "\n"
        for uid, (title, rows) in DASHBOARDS.items()
    }


def main() -> int:
    for name, text in made().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
