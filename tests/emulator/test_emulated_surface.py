"""The surface against scrapes of the real SGLang 0.5.23: the same names, types and labels."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from emulator_fleet import fleet

FIXTURES = Path(__file__).parent.parent / "sidecar" / "fixtures"
PD = {"p": "prefill", "d": "decode"}
OWN_INFO = {"emulated", "cost_model", "boot"}


def families(text: str) -> dict[str, tuple[str, set[frozenset[str]], set[str]]]:
    """name -> (type, sets of label names, bucket bounds)"""
    found: dict[str, tuple[str, set[frozenset[str]], set[str]]] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split()
            found[current] = (kind, set(), set())
        elif line and not line.startswith("#"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            bound = labels.pop("le", None)
            if bound is not None:
                found[current][2].add(bound)
            found[current][1].add(frozenset(labels))
    return found


@pytest.mark.parametrize("scrape", ["metrics_prefill", "metrics_decode"])
async def test_metrics_have_every_series_of_the_real_one_with_its_type_labels_and_buckets(scrape: str) -> None:
    real = families(gzip.decompress((FIXTURES / f"{scrape}.txt.gz").read_bytes()).decode())
    async with fleet(PD) as f:
        page = await f.client.get(f.url("d") + "/metrics")
    mine = families(page.text)
    assert page.headers["content-type"].startswith("text/plain")
    for name, (kind, labels, bounds) in real.items():
        assert name in mine, f"{name} is missing"
        assert mine[name][0] == kind, name
        assert mine[name][1] == labels, name
        assert mine[name][2] == bounds, name


async def test_request_histograms_have_sglangs_default_buckets_and_count_a_request_once() -> None:
    async with fleet(PD) as f:
        await f.both("p", "d", "count me", 5)
        page = (await f.client.get(f.url("d") + "/metrics")).text
        other = (await f.client.get(f.url("p") + "/metrics")).text
    mine = families(page)
    assert mine["sglang:time_to_first_token_seconds"][2] >= {"0.1", "0.4", "0.6", "+Inf"}
    assert mine["sglang:inter_token_latency_seconds"][2] >= {"0.002", "0.04", "0.06", "8.0", "+Inf"}
    assert re.search(r'sglang:num_requests_total\{[^}]*is_streaming="true"[^}]*\} 1\.0', page)
    assert re.search(r"sglang:inter_token_latency_seconds_count\{[^}]*\} 4\.0", page)
    # SGLang's HTTP process counts the prefill half as well, but observes no first token of it.
    assert re.search(r'sglang:num_requests_total\{engine_type="prefill"[^}]*is_streaming="true"[^}]*\} 1\.0', other)
    assert not re.search(r"sglang:time_to_first_token_seconds_count\{[^}]*\} 1\.0", other)
    assert re.search(r'sglang:num_running_reqs\{engine_type="dynamic"', page)
    assert re.search(r'sglang:num_requests_total\{engine_type="decode"', page)


def same_shape(real: Any, mine: Any, where: str = "") -> None:
    if isinstance(real, dict):
        assert isinstance(mine, dict) and set(mine) == set(real), where
        for key, value in real.items():
            same_shape(value, mine[key], f"{where}.{key}")
    elif isinstance(real, list):
        assert isinstance(mine, list) and len(mine) == len(real), where
        for a, b in zip(real, mine, strict=True):
            same_shape(a, b, where)
    elif real is not None:
        number = isinstance(real, int | float) and isinstance(mine, int | float)
        assert number or isinstance(mine, type(real)), f"{where}: {mine!r} is not like {real!r}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_loads_have_the_real_ones_shape(role: str) -> None:
    real = json.loads((FIXTURES / f"loads_{role}.json").read_text())
    async with fleet({"w": role}) as f:
        mine = await f.get("w", "/v1/loads?include=core,disagg,queues,memory")
        core = await f.get("w", "/v1/loads?include=core")
    assert mine["loads"][0].pop("decode_moments") is None  # as on the real one before its first decode step
    real["loads"][0].pop("decode_moments")
    same_shape(real, mine)
    assert mine["loads"][0]["disaggregation"]["mode"] == role
    assert "disaggregation" not in core["loads"][0] and "num_running_reqs" in core["loads"][0]


async def test_server_info_has_fields_of_the_real_one_with_their_types_and_says_emulated() -> None:
    real = json.loads(gzip.decompress((FIXTURES / "server_info_decode.json.gz").read_bytes()))
    async with fleet({"d": "decode"}) as f:
        mine = await f.get("d", "/server_info")
        assert await f.get("d", "/get_server_info") == mine
    assert mine["emulated"] is True and mine["version"] == real["version"] == "0.5.23"
    for name, value in mine.items():
        if name in OWN_INFO:
            continue
        assert name in real, name
        assert real[name] is None or isinstance(value, type(real[name])), name


async def test_decode_moments_and_prefill_time_are_kept_truly() -> None:
    async with fleet(PD) as f:
        before = (await f.get("d", "/v1/loads"))["loads"][0]["decode_moments"] or [0.0] * 6
        await f.both("p", "d", "moments", 11)
        after = (await f.get("d", "/v1/loads"))["loads"][0]["decode_moments"]
        prefill = (await f.get("p", "/v1/loads"))["loads"][0]
        moments = [b - a for a, b in zip(before, after, strict=True)]
        assert moments[0] == moments[1] == moments[3] == moments[5] == 10  # the first token came with the KV
        assert 17_000 < moments[2] / moments[0] < 21_000
        assert prefill["total_prefill_busy_us"] > 0 and prefill["total_prefill_uncached_tokens"] == 1


async def test_small_endpoints_answer_as_the_real_one() -> None:
    async with fleet({"d": "decode"}) as f:
        for path in ("/health", "/health_generate", "/model_info", "/get_model_info", "/v1/models"):
            response = await f.client.get(f.url("d") + path)
            assert response.status_code == 200 and response.headers["x-fluidpd-engine"] == "emulated", path
        assert (await f.client.get(f.url("d") + "/nothing")).status_code == 404
        assert (await f.client.get(f.url("d") + "/generate")).status_code == 405
        assert (await f.post("d", "/flush_cache", {})).status_code == 200
        assert (await f.client.get(f.url("d") + "/flush_cache")).status_code == 200
        assert (await f.post("d", "/slow_down", {"forward_sleep_time": "x"})).status_code == 400
        said = await f.get("d", "/emulator")
    assert said["what"] == "emulated worker: stands in for a GPU"
    assert {"late_p50_s", "late_p99_s", "late_max_s", "steps", "chunk_sizes", "lent_steps", "lent_gap_p99_s", "arena"} <= set(
        said
    )


async def test_slow_down_stretches_every_step_until_it_is_reset() -> None:
    async with fleet(PD) as f:
        await f.post("d", "/slow_down", {"forward_sleep_time": 0.03})
        _, slow = await f.both("p", "d", "slow", 5)
        await f.post("d", "/slow_down", {"forward_sleep_time": None})
        _, fast = await f.both("p", "d", "fast", 5)
    gaps = []
    for said in (slow, fast):
        times = [c["meta_info"]["emulator"]["t_s"] for c in said.chunks]
        gaps.append(times[4] - times[3])
    assert gaps[0] == pytest.approx(gaps[1] + 0.03, abs=0.001)


async def test_reset_clears_what_was_measured_but_no_counter() -> None:
    async with fleet(PD) as f:
        await f.both("p", "d", "a", 5)
        assert (await f.get("d", "/emulator"))["steps"] > 0
        await f.post("d", "/emulator/reset", {})
        assert (await f.get("d", "/emulator"))["steps"] == 0
        assert (await f.get("d", "/v1/loads"))["loads"][0]["decode_moments"][0] == 4
