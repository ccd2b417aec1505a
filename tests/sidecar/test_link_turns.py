"""A sidecar that knows several controllers finds the one that leads, and the next one when that changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sidecar_fakes import FakeController
from test_fleet_of_two import one

from fluidpd.names import Role
from fluidpd.telemetry import NotLeading
from sidecar.settings import ConfigError, load_settings


async def test_it_goes_on_from_a_standby_to_the_leader(tmp_path: Path) -> None:
    async with FakeController() as standby, FakeController() as leader:
        standby.stands_by = True
        async with one(tmp_path, "d1", Role.DECODE, f"{standby.url},{leader.url}") as it:
            await leader.until(lambda: it.sidecar.link.state == f"connected to {leader.url}", 20)
            assert len(standby.hellos) == 1


async def test_it_finds_the_standby_that_became_the_leader_when_the_old_one_is_gone(tmp_path: Path) -> None:
    async with FakeController() as old, FakeController() as new:
        new.stands_by = True
        async with one(tmp_path, "d1", Role.DECODE, f"{old.url},{new.url}") as it:
            await old.until(lambda: bool(old.connections), 20)
            old.stands_by, new.stands_by, new.epoch = True, False, 2
            await old.connections[-1].close()
            await new.until(lambda: bool(new.connections), 20)
            await new.until(lambda: it.sidecar.driver.highest_epoch == 2, 20)


async def test_one_that_says_it_leads_no_more_is_left_for_another(tmp_path: Path) -> None:
    async with FakeController() as old, FakeController() as new, one(tmp_path, "d1", Role.DECODE, f"{old.url},{new.url}"):
        await old.until(lambda: bool(old.connections), 20)
        await old.connections[-1].send(NotLeading(why="the database does not answer").model_dump_json())
        await new.until(lambda: bool(new.connections), 20)


async def test_with_nowhere_else_to_go_it_stays(tmp_path: Path) -> None:
    async with FakeController() as only, one(tmp_path, "d1", Role.DECODE, only.url) as it:
        await only.until(lambda: bool(only.connections), 20)
        seen = len(only.samples)
        await only.connections[-1].send(NotLeading(why="the database does not answer").model_dump_json())
        await only.until(lambda: len(only.samples) > seen + 3, 20)
        assert it.sidecar.link.connected and len(only.hellos) == 1


async def test_while_nobody_leads_it_asks_both_again_and_again(tmp_path: Path) -> None:
    async with FakeController() as one_of_two, FakeController() as other:
        one_of_two.stands_by = other.stands_by = True
        async with one(tmp_path, "d1", Role.DECODE, f"{one_of_two.url},{other.url}"):
            await other.until(lambda: len(other.hellos) >= 3 and len(one_of_two.hellos) >= 3, 20)
            other.stands_by = False
            await other.until(lambda: bool(other.connections), 20)


def test_several_addresses_have_commas_between() -> None:
    base = {"worker": "d1", "worker_url": "http://127.0.0.1:1"}
    found = load_settings(None, {**base, "controller_url": "ws://a:1/link, wss://b:2/link"}, {})
    assert found.controller_urls == ("ws://a:1/link", "wss://b:2/link")
    with pytest.raises(ConfigError, match="several with commas between"):
        load_settings(None, {**base, "controller_url": "ws://a:1/link,http://b:2"}, {})
