"""The shipped rules under promtool: what fires, what does not, and that each alert says what is wrong and what to do."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_labels import RAISED_BY_BOTH

from cli.main import app as cli_app
from controller.alerting.rules import BURN_PAGE, BURN_TICKET, PROMETHEUS_ONLY
from controller.alerting.rules import RULES as BUILT_IN
from controller.metric_set import METRICS
from sidecar.metric_set import METRICS as OF_SIDECAR

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "config" / "alerts" / "fluidpd.yml"
KNOWN = yaml.safe_load(RULES.read_text(encoding="utf-8"))
ALERTS = [rule for group in KNOWN["groups"] for rule in group["rules"] if "alert" in rule]
BURN = "FluidPDErrorBudgetBurn"
SLO = 'model="llama",slo="ttft"'
PAGE, TICKET = ({"severity": s, "model": "llama", "slo": "ttft"} for s in ("page", "ticket"))

pytestmark = pytest.mark.prometheus


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def judged(tmp_path: Path) -> Any:
    """judged(series, expected, interval): promtool finds exactly these alerts, by name, at each time."""
    bare = copy.deepcopy(KNOWN)
    for group in bare["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)  # what they say is another test's matter
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(bare))

    def judge(series: dict[str, str], expected: dict[str, dict[str, list[dict[str, str]]]], interval: str = "1m") -> None:
        tests = [
            {"eval_time": at, "alertname": name, "exp_alerts": [{"exp_labels": labels} for labels in alerts]}
            for at, alerts_by_name in expected.items()
            for name, alerts in alerts_by_name.items()
        ]
        one = {
            "interval": interval,
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": tests,
        }
        suite = {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": [one]}
        (tmp_path / "test.yml").write_text(yaml.safe_dump(suite, sort_keys=False))
        done = promtool("test", "rules", tmp_path / "test.yml")
        assert done.returncode == 0, done.stdout + done.stderr

    return judge


def slo(requests: str, bad: str, known: str, objective: str = "0.99x400") -> dict[str, str]:
    return {
        f"fluidpd_slo_requests_total{{{SLO}}}": requests,
        f"fluidpd_slo_bad_requests_total{{{SLO}}}": bad,
        f"fluidpd_slo_known_seconds_total{{{SLO}}}": known,
        f"fluidpd_slo_objective_ratio{{{SLO}}}": objective,
    }


# ------------------------------------------------------------------ the error budget


def test_a_fast_burn_pages_once_half_of_its_long_window_was_seen_and_resolves_after_it_has_ended(judged: Any) -> None:
    series = slo("0+100x400", "0+20x90 1800+0x310", "0+60x400")
    judged(series, {"20m": {BURN: []}, "40m": {BURN: [PAGE]}, "89m": {BURN: [PAGE]}, "110m": {BURN: []}})


def test_the_short_window_ends_an_alert_whose_long_window_still_burns_after_it_was_kept_for_five_minutes(judged: Any) -> None:
    series = slo("0+100x400", "0+20x60 1200+0x340", "0+60x400")
    judged(series, {"64m": {BURN: [PAGE]}, "66m": {BURN: [PAGE]}, "80m": {BURN: []}})


def test_a_prometheus_that_has_seen_45_seconds_pages_nobody(judged: Any) -> None:
    series = slo("0+100x10", "0+100x10", "0+15x10", "0.99x10")
    judged(series, {"45s": {BURN: []}, "2m": {BURN: []}}, interval="15s")


def test_a_burn_without_traffic_is_not_judged(judged: Any) -> None:
    judged(slo("0+5x200", "0+5x200", "0+60x200"), {"90m": {BURN: []}})
    judged(slo("0+7x200", "0+7x200", "0+60x200"), {"90m": {BURN: [PAGE]}})  # 35 in five minutes


def test_a_slow_burn_of_half_a_day_is_a_ticket_and_no_page(judged: Any) -> None:
    series = slo("0+1000x90", "0+40x90", "0+600x90", "0.99x90")
    judged(series, {"11h": {BURN: []}, "14h": {BURN: [TICKET]}}, interval="10m")


def test_minutes_that_nobody_counted_do_not_count_as_seen(judged: Any) -> None:
    judged(slo("0+100x200", "0+20x200", "0+20x200"), {"70m": {BURN: []}})


def test_an_alert_that_fires_goes_on_while_nothing_is_known_and_ends_when_it_is_known_that_all_is_well(judged: Any) -> None:
    gone = slo("0+100x60 _x100", "0+20x60 _x100", "0+60x60 _x100", "0.99x60 _x100")
    judged(gone, {"60m": {BURN: [PAGE]}, "90m": {BURN: [PAGE]}, "150m": {BURN: [PAGE]}})
    back = slo("0+100x60 _x60 6000+100x100", "0+20x60 _x60 1200+0x100", "0+60x60 _x60 3600+60x100", "0.99x400")
    judged(back, {"119m": {BURN: [PAGE]}, "135m": {BURN: []}})


def test_an_objective_of_ninety_percent_pages_near_total_loss_as_fourteen_times_it_is_more_than_all(judged: Any) -> None:
    judged(slo("0+100x200", "0+96x200", "0+60x200", "0.9x200"), {"60m": {BURN: [PAGE]}})
    judged(slo("0+100x200", "0+94x200", "0+60x200", "0.9x200"), {"60m": {BURN: []}})


def test_a_new_leader_on_another_address_changes_nothing(judged: Any) -> None:
    series: dict[str, str] = {}
    for name, values in slo("0+100x35 _x60", "0+20x35 _x60", "0+60x35 _x60", "0.99x35 _x60").items():
        series[name.replace("{", '{instance="a",')] = values
    for name, values in slo("_x35 3500+100x60", "_x35 700+20x60", "_x35 2100+60x60", "_x35 0.99x60").items():
        series[name.replace("{", '{instance="b",')] = values
    judged(series, {"34m": {BURN: [PAGE]}, "45m": {BURN: [PAGE]}, "70m": {BURN: [PAGE]}})


def test_one_model_that_burns_says_nothing_of_another(judged: Any) -> None:
    burning, idle = slo("0+100x200", "0+20x200", "0+60x200"), slo("0+0x200", "0+0x200", "0+60x200")
    series = burning | {name.replace("llama", "qwen"): values for name, values in idle.items()}
    judged(series, {"70m": {BURN: [PAGE]}})


# ------------------------------------------------------------------ the others

W1 = {"worker": "w1"}
CASES: dict[str, tuple[dict[str, str], str, str, dict[str, str]]] = {
    # name: series, when it does not fire yet or any more, when it does, its labels beside the severity
    "FluidPDControllerDown": ({'up{job="fluidpd-controller",instance="a"}': "1x5 0x20"}, "6m", "9m", {}),
    "FluidPDNoLeader": (
        {'fluidpd_controller_leader{instance="a"}': "1x5 0x20", 'fluidpd_controller_leader{instance="b"}': "0x25"},
        "5m",
        "8m",
        {},
    ),
    "FluidPDTelemetryStale": ({'fluidpd_worker_last_telemetry_timestamp_seconds{worker="w1"}': "0+60x5 300x20"}, "4m", "8m", {}),
    "FluidPDTransitionFailing": (
        {
            'fluidpd_transitions_total{outcome="rolled_back",trigger="auto"}': "0x5 1+1x3 4x9",
            'fluidpd_transitions_total{outcome="done",trigger="auto"}': "0x5 1x20",
        },
        "5m",
        "10m",
        {},
    ),
    "FluidPDPoolAtMinimum": (
        {
            'fluidpd_pressure_index{pool="prefill",instance="a"}': "0.2x5 1.4x30",
            'fluidpd_pressure_threshold{pool="prefill",bound="high",instance="a"}': "1.2x40",
            'fluidpd_pool_workers{role="decode",state="serving"}': "1x40",
            'fluidpd_pool_min_workers{role="decode"}': "1x40",
        },
        "7m",
        "12m",
        {"role": "decode"},
    ),
    "FluidPDRoleEmpty": (
        {
            'fluidpd_pool_workers{role="prefill",state="serving"}': "1x5 0x20",
            'fluidpd_pool_workers{role="prefill",state="moving"}': "0x25",
            'fluidpd_pool_workers{role="decode",state="serving"}': "2x25",
        },
        "5m",
        "8m",
        {"role": "prefill"},
    ),
    "FluidPDPairBroken": (
        {
            'fluidpd_worker_stuck_transfers{worker="d1"}': "0x5 3x20",
            'fluidpd_worker_stuck_transfers{worker="d2"}': "0x25",
            'fluidpd_pool_workers{role="prefill",state="lost"}': "1x25",
        },
        "5m",
        "7m",
        {},
    ),
    "FluidPDAutomationPausedTooLong": ({"fluidpd_automation_paused": "1x40"}, "3h", "4h10m", {}),
    "FluidPDDatabaseUnavailable": ({"fluidpd_db_up": "1x5 0x20"}, "6m", "8m", {}),
    "FluidPDSamplesDropped": ({"fluidpd_db_dropped_samples_total": "0x5 9x60"}, "5m", "8m", {}),
    "FluidPDNotificationsFailing": (
        {
            'fluidpd_notifications_total{receiver="ops",outcome="retried"}': "0+1x30",
            'fluidpd_notifications_total{receiver="ops",outcome="sent"}': "4x30",
        },
        "2m",
        "12m",
        {"receiver": "ops"},
    ),
    "FluidPDTransitionStuck": ({'fluidpd_worker_transition_age_seconds{phase="drain",worker="w1"}': "0+60x20"}, "5m", "7m", W1),
    "FluidPDWorkerUnrecoverable": ({'fluidpd_worker_quarantined{worker="w1"}': "0x5 1x20"}, "5m", "7m", W1),
    "FluidPDRoleFlapping": ({'fluidpd_sidecar_moves_ended_total{worker="w1",end="done"}': "0x5 0+1x9 9x9"}, "6m", "14m", W1),
    "FluidPDPluginDisarmed": ({'fluidpd_worker_plugin_armed{worker="w1"}': "1x5 0x20"}, "6m", "8m", W1),
    "FluidPDWorkerNotFlippable": ({'fluidpd_worker_flippable{worker="w1"}': "1x5 0x20"}, "9m", "12m", W1),
}


@pytest.mark.parametrize("name", CASES)
def test_each_alert_fires_when_it_should_and_not_before(judged: Any, name: str) -> None:
    series, before, after, labels = CASES[name]
    severity = next(rule["labels"]["severity"] for rule in ALERTS if rule["alert"] == name)
    interval = "10m" if before.endswith("h") else "1m"  # hours in minutes would take promtool long
    judged(series, {before: {name: []}, after: {name: [{"severity": severity, **labels}]}}, interval)


def test_every_alert_has_a_case_here_and_the_watchdog_always_fires(judged: Any) -> None:
    assert {rule["alert"] for rule in ALERTS} == {*CASES, BURN, "Watchdog"}
    judged({}, {"1m": {"Watchdog": [{"severity": "none"}]}})


def test_an_alertmanager_that_hears_both_engines_sees_one_alert_for_one_thing() -> None:
    own = {name: set(labels) for name, (_, _, _, labels) in CASES.items()} | {BURN: set(PAGE) - {"severity"}, "Watchdog": set()}
    assert {name: own[name] for name in RAISED_BY_BOTH} == RAISED_BY_BOTH
    ours = {(rule.name, rule.severity.value) for rule in (BURN_PAGE, BURN_TICKET, *(rule for rule, _ in BUILT_IN))}
    theirs = {(rule["alert"], rule["labels"]["severity"]) for rule in ALERTS}
    assert ours <= theirs and {name for name, _ in ours} == set(RAISED_BY_BOTH)
    assert set(PROMETHEUS_ONLY) <= {name for name, _ in theirs - ours}


def test_recorded_series_have_the_names_that_sre_tools_know() -> None:
    windows = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
    known = {f"slo:sli_error:ratio_rate{w}" for w in windows} | {
        "slo:objective:ratio",
        "slo:error_budget:ratio",
        "slo:current_burn_rate:ratio",
        "slo:period_error_budget_remaining:ratio",
    }
    assert known <= {rule["record"] for group in KNOWN["groups"] for rule in group["rules"] if "record" in rule}


def test_a_worker_that_was_never_heard_counts_as_silent_and_one_that_is_heard_does_not(judged: Any) -> None:
    stale = "FluidPDTelemetryStale"
    judged({'fluidpd_worker_up{worker="w1"}': "0x20"}, {"3m": {stale: [{"severity": "ticket"}]}})
    heard = {'fluidpd_worker_up{worker="w1"}': "0x20", 'fluidpd_worker_last_telemetry_timestamp_seconds{worker="w1"}': "0+60x20"}
    judged(heard, {"10m": {stale: []}})


def test_a_pool_at_its_minimum_at_ease_is_nobodys_business(judged: Any) -> None:
    series, *_ = CASES["FluidPDPoolAtMinimum"]
    judged(series | {'fluidpd_pressure_index{pool="prefill",instance="a"}': "0.5x40"}, {"20m": {"FluidPDPoolAtMinimum": []}})


# ------------------------------------------------------------------ the file


def test_the_configurations_in_the_guide_are_accepted_by_the_tools_they_are_for(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for name, tool in (("prometheus.yml", ("promtool", "check", "config")), ("alertmanager.yml", ("amtool", "check-config"))):
        (text,) = re.findall(rf"```yaml\n(# {name}\n.*?)```", guide, re.DOTALL)
        text = text.replace("/etc/prometheus/fluidpd.yml", str(RULES)).replace(
            "/etc/prometheus/fluidpd.token", str(tmp_path / "token")
        )
        (tmp_path / "token").write_text("t")
        (tmp_path / name).write_text(text)
        done = subprocess.run([*tool, str(tmp_path / name)], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stderr


def test_a_page_says_how_many_requests_missed_their_target(tmp_path: Path) -> None:
    annotations = next(rule["annotations"] for rule in ALERTS if rule["alert"] == BURN)
    said = {key: text for key, text in annotations.items() if "{{" not in text}
    said["summary"] = "The ttft SLO of llama is burning its error budget fast"
    said["description"] = re.sub(r"\{\{ with.*\{\{ end \}\}", "20%", annotations["description"])
    one = {
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in slo("0+100x90", "0+20x90", "0+60x90").items()],
        "alert_rule_test": [
            {"eval_time": "60m", "alertname": BURN, "exp_alerts": [{"exp_labels": PAGE, "exp_annotations": said}]}
        ],
    }
    (tmp_path / "fluidpd.yml").write_text(RULES.read_text(encoding="utf-8"))
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["fluidpd.yml"], "evaluation_interval": "1m", "tests": [one]})
    )
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']} {rule['labels']['severity']}")
def test_every_alert_says_what_is_wrong_what_fluidpd_does_and_what_to_do_first(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket", "none")
    assert set(rule["annotations"]) == {"summary", "description", "what_fluidpd_does", "first_command", "runbook_url"}
    assert all(rule["annotations"].values())
    kebab = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", rule["alert"].removeprefix("FluidPD")).lower()
    assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{kebab}.md")


def test_rules_ask_only_for_metrics_that_are_exported_with_words_that_they_have() -> None:
    exported = {s.name: s for s in (*METRICS, *OF_SIDECAR)}
    for rule in (rule for group in KNOWN["groups"] for rule in group["rules"]):
        for name, matchers in re.findall(r"\b(fluidpd_[a-z_]+)(?:\{([^}]*)\})?", rule["expr"]):
            assert name in exported, f"{name} in {rule.get('alert', rule.get('record'))}"
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                assert set(value.split("|")) <= set(exported[name].labels[label])


def test_first_commands_are_commands_of_the_command_line() -> None:
    from typer.main import get_command

    known = set(get_command(cli_app).commands)  # type: ignore[attr-defined]
    used = {rule["annotations"]["first_command"].split()[1] for rule in ALERTS}
    assert used - {"alerts"} <= known
