"""The event hub and the metrics page."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from control_fakes import Fleet, Sidecar
from memory_fakes import NOW, FakeController, a_move, a_phase, open_api, open_store
from prometheus_client.parser import text_string_to_metric_families

from controller.metrics import Metrics
from controller.routes.bodies import to_json
from controller.stream import Hub
from fluidpd.names import End


def a_hub(**options: int) -> Hub:
    return Hub(wall=lambda: NOW, **options)


async def some(hub: Hub, count: int, last_id: str | None = None) -> list[str]:
    heard: list[str] = []
    async with asyncio.timeout(5):
        async for text in hub.listen(last_id):
            heard.append(text)
            if len(heard) == count:
                break
    return heard


async def test_a_listener_hears_what_is_published_after_it_came(tmp_path: Path) -> None:
    hub = a_hub()
    hub.publish("status", {"n": 0})
    listening = asyncio.create_task(some(hub, 2))
    await asyncio.sleep(0)
    hub.publish("decision", {"n": 1, "bad": float("nan"), "end": End.DONE})
    retry, event = await listening
    assert retry == "retry: 2000\n\n"
    assert event.endswith('-2\nevent: decision\ndata: {"n":1,"bad":null,"end":"done"}\n\n')


async def test_a_reconnecting_listener_misses_nothing_the_ring_still_has() -> None:
    hub = a_hub(ring=10)
    for n in range(5):
        hub.publish("status", {"n": n})
    third = f"{hub._boot}-3"
    assert [t.splitlines()[0] for t in await some(hub, 3, third)] == ["retry: 2000", f"id: {hub._boot}-4", f"id: {hub._boot}-5"]


async def test_a_gap_that_cannot_be_replayed_is_said() -> None:
    hub = a_hub(ring=3)
    for n in range(9):
        hub.publish("status", {"n": n})
    for stale in (f"{hub._boot}-1", "earlier-5", "nonsense", f"{hub._boot}-99"):
        assert (await some(hub, 2, stale))[1].startswith("event: reset\n")


async def test_a_listener_that_does_not_read_never_holds_up_the_publisher() -> None:
    hub = a_hub()
    stuck = hub.listen()
    assert (await anext(stuck)).startswith("retry")
    waiting = asyncio.create_task(anext(stuck))
    await asyncio.sleep(0)
    for n in range(2_000):
        hub.publish("status", {"n": n})
    assert hub.listeners == 0
    await waiting
    heard = [text async for text in stuck]  # ends by itself: the client reconnects and replays
    assert len(heard) < 600


async def test_silence_is_filled_with_heartbeats() -> None:
    heard = a_hub().listen(heartbeat_s=0.01)
    await anext(heard)
    assert (await anext(heard)).startswith(":")
    await heard.aclose()  # type: ignore[attr-defined]


async def test_closing_the_hub_ends_every_stream() -> None:
    hub = a_hub()
    listening = asyncio.create_task(some(hub, 99))
    await asyncio.sleep(0)
    hub.close()
    assert await listening == ["retry: 2000\n\n"]
    assert hub.listeners == 0


async def test_a_stream_beyond_the_limit_is_refused_with_a_time_to_wait(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, _, hub):
        hub._max_listeners = 0
        answer = await client.get("/api/v1/stream")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")


async def test_live_is_the_process_and_ready_is_leading_with_a_database(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        assert (await client.get("/healthz/ready")).status_code == 200
        controller.now = replace(controller.now, leading=False)
        controller.store.healthy, controller.store.trouble = False, "The disk is full: free space."
        ready = await client.get("/healthz/ready")
        assert (await client.get("/healthz/live")).status_code == 200
    assert ready.status_code == 503
    assert ready.json()["reasons"] == ["The disk is full: free space.", "this controller does not lead"]


async def test_the_metrics_page_has_what_is_known_and_leaves_out_what_is_not(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, _, hub):
        hub.publish("decision", {"action": "flip", "reason": "prefill_sustained_flip"})
        hub.publish("decision", {"action": "<script>", "reason": "free text"})
        ended = to_json(replace(a_move(), end=End.DONE, phases=(a_phase(took_s=0.2), a_phase(seq=2, took_s=0.1))))
        hub.publish("transition", ended)
        hub.publish("transition", ended)
        text = (await client.get("/metrics")).text
    assert "nan" not in text.lower().replace("instance", "")
    seen = {(s.name, *sorted(s.labels.values())): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert seen[("fluidpd_pressure_index", "prefill")] == 0.4
    assert ("fluidpd_pressure_index", "decode") not in seen
    assert seen[("fluidpd_slo_requests_total", "default", "joint")] == 100
    assert seen[("fluidpd_slo_bad_requests_total", "default", "joint")] == 3
    assert seen[("fluidpd_decisions_total", "flip", "prefill_sustained_flip")] == 1
    assert not any("script" in str(key) for key in seen) and seen[("fluidpd_decisions_total", "other", "other")] == 1
    assert seen[("fluidpd_transitions_total", "auto", "decode", "done", "prefill")] == 1
    assert seen[("fluidpd_transition_duration_seconds_count", "done", "preflight")] == 1
    assert seen[("fluidpd_worker_role", "decode", "w3")] == 1
    assert ("fluidpd_worker_kv_usage_ratio", "w3") not in seen
    assert seen[("fluidpd_pool_workers", "decode", "serving")] == 1


async def test_a_standby_exports_nothing_about_the_fleet(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        controller = FakeController(store)
        controller.now = replace(controller.now, leading=False)
        page, kind = Metrics(controller, store, a_hub()).render("application/openmetrics-text")
    assert "openmetrics" in kind
    assert b"fluidpd_controller_leader 0.0" in page
    assert b"fluidpd_pool_workers" not in page
    assert b"fluidpd_pressure_index" not in page


async def test_the_metrics_page_counts_what_was_rejected_by_a_closed_set_of_reasons(tmp_path: Path) -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode"}).up()
    f.controller.registry.hear(Sidecar("nobody").sample(f.clock))
    f.controller.reception.counts["malformed"] += 2
    f.controller.reception.counts["<script>"] += 1
    await f.tell("d1", "ok", "drain")
    async with open_store(tmp_path) as store:
        page, _ = Metrics(f.controller, store, a_hub()).render("")
    seen = {(s.name, s.labels.get("reason")): s.value for m in text_string_to_metric_families(page.decode()) for s in m.samples}
    assert seen["fluidpd_samples_rejected_total", "unattributed"] == 1
    assert seen["fluidpd_samples_rejected_total", "reordered"] == 0
    assert seen["fluidpd_messages_rejected_total", "malformed"] == 2
    assert seen["fluidpd_messages_rejected_total", "reports_of_no_open_move"] == 1
    assert b"script" not in page
