"""The queries that a page offers ask for metrics that the controller serves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboard import promql
from dashboard.urls import Window

LIVE = Window.of({}, 1_790_000_000.0)


@pytest.mark.parametrize("key", sorted(promql.METRICS_OF))
def test_a_query_is_whole(key: str) -> None:
    for worker in ("", 'w"1\\'):
        text = promql.External().queries((key,), LIVE, worker)[0].text
        assert "{of" not in text and "$range" not in text and text.count("(") == text.count(")")
        assert text.count("{") == text.count("}") and "{}" not in text


def test_a_label_cannot_end_its_string() -> None:
    text = promql.External().queries(("kv",), LIVE, 'w1"} or up{x="')[0].text
    assert text == 'fluidpd_worker_kv_usage_ratio{worker="w1\\"} or up{x=\\""}'


def test_a_rate_looks_back_a_fifth_of_the_time_shown_and_at_least_a_minute() -> None:
    day = Window.of({"from": "now-1d"}, 1_790_000_000.0)
    assert "[17280s]" in promql.External().queries(("decisions",), day)[0].text
    assert "[180s]" in promql.External().queries(("decisions",), LIVE)[0].text


def named() -> set[str]:
    shapes = " ".join(promql.METRICS_OF.values())
    return {re.sub(r"_(bucket|total)$", "", name) for name in re.findall(r"fluidpd_\w+", shapes)}


async def test_every_metric_named_is_served(tmp_path: Path) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "controller"))
    from memory_fakes import open_api

    async with open_api(tmp_path) as (client, _, _):
        served = {family.name for family in text_string_to_metric_families((await client.get("/metrics")).text)}
    assert named() <= served, named() - served
