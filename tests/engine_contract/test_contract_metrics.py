"""The metrics FluidPD reads: names, types and labels, on both engines, through its own reader too."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from contract_pair import Pair, Worker

from fluidpd.names import Role
from fluidpd.slo import SloTargets
from fluidpd.telemetry import Known
from sidecar.engines.page import NAMES, parse_page, read_page
from sidecar.engines.slo_counts import WANTED, slo_counts

RUNNING, REQUESTS = "sglang:num_running_reqs", "sglang:num_requests_total"
RANK = {"engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank"}
GAUGES = {
    "sglang:token_usage",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:max_total_num_tokens",
    "sglang:num_used_tokens",
    "sglang:decode_sum_seq_lens",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
}
COUNTERS = {"sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:num_requests_total"}
HISTOGRAMS = {
    "sglang:time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:e2e_request_latency_seconds",
}


@dataclass
class Family:
    kind: str
    labels: set[frozenset[str]] = field(default_factory=set)
    bounds: set[str] = field(default_factory=set)


def families(text: str) -> dict[str, Family]:
    found: dict[str, Family] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split()
            found[current] = Family(kind)
        elif line and not line.startswith("#"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            bound = labels.pop("le", None)
            if bound is not None:
                found[current].bounds.add(bound)
            found[current].labels.add(frozenset(labels))
    return found


async def test_every_metric_that_is_read_is_there_with_its_type(engine: Pair) -> None:
    await engine.both("/generate", 4, stream=True)
    for worker in (engine.p, engine.d):
        said = await engine.get(worker, "/metrics")
        assert said.status == 200 and said.content_type.startswith("text/plain")
        found = families(said.text)
        kinds = dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter")
        missing = [name for name, kind in kinds.items() if name not in found or found[name].kind != kind]
        assert not missing, missing
        assert {name for name in GAUGES if found[name].labels != {frozenset(RANK)}} == set()
        assert found[REQUESTS].labels == {frozenset({"engine_type", "model_name", "is_streaming"})}
    decode = families((await engine.get(engine.d, "/metrics")).text)
    for name in HISTOGRAMS:
        assert decode[name].kind == "histogram" and "+Inf" in decode[name].bounds, name


async def test_the_schedulers_label_says_dynamic_and_the_http_process_says_the_role_of_the_start(engine: Pair) -> None:
    await engine.both("/generate", 4, stream=True)
    for worker, role in ((engine.p, "prefill"), (engine.d, "decode")):
        text = (await engine.get(worker, "/metrics")).text
        said = {
            name: set(re.findall(rf'^{name}{{[^}}]*engine_type="([^"]*)"', text, re.MULTILINE)) for name in (RUNNING, REQUESTS)
        }
        assert said == {RUNNING: {"dynamic"}, REQUESTS: {role}}


async def test_the_default_buckets_have_no_bound_at_the_targets(engine: Pair) -> None:
    await engine.both("/generate", 4, stream=True)
    found = families((await engine.get(engine.d, "/metrics")).text)
    first = {float(bound) for bound in found["sglang:time_to_first_token_seconds"].bounds}
    gaps = {float(bound) for bound in found["sglang:inter_token_latency_seconds"].bounds}
    assert {0.1, 0.4, 0.6} <= first and 0.5 not in first
    assert {0.002, 0.04, 0.06} <= gaps and 0.05 not in gaps


async def test_our_reader_finds_each_reading_under_its_first_name(engine: Pair) -> None:
    await engine.both("/generate", 4, stream=True)
    for worker in (engine.p, engine.d):
        page = parse_page((await engine.get(worker, "/metrics")).text)
        found = read_page(page, 0.0)
        for reading in ("kv_share", "running", "waiting", "kv_capacity_tokens", "kv_used_tokens", "context_tokens"):
            assert found.matched[reading] == NAMES[reading][0]


async def test_both_halves_are_counted_and_latencies_only_where_the_client_is_answered(engine: Pair) -> None:
    names = (REQUESTS, "sglang:time_to_first_token_seconds_count", "sglang:inter_token_latency_seconds_count")

    async def counted() -> list[float]:
        pages = [parse_page((await engine.get(w, "/metrics")).text, also=frozenset(names)) for w in (engine.p, engine.d)]
        return [sum(float(s.value) for s in page.series.get(name, ())) for page in pages for name in names]

    before = await counted()
    await engine.both("/generate", 6, stream=True)
    after = await counted()
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 0, 1, 1, 5]


async def test_the_adapter_measures_both_roles(engine: Pair) -> None:
    await engine.both("/generate", 4)
    for worker, role in ((engine.p, Role.PREFILL), (engine.d, Role.DECODE)):
        measured = await engine.adapter(worker).measure(with_page=True)
        assert measured is not None and measured.role is role
        assert measured.values["kv_capacity_tokens"] > 0 and measured.values["running"] == 0
    assert isinstance(
        read_page(parse_page((await engine.get(engine.d, "/metrics")).text), 0.0).readings["kv_capacity_tokens"], Known
    )


async def test_without_the_plugin_a_request_is_judged_once_by_the_engines_own_histograms(engine: Pair) -> None:
    patient = SloTargets(ttft_s=40.0, tbt_s=8.0)

    async def judged(worker: Worker, targets: SloTargets = patient) -> tuple[dict[str, float], tuple[str, ...]]:
        page = parse_page((await engine.get(worker, "/metrics")).text, also=WANTED)
        assert not page.rejected
        return slo_counts(page.series, targets)

    await engine.both("/generate", 6, stream=True)  # the histograms have their first series with their first request
    before, (at_prefill, _) = (await judged(engine.d))[0], await judged(engine.p)
    for _ in range(2):
        await engine.both("/generate", 6, stream=True)
    after, notes = await judged(engine.d)
    assert {name: after[name] - before[name] for name in after} == dict.fromkeys(
        ("ttft_judged_total", "ttft_good_total", "tbt_judged_total", "tbt_good_total"), 2.0
    )
    assert [n.split(";")[0] for n in notes] == [
        "slo ttft from sglang:time_to_first_token_seconds",
        "slo tbt from sglang:request_time_per_output_token_seconds",
    ]
    assert (await judged(engine.p))[0] == at_prefill, "its half of a request is nobody's first token"
    values, notes = await judged(engine.d, SloTargets(ttft_s=0.5, tbt_s=0.05))
    assert values == {} and "--bucket-time-to-first-token" in notes[0] and "--bucket-inter-token-latency" in notes[1]
