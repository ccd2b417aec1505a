from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, FakeQueries
from starlette.requests import Request

from dashboard import assets
from dashboard.app import Site
from dashboard.assets import STATIC_DIR, load_assets, sha384, vendor_manifest
from dashboard.pulse import Nudge, Pulse
from dashboard.settings import DashboardSettings


async def next_nudge(queue: asyncio.Queue[Nudge | None], source: str | None = None, event: str | None = None) -> Nudge:
    while True:
        nudge = await asyncio.wait_for(queue.get(), 5)
        assert nudge is not None
        if (source is None or nudge.source == source) and (event is None or event in nudge.events):
            return nudge


async def test_an_event_of_the_controller_nudges_at_once() -> None:
    controller = FakeController()
    pulse = Pulse(controller, lambda: NOW, beat_s=30)
    async with pulse.stream() as queue:
        await next_nudge(queue)
        controller.told.put_nowait("status")
        controller.told.put_nowait("transition")
        nudge = await next_nudge(queue, "controller", "transition")
    assert nudge.events == ("transition",)


async def test_without_the_controller_pages_are_nudged_from_the_database() -> None:
    pulse = Pulse(FakeController(is_gone=True), lambda: NOW, beat_s=0.02)
    async with pulse.stream() as queue:
        first, then = await next_nudge(queue, "database"), await next_nudge(queue, "database")
    assert then.id > first.id


async def test_nobody_is_listened_to_while_nobody_looks() -> None:
    pulse = Pulse(FakeController(), lambda: NOW, beat_s=0.02)
    async with pulse.stream() as one:
        async with pulse.stream() as two:
            await next_nudge(one, "controller")
            await next_nudge(two, "controller")
        assert pulse._tasks
    assert not pulse._tasks and not pulse.connected


async def test_a_stream_tells_how_to_reconnect_and_numbers_its_nudges() -> None:
    pulse = Pulse(FakeController(), lambda: NOW, beat_s=0.02)
    lines = pulse.lines()
    assert await anext(lines) == "retry: 2000\n\n"
    told = await anext(lines)
    await lines.aclose()  # type: ignore[attr-defined]
    assert told.startswith(f"id: {int(NOW * 1000):x}-1\nevent: nudge\ndata: ") and told.endswith("\n\n")
    assert json.loads(told.split("data: ")[1])["wall_s"] == NOW


async def test_after_a_break_a_stream_begins_with_what_was_missed() -> None:
    controller = FakeController()
    pulse = Pulse(controller, lambda: NOW, beat_s=30)
    async with pulse.stream() as queue:
        seen = (await next_nudge(queue)).id
        controller.told.put_nowait("transition")
        await next_nudge(queue, event="transition")
        controller.told.put_nowait("audit")
        newest = await next_nudge(queue, event="audit")
        lines = pulse.lines(seen)
        assert await anext(lines) == "retry: 2000\n\n"
        missed = await anext(lines)
        await lines.aclose()  # type: ignore[attr-defined]
        up_to_date = pulse._missed(newest.id)
    assert missed.startswith(f"id: {newest.id}\n") and json.loads(missed.split("data: ")[1])["events"] == ["transition", "audit"]
    assert up_to_date == ""


@pytest.mark.parametrize("last_id", ["abc-1", "nonsense", f"{int(NOW * 1000):x}-99", f"{int(NOW * 1000):x}-x"])
async def test_an_id_that_cannot_be_followed_up_makes_pages_read_everything_anew(last_id: str) -> None:
    pulse = Pulse(FakeController(), lambda: NOW, beat_s=30)
    async with pulse.stream() as queue:
        await next_nudge(queue)
        lines = pulse.lines(last_id)
        await anext(lines)
        assert (await anext(lines)).startswith("event: reset\n")
        await lines.aclose()  # type: ignore[attr-defined]


async def test_a_stream_ends_when_the_process_goes_down() -> None:
    pulse = Pulse(FakeController(), lambda: NOW, beat_s=0.02)
    read = []
    async for line in pulse.lines():
        read.append(line)
        if len(read) == 2:
            pulse.end_streams()
    assert not pulse._tasks


async def test_one_stream_too_many_is_told_to_poll(queries: FakeQueries, controller: FakeController) -> None:
    site = Site(DashboardSettings(max_streams=1), queries, controller, lambda: NOW)
    request = Request({"type": "http", "method": "GET", "path": "/stream", "headers": [], "query_string": b""})
    async with site.pulse.stream():
        assert (await site.stream(request)).status_code == 503
    assert (await site.stream(request)).status_code == 200


def test_vendored_files_are_the_ones_in_the_manifest() -> None:
    manifest = vendor_manifest()
    vendor = STATIC_DIR / "vendor"
    for name, about in manifest.items():
        assert sha384(vendor / name) == about["integrity"], name
        assert (vendor / about["licence_file"]).read_text(encoding="utf-8").strip()
    there = {p.name for p in vendor.iterdir() if p.suffix in (".js", ".css")}
    assert there == set(manifest)


def test_an_asset_address_changes_with_its_content() -> None:
    assets = load_assets()
    assert len({a.url.partition("?v=")[2] for a in assets.values()}) == len(assets)
    assert all(a.integrity.startswith("sha384-") for a in assets.values())


def test_files_are_those_of_the_start_whatever_an_upgrade_does_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.css").write_text("a { color: red }", encoding="utf-8")
    monkeypatch.setattr(assets, "STATIC_DIR", tmp_path)
    files = assets.Files()
    (tmp_path / "app.css").write_text("changed", encoding="utf-8")
    packed, plain = files.answer("app.css", True), files.answer("app.css", False)
    assert packed is not None and plain is not None
    assert gzip.decompress(bytes(packed.body)) == bytes(plain.body) == b"a { color: red }"
    assert files.answer("../assets.py", False) is None


async def test_static_files_may_be_kept_and_pages_may_not(browser: httpx.AsyncClient) -> None:
    assert "immutable" in (await browser.get(load_assets()["app.css"].url)).headers["cache-control"]
    assert (await browser.get("/")).headers["cache-control"] == "no-store"
