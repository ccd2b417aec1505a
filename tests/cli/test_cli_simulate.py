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
        (("--policy", ","), "--policy names none"),
        (("--trace", ","), "no trace is named"),
        (("--trace", "azure2023_code:rate=fast"), "rate takes a number, not 'fast'"),
        (("--scenario", "/nowhere.toml"), "check --scenario"),
        (("--trace", "/nowhere.jsonl"), "no trace file"),
        (("--minutes", "0.05", "--html", "/nowhere/report.html"), "choose another --html"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_to_do(fluidpd, options, says):
    done = fluidpd("simulate", *options)
    assert done.code != 0 and says in done.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mine.csv is empty: a trace begins with the line arrival_s,prompt_tokens,output_tokens"),
        ("at,in,out\n0,1,1\n", "mine: the first line must be arrival_s,prompt_tokens,output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n-3,10,10\n", "mine: line 2: arrivals must be finite and >= 0"),
        ("arrival_s,prompt_tokens,output_tokens\n0,10,many\n", "mine: line 2: not a number"),
    ],
)
@pytest.mark.parametrize("command", [("simulate", "--trace"), ("replay", "--policy", "static", "--from"), ("advise",)])
def test_a_trace_file_that_cannot_be_used_is_named_with_its_line_by_every_command(fluidpd, tmp_path, command, text, says):
    file = tmp_path / "mine.csv"
    file.write_text(text)
    told = fluidpd(*command, str(file))
    assert told.code == 2 and says in told.err and "Traceback" not in told.err


def test_a_wrong_scenario_is_named_by_place_and_points_to_the_schema(fluidpd, tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(SCENARIO.replace("prefill = 1", "prefill = 0"))
    done = fluidpd("simulate", "--scenario", str(file))
    assert done.code != 0 and "fleet.prefill" in done.err and "--schema" in done.err


YAML = """
name: small
policies: [static, thresholds]
fleet: {prefill: 1, decode: 2}
part:
  - trace: azure2023_code
    minutes: 0.1
    shape: {kind: burst, at_s: 1, for_s: 2, times: 3}
  - trace: azure2023_conv
    minutes: 0.1
    later_s: 2
"""


def test_a_scenario_in_yaml_says_the_same_as_one_in_toml(fluidpd, tmp_path):
    toml = """
name = "small"
policies = ["static", "thresholds"]
fleet = { prefill = 1, decode = 2 }
[[part]]
trace = "azure2023_code"
minutes = 0.1
shape = { kind = "burst", at_s = 1, for_s = 2, times = 3 }
[[part]]
trace = "azure2023_conv"
minutes = 0.1
later_s = 2
"""
    documents = []
    for name, text in (("small.yaml", YAML), ("small.toml", toml)):
        (tmp_path / name).write_text(text)
        done = fluidpd("simulate", "--scenario", str(tmp_path / name), "--json")
        assert done.code == 0, done.err
        document = json.loads(done.out)
        documents.append({**document, "runs": [{**run, "wall_s": None} for run in document["runs"]]})
    assert documents[0] == documents[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("prefill: 1", "prefill: 0"), "wrong.yaml, line 4: fleet.prefill: "),
        (("minutes: 0.1", "minuts: 0.1"), "part.0.minuts: "),
        (("times: 3", "times: -3"), "part.0.shape.burst.times: "),
        (("name: small", "name: small\nname: again"), "name is set twice (first on line 2)"),
        (("static, ", "sttic, "), "no policy 'sttic'"),
        (("name: small", "name: [small"), "is not YAML"),
        (("name: small", ""), "name: field required"),
    ],
)
def test_a_wrong_scenario_in_yaml_is_named_by_file_line_and_key(fluidpd, tmp_path, change, says):
    file = tmp_path / "wrong.yaml"
    file.write_text(YAML.replace(*change, 1))
    done = fluidpd("simulate", "--scenario", str(file))
    assert done.code == 2 and says in done.err and "wrong.yaml" in done.err and "--schema" in done.err


def test_a_mooncake_file_is_a_trace(fluidpd, tmp_path):
    file = tmp_path / "mine.jsonl"
    row = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    file.write_text("".join(row % (1000 * i) for i in range(4)))
    document = json.loads(fluidpd("simulate", "--trace", str(file), "--policy", "static", "--json").out)
    assert document["workload"]["cacheable_tokens_mean"] == 449.2  # three of four, all but the last token
    assert document["runs"][0]["cached_tokens"] == 2 * 599, "two prefill workers in turn: each computes it once"
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
