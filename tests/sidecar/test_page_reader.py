"""The engine's page as it is fetched: within bounds, remembered only while it could be read, and its latencies in words."""

from __future__ import annotations

import asyncio
import gzip
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping

import httpx
import pytest

from fluidpd.names import Role
from sidecar.clock import Clock
from sidecar.engines.exposition import PAGE_LIMIT_BYTES, Series
from sidecar.engines.loads import Loads
from sidecar.engines.page_reader import WINDOW_S, PageReader

TTFT = "sglang:time_to_first_token_seconds"
Answer = Callable[[httpx.Request], httpx.Response]


class HandClock(Clock):
    """Turned by hand. The wall's jumps, as a clock that is put right does, move nothing that is measured."""

    def __init__(self, wall_s: float = 1_764_500_000.0) -> None:
        self.now_s, self.wall_s = 100.0, wall_s

    def now(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.wall_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.wall_s += seconds


def loads(role: Role = Role.DECODE, capacity: float | None = 8000.0) -> Loads:
    return Loads(0.0, None, role, 1.0, 0.0, 0.0, None, capacity, {}, {}, None, None, None)


def reader(answer: Answer, clock: Clock, timeout_s: float = 5.0) -> PageReader:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://w1:30000")
    return PageReader(client, clock, timeout_s)


class Endless(httpx.AsyncByteStream):
    """Pages that never end; counts what was taken of them."""

    def __init__(self, chunk: bytes, pause_s: float = 0.0) -> None:
        self.taken, self._chunk, self._pause_s = 0, chunk, pause_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.taken += len(self._chunk)
            yield self._chunk
            await asyncio.sleep(self._pause_s)


async def test_a_page_without_an_end_is_left_after_the_limit_and_counted() -> None:
    body = Endless(b"sglang:token_usage 0.5\n" * 3000)
    one = reader(lambda r: httpx.Response(200, stream=body), HandClock())
    await one.refresh(loads())
    assert one.values == {} and one.rejected_total == {"oversized": 1} and body.taken < PAGE_LIMIT_BYTES + 200_000


async def test_a_page_that_trickles_is_left_after_its_time() -> None:
    one = reader(lambda r: httpx.Response(200, stream=Endless(b"x", 0.01)), HandClock(), timeout_s=0.05)
    await one.refresh(loads())
    assert one.rejected_total == {"no_answer": 1} and "did not end within 0.05 s" in one.notes[0]


async def test_gzip_is_read_announced_or_not_and_a_broken_one_is_refused() -> None:
    packed = gzip.compress(b"sglang:token_usage 0.5\n")
    answers = [
        httpx.Response(200, content=packed, headers={"Content-Encoding": "gzip"}),
        httpx.Response(200, content=packed),
        httpx.Response(200, content=packed[:-9], headers={}),
        httpx.Response(200, content=b"\x1f\x8b"),
    ]
    clock = HandClock()
    one = reader(lambda r: answers.pop(0), clock)
    used = []
    for _ in range(4):
        await one.refresh(loads())
        used.append(one.values.get("kv_used_tokens"))
        clock.advance(1.0)
    assert used == [4000.0, 4000.0, None, None] and one.rejected_total == {"not_text": 2}


async def test_what_a_page_said_is_forgotten_when_the_next_cannot_be_read() -> None:
    answers = [httpx.Response(200, text="sglang_num_used_tokens 5\n"), httpx.Response(200, text="<html>busy</html>")]
    clock = HandClock()
    one = reader(lambda r: answers.pop(0), clock)
    await one.refresh(loads())
    assert one.values == {"kv_used_tokens": 5.0} and one.sources == {"kv_used_tokens": "sglang_num_used_tokens"}
    await one.refresh(loads())  # not asked again within half a second
    clock.advance(1.0)
    await one.refresh(loads())
    assert one.values == {} and one.sources == {} and one.notes == ("metrics page: /metrics answered an HTML page",)


async def test_every_reading_says_under_which_name_it_was_found_and_only_readings_that_are_used_do() -> None:
    text = "vllm:gpu_cache_usage_perc 0.5\nsglang:num_running_reqs NaN\nsglang:num_queue_reqs 3\n"
    one = reader(lambda r: httpx.Response(200, text=text), HandClock())
    await one.refresh(loads())
    assert one.sources == {"kv_used_tokens": "vllm:gpu_cache_usage_perc"}
    assert one.rejected_total == {"not_finite": 1} and any("num_running_reqs rejected: not_finite" in n for n in one.notes)


async def test_requests_are_counted_where_clients_are_answered_and_nowhere_else() -> None:
    def judge(series: Mapping[str, tuple[Series, ...]]) -> tuple[dict[str, float], tuple[str, ...]]:
        return {"ttft_judged_total": sum(float(s.value) for s in series["sglang:x_count"])}, ("counted",)

    client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda r: httpx.Response(200, text="sglang:x_count 7\n")), base_url="http://w1:30000"
    )
    for role, counted in ((Role.DECODE, {"ttft_judged_total": 7.0}), (Role.PREFILL, {})):
        one = PageReader(client, HandClock(), 5.0, judge, frozenset({"sglang:x_count"}))
        await one.refresh(loads(role))
        assert one.values == counted and set(one.sources) == set(counted) and ("counted" in one.notes) is bool(counted)


def page(upto_1: int, upto_10: int, count: int, total_s: float) -> str:
    return (
        f'{TTFT}_bucket{{le="1.0"}} {upto_1}\n{TTFT}_bucket{{le="10.0"}} {upto_10}\n{TTFT}_bucket{{le="+Inf"}} {count}\n'
        f"{TTFT}_sum {total_s}\n{TTFT}_count {count}\n"
    )


async def latencies_of(pages: list[str], clock: Clock, wait: Callable[[], None]) -> dict[str, object]:
    one = reader(lambda r: httpx.Response(200, text=pages.pop(0)), clock)
    while pages:
        await one.refresh(loads())
        wait()
    return one.latencies().get("ttft_s", {})


async def test_a_latency_that_no_bucket_can_tell_is_said_as_a_bound() -> None:
    clock = HandClock()
    told = await latencies_of([page(5, 5, 5, 2.0), page(5, 15, 65, 900.0)], clock, lambda: clock.advance(6.0))
    assert told["observations"] == 60 and told["p50"] == told["p99"] == "> 10 s" and told["over_s"] == 6.0


async def test_a_window_reaches_back_a_minute_and_a_restart_empties_it() -> None:
    clock = HandClock()
    pages = [page(n, n, n, float(n)) for n in range(0, 200, 5)]
    told = await latencies_of(pages, clock, lambda: clock.advance(5.0))
    assert told["over_s"] == WINDOW_S and told["observations"] == 60 and told["p99"] == "0.99 s"
    restarted = await latencies_of([page(9, 9, 9, 9.0), page(1, 1, 1, 1.0)], clock, lambda: clock.advance(6.0))
    assert "p99" not in restarted and "one engine process" in str(restarted["why"])


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/Sao_Paulo", "Not/AZone"])
@pytest.mark.parametrize(
    "midnight_or_change", [1_764_547_197.0, 1_774_745_997.0, 1_792_889_997.0], ids=["midnight", "spring", "autumn"]
)
async def test_windows_are_the_same_across_midnight_and_a_clock_change_whatever_zone_is_known(
    zone: str, midnight_or_change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    monkeypatch.setenv("PYTHONTZPATH", os.devnull)  # no zone data at all
    time.tzset()
    try:
        clock = HandClock(midnight_or_change)
        told = await latencies_of([page(5, 5, 5, 2.0), page(5, 15, 65, 900.0)], clock, lambda: clock.advance(6.0))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert told["over_s"] == 6.0 and told["observations"] == 60
