"""`fluidpd simulate`: tables, documents and reports that say simulated; scenario files; what is wrong is one clear line."""

from __future__ import annotations

import json
import re

import pytest

from cli.report import page
from fluidpd.simulator import check, policies
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload

SCENARIO = """
name = "small <b>&</b> short"
policies = ["static", "colocated_chunked", "thresholds"]
[fleet]
prefill = 1
decode = 2
[[part]]
trace = "azure2023_code"
minutes = 0.1
"""


@pytest.fixture(autouse=True)
def laws_are_checked(monkeypatch):
    monkeypatch.setattr(check, "ALWAYS", True)


def test_every_policy_has_its_line_and_the_document_says_simulated(fluidpd):
    done = fluidpd("simulate", "--minutes", "0.1", "--policy", ",".join(policies.POLICIES), "--prefill", "1", "--json")
    assert done.code == 0
    document = json.loads(done.out)
    assert document["engine"] == "simulated"
    assert [run["policy"].split()[0] for run in document["runs"]] == list(policies.POLICIES)
    assert all(run["lost"] == 0 for run in document["runs"])
    assert "simulated" in done.err


def test_a_scenario_file_is_run_and_reported_in_one_file_that_asks_nobody(fluidpd, tmp_path):
    file, report = tmp_path / "small.toml", tmp_path / "report.html"
    file.write_text(SCENARIO)
    done = fluidpd("simulate", "--scenario", str(file), "--html", str(report))
    assert done.code == 0, done.err
    text = report.read_text()
    outside = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", text, flags=re.S)
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import""", outside)
    assert "<b>&</b>" not in outside and "small &lt;b&gt;&amp;&lt;/b&gt; short" in outside
    assert text.count("imulated") > 6
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert {"ttft", "gaps", "queue-0", "kv-2", "pressure-2"} <= set(data)
    assert len(data["ttft"]["series"]) == 3 and data["queue-0"]["x"]
    assert all(a <= b for curve in data["ttft"]["series"] for a, b in zip(curve["y"], curve["y"][1:], strict=False))


def test_the_schema_is_printed_without_a_run(fluidpd):
    assert "part" in json.loads(fluidpd("simulate", "--schema").out)["properties"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policy", "best"), "static_tuned"),
        (("--scenario", "/nowhere.toml"), "check --scenario"),
        (("--trace", "/nowhere.jsonl"), "no trace file"),
        (("--minutes", "0.05", "--html", "/nowhere/report.html"), "choose another --html"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_to_do(fluidpd, options, says):
    done = fluidpd("simulate", *options)
    assert done.code != 0 and says in done.err


def test_a_wrong_scenario_is_named_by_place_and_points_to_the_schema(fluidpd, tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(SCENARIO.replace("prefill = 1", "prefill = 0"))
    done = fluidpd("simulate", "--scenario", str(file))
    assert done.code != 0 and "fleet.prefill" in done.err and "--schema" in done.err


def test_a_mooncake_file_is_a_trace(fluidpd, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n' * 2)
    document = json.loads(fluidpd("simulate", "--trace", str(file), "--policy", "static", "--json").out)
    assert document["workload"]["cached_tokens_mean"] == 299.5
    assert "prefix reuse" in document["workload"]["notes"][0]


def test_a_report_of_one_request_has_curves_and_lanes():
    from cli.workloads import DEFAULT_COST, load_cost

    run = policies.simulate(
        "static",
        Workload("one", (Request(0.0, 100, 2),), True),
        load_cost(DEFAULT_COST),
        SimSettings(prefill=1, decode=1, draw=True),
    )
    text = page("one", "one request", "table", SimSettings().slo, [run])
    assert text.count('class="lane"') == 2 and 'data-chart="queue-0"' in text
