"""The page on SLOs and alerts shows what the engine recorded, and unknown as unknown."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from dashboard_fleet import NOW, FakeController
from slo_records import SLOS, UNKNOWN_MINUTES, a_page, recorded

from controller.store.alert_queries import AlertQueries
from controller.store.engine import make_engine, migrate
from controller.store.queries import Queries
from controller.store.slo_reading import slo_views
from dashboard.app import create_app
from dashboard.settings import DashboardSettings
from fluidpd.shares import percent


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, str, Queries]]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'fluidpd.db'}"
    migrate(url)
    engine = make_engine(url, read_only=True)
    app = create_app(DashboardSettings(), Queries(engine), FakeController(), lambda: NOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        yield client, url, Queries(engine)
    await engine.dispose()


async def test_without_a_record_it_says_what_is_missing_and_invents_nothing(site: tuple[httpx.AsyncClient, str, Queries]) -> None:
    text = (await site[0].get("/slo")).text
    assert "No request was judged yet." in text and "The Watchdog does not fire" in text and "0.0%" not in text


async def test_what_fires_is_shown_with_what_to_do_and_names_are_text(site: tuple[httpx.AsyncClient, str, Queries]) -> None:
    client, url, _ = site
    evil = a_page(model="<script>alert(1)</script>")
    await recorded(url, NOW, (evil, replace(a_page(), fingerprint="x" * 32)))
    text = (await client.get("/slo")).text
    assert "<script>alert(1)" not in text and "&lt;script&gt;" in text
    for said in (
        "PAGE",
        "Decision: flip (prefill_sustained_flip)",
        "<code>fluidpd status</code>",
        "18.2% of the period",
        "1h/5m",
    ):
        assert said in text, said
    assert "/runbooks/error-budget-burn.md" in text and "from=" in text


async def test_every_number_of_an_objective_is_that_of_the_api(site: tuple[httpx.AsyncClient, str, Queries]) -> None:
    client, url, queries = site
    await recorded(url, NOW, ())
    text = (await client.get("/slo")).text
    for view in await slo_views(AlertQueries(queries), NOW):
        assert view.attainment is not None and view.budget_left is not None
        assert all(percent(n) in text for n in (view.attainment, view.budget_left, view.objective))
        for rate in view.burn_rates.values():
            assert rate is None or f"{rate:.1f}x" in text


async def test_what_was_reached_and_how_fast_it_burns_is_what_prometheus_would_say_of_the_counters(
    site: tuple[httpx.AsyncClient, str, Queries],
) -> None:
    """As the shipped rules compute it: misses over requests, and that over what the objective allows."""
    client, url, _ = site
    await recorded(url, NOW, ())
    rows = re.findall(r'<th scope="row"><bdi>llama</bdi></th><td>.*?</tr>', (await client.get("/slo")).text, re.S)
    assert len(rows) == len(SLOS)
    known = [ago for ago in range(1, 181) if ago not in UNKNOWN_MINUTES]
    for row, (slo, (objective, _, bad)) in zip(rows, SLOS.items(), strict=True):
        late = {ago: bad * 8 if ago < 15 and slo != "tbt" else bad for ago in known}
        for reach in (5, 30):
            inside = [late[ago] for ago in known if ago <= reach]
            assert f">{sum(inside) / len(inside) / (1 - objective):.1f}x</td>" in row, (slo, reach)
        assert percent(1 - sum(late.values()) / len(late)) in row


async def test_an_alert_that_fires_needs_attention_unless_somebody_silenced_it(
    site: tuple[httpx.AsyncClient, str, Queries],
) -> None:
    client, url, _ = site
    await recorded(url, NOW, (a_page(), a_page(slo="tbt")))  # tbt is silenced
    head = (await client.get("/part/header")).text
    items = re.findall(r'<li class="is-(\w+)".*?<bdi>(.*?)</bdi>.*?<a href="([^"]*)">(.*?)</a>', head, re.S)
    assert [(s, href, do) for s, _, href, do in items] == [("bad", "/slo", "See what to do first")]
    assert "the ttft budget burns" in items[0][1]


async def test_the_objectives_are_a_file_with_the_numbers_of_the_api(site: tuple[httpx.AsyncClient, str, Queries]) -> None:
    client, url, queries = site
    await recorded(url, NOW, ())
    assert "/slo?table=slos&amp;format=csv" in (await client.get("/slo")).text
    rows = {row["slo"]: row for row in (await client.get("/slo?format=json")).json()}
    for view in await slo_views(AlertQueries(queries), NOW):
        row = rows[view.slo]
        assert (row["attainment"], row["budget_left"], row["judged"]) == (view.attainment, view.budget_left, view.judged)
        assert row["burn_rate_1h"] == view.burn_rates["1h"]


async def test_minutes_without_a_row_are_hatched_and_not_drawn_as_good(site: tuple[httpx.AsyncClient, str, Queries]) -> None:
    client, url, _ = site
    await recorded(url, NOW, ())  # ten of the last sixty minutes have no row
    text = (await client.get("/slo")).text
    assert text.count('fill="url(#unknown-1)"') == 10 and text.count(">not known</td>") >= 10


async def test_silences_and_messages_are_listed(site: tuple[httpx.AsyncClient, str, Queries]) -> None:
    client, url, _ = site
    await recorded(url, NOW, (a_page(),))
    text = (await client.get("/slo")).text
    assert "<code>slo=tbt</code>" in text and "load test until noon" in text
    assert "HTTP 503" in text and "FluidPDErrorBudgetBurn (llama, ttft) fires" in text.replace("<bdi>", "").replace("</bdi>", "")


async def test_scaled_windows_are_labelled(site: tuple[httpx.AsyncClient, str, Queries]) -> None:
    client, url, _ = site
    await recorded(url, NOW, (), scale=60)
    assert "Windows are scaled 1:60" in (await client.get("/slo")).text
