"""Two whole sidecars with real sockets between them: claims, handoffs, samples, commands, registration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from sidecar_fakes import FakeController, FakeEngine, SocketPlugin, command, move_order, state_of, text_of

from fluidpd.command import GrantTerms, HandoffPeer, PrefillPeer, StalePeer
from fluidpd.names import Answer, End, Role
from fluidpd.signing import SIGNATURE_HEADER
from sidecar.app import Sidecar
from sidecar.clock import Clock
from sidecar.engines.page import parse_page
from sidecar.engines.slo_counts import WANTED
from sidecar.peers import SIDECAR_HEADER
from sidecar.ports import EngineFacts, SwitchAnswer, SwitchResult
from sidecar.protocol import AdoptAnswer, ClaimAnswer, ClaimWanted, HandoffWanted, Order, PluginSample, RelayGone, Reply, Tokens
from sidecar.routes import create_app
from sidecar.serve import _listen, _Server
from sidecar.settings import SidecarSettings


@dataclass
class One:
    """A sidecar, its plugin and its HTTP surface."""

    sidecar: Sidecar
    plugin: SocketPlugin
    url: str


@asynccontextmanager
async def one(
    directory: Path, name: str, role: Role, controller_url: str = "ws://127.0.0.1:9/link", **given: Any
) -> AsyncIterator[One]:
    listener = _listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    settings = SidecarSettings.model_validate(
        {
            "worker": name,
            "worker_url": f"http://{name}.test:30000",
            "bootstrap_port": 40000,
            "engine": "emulated",
            "port": port,
            "controller_url": controller_url,
            "plugin_socket": directory / f"{name}.sock",
            "state_dir": directory / name,
            "claim_timeout_s": 0.3,
            "adopt_timeout_s": 0.5,
        }
        | given
    )
    sidecar = Sidecar(settings, engine=FakeEngine(role=role))
    server = _Server(uvicorn.Config(create_app(sidecar), log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    await sidecar.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    plugin = SocketPlugin(settings.plugin_socket, role, name)
    await plugin.connect()
    try:
        yield One(sidecar, plugin, sidecar.url)
    finally:
        await plugin.close()
        server.should_exit = True
        await sidecar.stop()
        await serving
        listener.close()


@asynccontextmanager
async def pair(directory: Path, **given: Any) -> AsyncIterator[tuple[One, One]]:
    async with one(directory, "d1", Role.DECODE, **given) as decode, one(directory, "p1", Role.PREFILL, **given) as prefill:
        yield decode, prefill


async def grant(decode: One, prefill: One, ttl_s: float = 5.0) -> None:
    peer = PrefillPeer(worker="p1", sidecar_url=prefill.url, bootstrap="p1.test:40000", backlog_s=1.0)
    terms = GrantTerms(prefill=(peer,), max_outstanding_tokens=4096, tbt_slo_s=0.04, guard_s=0.003, ttl_s=ttl_s)
    await decode.sidecar.driver.welcomed(1, 1)
    receipt = await decode.sidecar.driver.command(command(terms, worker="d1"), Clock().now())
    assert receipt.answer is Answer.ACCEPTED
    await decode.plugin.wait("grant")


def gives(prefill: One, rooms: dict[int, str], silent: int = 0) -> list[Any]:
    """The prefill plugin: gives the rooms whose reason is empty; is silent the first times."""
    asked: list[Any] = []

    def react(message: Any) -> None:
        if message.type == "claim":
            asked.append(message)
            if len(asked) > silent:
                why = rooms.get(message.room, "unknown")
                prefill.plugin.say(ClaimAnswer(id=message.id, room=message.room, given=not why, why=why))

    prefill.plugin.react = react
    return asked


async def test_a_claim_goes_to_the_prefill_worker_and_its_answer_comes_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as (decode, prefill):
        await grant(decode, prefill)
        gives(prefill, {7: "", 8: "started"})
        for room in (7, 8, 9):
            decode.plugin.say(ClaimWanted(id=f"c{room}", room=room, bootstrap="p1.test:40000"))
        results = {r.room: (r.given, r.why) for r in await decode.plugin.wait("claim_result", 3)}
        assert results == {7: (True, ""), 8: (False, "started"), 9: (False, "unknown")}
        assert decode.sidecar.url in prefill.sidecar.peers.known  # so that a later role change can be told to it


async def test_a_claim_without_an_answer_is_asked_once_more_under_its_id(tmp_path: Path) -> None:
    async with pair(tmp_path) as (decode, prefill):
        await grant(decode, prefill)
        asked = gives(prefill, {7: ""}, silent=1)
        decode.plugin.say(ClaimWanted(id="c7", room=7, bootstrap="p1.test:40000"))
        (result,) = await decode.plugin.wait("claim_result")
        assert result.given and [a.id for a in asked] == ["d1/c7", "d1/c7"]


async def test_a_claim_that_is_never_answered_is_said_to_have_had_no_answer(tmp_path: Path) -> None:
    async with pair(tmp_path) as (decode, prefill):
        await grant(decode, prefill)
        asked = gives(prefill, {7: ""}, silent=99)
        decode.plugin.say(ClaimWanted(id="c7", room=7, bootstrap="p1.test:40000"))
        (result,) = await decode.plugin.wait("claim_result")
        assert not result.given and result.why == "no_answer" and len(asked) == 2


async def test_a_claim_outside_a_grant_goes_nowhere(tmp_path: Path) -> None:
    async with pair(tmp_path) as (decode, prefill):
        asked = gives(prefill, {7: ""})
        decode.plugin.say(ClaimWanted(id="early", room=7, bootstrap="p1.test:40000"))
        await decode.plugin.wait("claim_result")
        await grant(decode, prefill, ttl_s=0.01)
        await asyncio.sleep(0.02)
        decode.plugin.say(ClaimWanted(id="late", room=7, bootstrap="p1.test:40000"))
        results = await decode.plugin.wait("claim_result", 2)
        assert [r.why for r in results] == ["no_grant", "no_grant"] and asked == []


# ---------------------------------------------------------------- handoffs


async def drain_with_peers(leaving: One, *peers: One) -> None:
    """Give the leaving side a move whose order names its peers; the plugin never answers the drain."""
    named = tuple(HandoffPeer(worker=p.sidecar.settings.worker, sidecar_url=p.url) for p in peers)
    await leaving.sidecar.driver.welcomed(1, 1)
    order = move_order(peers=named, drain_deadline_s=30)
    await leaving.sidecar.driver.command(command(order, id_="m", worker=leaving.sidecar.settings.worker), Clock().now())


def adopts(peer: One, refuse: str = "", stop_after: int | None = None) -> list[Any]:
    """The adopting plugin: continues a generation two tokens a message, from where it was cut."""
    seen: list[Any] = []

    def react(message: Any) -> None:
        seen.append(message)
        if message.type != "adopt":
            return
        state = message.state
        peer.plugin.say(AdoptAnswer(id=state.id, accepted=not refuse, why=refuse))
        if refuse:
            return
        end = state.max_new_tokens if stop_after is None else stop_after
        for start in range(state.output_tokens, end, 2):
            upto = min(start + 2, end)
            texts = tuple(text_of(state.digest, i) for i in range(start, upto))
            finish = {"type": "length", "length": state.max_new_tokens} if upto == state.max_new_tokens else None
            peer.plugin.say(
                Tokens(id=state.id, start=start, texts=texts, at_s=tuple(float(i) for i in range(start, upto)), finish=finish)
            )

    peer.plugin.react = react
    return seen


async def relayed(leaving: One, id_: str, output: int, total: int) -> list[str]:
    """The client's view: what was there, and what came through the relay, in the order it came."""
    texts = [text_of("d" + id_, i) for i in range(output)]
    async with asyncio.timeout(5):
        while not any(m.type == "tokens" and m.id == id_ and m.finish for m in leaving.plugin.got):
            await asyncio.sleep(0.002)
    for message in leaving.plugin.got:
        if message.type == "tokens" and message.id == id_:
            assert message.start == len(texts)
            texts.extend(message.texts)
    return texts


async def none_open(leaving: One, peer: One) -> None:
    async with asyncio.timeout(2):
        while leaving.sidecar.handoffs.open or peer.sidecar.adoptions.open:
            await asyncio.sleep(0.002)


async def test_a_handed_off_generation_goes_on_at_the_peer_with_its_text_exact(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, peer):
        adopts(peer)
        await drain_with_peers(leaving, peer)
        for n in range(20):
            leaving.plugin.say(HandoffWanted(state=state_of(f"h{n}", output=n % 5, total=11)))
        for n in range(20):
            texts = await relayed(leaving, f"h{n}", n % 5, 11)
            assert texts == [text_of(f"dh{n}", i) for i in range(11)]
        assert {m.peer for m in await leaving.plugin.wait("handoff_taken", 20)} == {"p1"}
        await none_open(leaving, peer)


async def test_a_refusing_peer_is_passed_over_for_the_next(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, full), one(tmp_path, "p2", Role.DECODE) as free:
        adopts(full, refuse="no_kv")
        adopts(free)
        await drain_with_peers(leaving, full, free)
        leaving.plugin.say(HandoffWanted(state=state_of("h1", total=6)))
        assert await relayed(leaving, "h1", 3, 6) == [text_of("dh1", i) for i in range(6)]
        assert (await leaving.plugin.wait("handoff_taken"))[0].peer == "p2"


async def test_a_handoff_that_no_peer_takes_comes_back_with_where_it_stands(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, peer):
        adopts(peer, refuse="no_kv")
        await drain_with_peers(leaving, peer)
        leaving.plugin.say(HandoffWanted(state=state_of("h1")))
        (failed,) = await leaving.plugin.wait("handoff_failed")
        assert failed.received == 3 and "no_kv" in failed.why


async def test_a_peer_that_dies_in_the_middle_gives_back_what_was_received(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, peer):
        adopts(peer, stop_after=7)
        await drain_with_peers(leaving, peer)
        leaving.plugin.say(HandoffWanted(state=state_of("h1")))
        await leaving.plugin.wait("tokens", 2)
        await peer.plugin.close()
        (failed,) = await leaving.plugin.wait("handoff_failed")
        assert failed.received == 7


@pytest.mark.parametrize("bad", ["http://127.0.0.1:abc", f"http://{70 * 'a'}.test:1", "no address", ""])
async def test_a_peer_with_an_address_that_cannot_be_called_is_passed_over_and_the_plugin_hears_how_it_ended(
    tmp_path: Path, bad: str
) -> None:
    async with pair(tmp_path) as (leaving, peer):
        adopts(peer)
        await drain_with_peers(leaving, peer)
        good = leaving.sidecar._handoff_peers()
        wrong = HandoffPeer(worker="wrong", sidecar_url=bad)
        leaving.sidecar.handoffs._candidates = lambda: (wrong,)
        leaving.plugin.say(HandoffWanted(state=state_of("h1", total=6)))
        (failed,) = await leaving.plugin.wait("handoff_failed")
        assert failed.received == 3 and failed.why.startswith("wrong: ")
        leaving.sidecar.handoffs._turn = 0
        leaving.sidecar.handoffs._candidates = lambda: (wrong, *good)
        leaving.plugin.say(HandoffWanted(state=state_of("h2", total=6)))
        assert await relayed(leaving, "h2", 3, 6) == [text_of("dh2", i) for i in range(6)]
        await none_open(leaving, peer)
        assert leaving.sidecar.handoffs.ended_total == {"failed": 1, "finished": 1}


async def test_a_defect_in_a_handoff_is_told_to_the_plugin_as_failed(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, _):

        def broken() -> tuple[HandoffPeer, ...]:
            raise KeyError("oh")

        leaving.sidecar.handoffs._candidates = broken
        leaving.plugin.say(HandoffWanted(state=state_of("h1")))
        (failed,) = await leaving.plugin.wait("handoff_failed")
        assert failed.received == 3 and "KeyError" in failed.why


async def test_a_gap_in_the_relay_ends_it_before_the_gap(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, peer):

        def react(message: Any) -> None:
            if message.type == "adopt":
                peer.plugin.say(AdoptAnswer(id="h1", accepted=True))
                peer.plugin.say(Tokens(id="h1", start=2, texts=("again", "x"), at_s=(0.0, 1.0)))  # token 2 was there already
                peer.plugin.say(Tokens(id="h1", start=6, texts=("y",), at_s=(2.0,)))

        peer.plugin.react = react
        await drain_with_peers(leaving, peer)
        leaving.plugin.say(HandoffWanted(state=state_of("h1")))
        (failed,) = await leaving.plugin.wait("handoff_failed")
        (passed,) = await leaving.plugin.wait("tokens")
        assert failed.received == 4 and (passed.start, passed.texts) == (3, ("x",))
        await peer.plugin.wait("relay_gone")


async def test_a_client_that_leaves_stops_the_peer(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, peer):
        adopts(peer, stop_after=5)
        await drain_with_peers(leaving, peer)
        leaving.plugin.say(HandoffWanted(state=state_of("h1")))
        await leaving.plugin.wait("tokens")
        leaving.plugin.say(RelayGone(id="h1"))
        assert (await peer.plugin.wait("relay_gone"))[0].id == "h1"
        await none_open(leaving, peer)


async def test_handoffs_share_the_bandwidth_cap(tmp_path: Path) -> None:
    async with pair(tmp_path, link_bytes_per_s=10_000_000, handoff_burst_s=0) as (leaving, peer):  # 4 MB/s
        adopts(peer)
        await drain_with_peers(leaving, peer)
        for n in range(4):
            leaving.plugin.say(HandoffWanted(state=state_of(f"h{n}", total=5, kv_bytes=200_000)))
        for n in range(4):
            await relayed(leaving, f"h{n}", 3, 5)
        assert leaving.sidecar.bucket.waited_s == pytest.approx(0.05 + 0.1 + 0.15 + 0.2, rel=0.1)


async def test_a_fleet_secret_is_asked_of_every_peer(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    async with pair(tmp_path, fleet_secret_file=secret) as (decode, prefill), httpx.AsyncClient() as stranger:
        for headers in ({}, {"Authorization": "Bearer s3cret"}, {SIGNATURE_HEADER: "v1"}):
            for path, body in (
                ("claim", {"id": "c", "room": 1, "claimer": "x"}),
                ("handoff", state_of().model_dump()),
                ("drop_stale", {"bootstrap": "x"}),
            ):
                assert (await stranger.post(f"{prefill.url}/peer/{path}", json=body, headers=headers)).status_code == 401
        await grant(decode, prefill)
        gives(prefill, {7: ""})
        decode.plugin.say(ClaimWanted(id="c7", room=7, bootstrap="p1.test:40000"))
        assert (await decode.plugin.wait("claim_result"))[0].given


async def test_after_a_flip_peers_drop_what_they_cached(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, peer):

        def react(message: Any) -> None:
            if isinstance(message, Order):
                peer.plugin.say(Reply(id=message.id, ok=True))

        peer.plugin.react = react
        order = move_order(
            peers=(HandoffPeer(worker="p1", sidecar_url=peer.url), HandoffPeer(worker="gone", sidecar_url="http://127.0.0.1:9"))
        )
        told = await leaving.sidecar.stale.tell_peers(order)
        assert told.numbers["drop_stale_told"] == 1 and told.numbers["drop_stale_failed"].startswith("gone: its sidecar does not")
        assert told.missing == {}  # nobody had to
        (dropped,) = await peer.plugin.wait("order")
        assert (dropped.what, dropped.bootstrap) == ("drop_stale", "d1.test:40000")


async def test_an_address_in_a_header_that_cannot_be_called_is_not_kept_and_spoils_no_telling_of_peers(tmp_path: Path) -> None:
    async with one(tmp_path, "p1", Role.PREFILL) as it, httpx.AsyncClient(trust_env=False) as stranger:
        gives(it, {7: ""})
        for wrong in ("http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://", "ftp://127.0.0.1:1", "http://a:0"):
            body = {"id": wrong, "room": 7, "claimer": "d1"}
            answer = await stranger.post(f"{it.url}/peer/claim", json=body, headers={SIDECAR_HEADER: wrong})
            assert answer.status_code == 200
        assert it.sidecar.peers.known == ()
        order = move_order(peers=(HandoffPeer(worker="wrong", sidecar_url="http://127.0.0.1:abc"),))
        told = await it.sidecar.stale.tell_peers(order)
        assert told.numbers["drop_stale_told"] == 0 and told.numbers["drop_stale_failed"].startswith("wrong: ")


async def test_every_sidecar_the_controller_names_is_told_once_and_one_that_had_to_be_is_named_with_why(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leaving, peer), one(tmp_path, "d2", Role.DECODE) as without:
        asked: list[Any] = []

        def react(message: Any) -> None:
            if isinstance(message, Order):
                asked.append(message)
                peer.plugin.say(Reply(id=message.id, ok=True))

        peer.plugin.react = react
        await without.plugin.close()  # its sidecar is there, and no plugin that could forget anything
        named = StalePeer(worker="p1", sidecar_url=peer.url, must=True)
        told = await leaving.sidecar.stale.tell_peers(
            move_order(
                peers=(HandoffPeer(worker="p1", sidecar_url=peer.url),),
                stale=(
                    named,
                    StalePeer(worker="d2", sidecar_url=without.url, must=True),
                    StalePeer(worker="gone", sidecar_url="http://127.0.0.1:9"),
                ),
            )
        )
        assert [a.what for a in asked] == ["drop_stale"] and told.numbers["drop_stale_told"] == 1
        assert told.missing == {"d2": "its plugin did not"}
        assert "d2: its plugin did not" in told.numbers["drop_stale_failed"] and "gone: " in told.numbers["drop_stale_failed"]
        assert str(told) == "peers_hold_stale_bootstrap: d2: its plugin did not"


async def test_a_worker_without_a_bootstrap_port_tells_nobody_and_says_so_where_somebody_had_to_be_told(tmp_path: Path) -> None:
    async with one(tmp_path, "d1", Role.DECODE, bootstrap_port=None) as it:
        order = move_order(stale=(StalePeer(worker="d2", sidecar_url="http://127.0.0.1:9", must=True),))
        told = await it.sidecar.stale.tell_peers(order)
        assert told.numbers == {} and "bootstrap_port is not set" in told.missing["d2"]


async def test_a_claim_at_an_address_that_cannot_be_called_is_still_answered(tmp_path: Path) -> None:
    async with pair(tmp_path) as (decode, prefill):
        prefill.url = "http://127.0.0.1:abc"
        await grant(decode, prefill)
        decode.plugin.say(ClaimWanted(id="c7", room=7, bootstrap="p1.test:40000"))
        (result,) = await decode.plugin.wait("claim_result")
        assert not result.given and result.why == "no_answer"


# ---------------------------------------------------------------- the controller's side


async def test_a_sidecar_registers_samples_obeys_and_reports(tmp_path: Path) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url) as it:
        await controller.until(lambda: bool(controller.connections))
        hello = controller.hellos[-1]
        assert (hello.worker, hello.role, hello.engine_boot) == ("d1", Role.DECODE, "boot-d1") and "borrow" in hello.capabilities
        it.plugin.say(PluginSample(role=Role.DECODE, values={"batch": 4, "step_s": 0.02}, chunks={"224": 3}))
        while not any(s["values"].get("batch") == 4 for s in controller.samples):
            it.plugin.say(PluginSample(role=Role.DECODE, values={"batch": 4}))
            await asyncio.sleep(0.02)
        terms = GrantTerms(prefill=(), max_outstanding_tokens=1, tbt_slo_s=0.04, guard_s=0, ttl_s=1)
        await controller.send(terms, "other", worker="w9")
        await controller.send(terms, "g1", worker="d1")
        await controller.connections[-1].send('{"type":"command","id":"broken","worker":"d1"}')
        await controller.connections[-1].send("no json at all")
        await controller.send(move_order(), "m1", worker="d1")
        await controller.until(lambda: len(controller.receipts) == 4)
        answers = {r["command_id"]: r["answer"] for r in controller.receipts}
        assert answers == {"other": "wrong_worker", "g1": "accepted", "broken": "malformed", "m1": "accepted"}
        assert [m.type for m in it.plugin.got if m.type in ("grant", "revoke")] == ["grant", "revoke"]
        await controller.until(lambda: bool(controller.phases))
        assert controller.phases[0]["event"] == "ok" and controller.phases[0]["incarnation"] == len(controller.hellos)
        seqs = [s["seq"] for s in controller.samples]
        assert seqs == sorted(set(seqs))
        assert it.sidecar.sampler.chunks_total == {224: 3}


async def test_a_later_welcome_changes_the_sample_rate_of_the_sidecar_and_of_its_plugin(tmp_path: Path) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url) as it:
        await controller.until(lambda: bool(controller.connections) and it.sidecar.link.connected)
        slower = {"type": "welcome", "protocol": 1, "incarnation": 1, "epoch": 1, "sample_hz": 5.0, "mode": "active"}
        await controller.connections[-1].send(json.dumps(slower))
        async with asyncio.timeout(5):
            while it.sidecar.sampler.rate_hz != 5.0 or it.plugin.got[-1].type != "welcome":
                await asyncio.sleep(0.01)
        assert it.plugin.got[-1].sample_hz == 5.0 and len(controller.hellos) == len(controller.connections)


async def test_requests_are_judged_by_the_targets_that_the_controller_has_for_the_model(tmp_path: Path) -> None:
    slo = {"ttft_s": 9.0, "tbt_s": 0.5}
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url, slo=slo) as it:
        await controller.until(lambda: bool(controller.connections) and it.sidecar.link.connected)
        first = it.plugin.got[0]
        assert (first.ttft_slo_s, first.tbt_slo_s) == (9.0, 0.5)  # its own, while no controller says another
        bucket = "sglang:time_to_first_token_seconds_bucket"
        page = parse_page(f'{bucket}{{le="0.3"}} 4\n{bucket}{{le="+Inf"}} 5\n', also=WANTED)
        assert it.sidecar._judge(page.series)[0] == {}
        said = {"type": "welcome", "protocol": 1, "incarnation": 1, "epoch": 1, "sample_hz": 20.0, "mode": "active"}
        await controller.connections[-1].send(json.dumps({**said, "ttft_slo_s": 0.3, "tbt_slo_s": 0.02}))
        again = (await it.plugin.wait("welcome", 2))[-1]
        assert (again.ttft_slo_s, again.tbt_slo_s, it.sidecar.sampler.tbt_slo_s) == (0.3, 0.02, 0.02)
        assert it.sidecar._judge(page.series)[0] == {"ttft_judged_total": 5, "ttft_good_total": 4}
        await controller.connections[-1].send(json.dumps(said))  # an older controller leads now: it says nothing of targets
        await controller.connections[-1].send(json.dumps({**said, "sample_hz": 5.0}))
        assert (await it.plugin.wait("welcome", 3))[-1].ttft_slo_s == 0.3


async def test_a_broken_connection_is_dialled_again_and_every_report_is_sent_again(tmp_path: Path) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url):
        await controller.until(lambda: bool(controller.connections))
        await controller.send(move_order(), "m1", worker="d1")
        await controller.until(lambda: bool(controller.phases))
        await controller.connections[-1].close()
        await controller.until(lambda: len(controller.phases) >= 2)
        assert [p["seq"] for p in controller.phases[:2]] == [1, 1]
        assert controller.hellos[-1].open_move is not None and controller.hellos[-1].open_move["id"] == "m1"


async def test_a_refusal_of_the_controller_is_shown_and_not_hammered(tmp_path: Path) -> None:
    async with FakeController() as controller:
        controller.refuse = "protocol 1 is too old, install 0.9"
        async with one(tmp_path, "d1", Role.DECODE, controller.url) as it:
            await controller.until(lambda: bool(controller.hellos))
            async with asyncio.timeout(3):
                while "too old" not in it.sidecar.link.state:
                    await asyncio.sleep(0.01)
            assert any("too old" in reason for reason in it.sidecar.degraded()) and len(controller.hellos) == 1


async def test_a_sidecar_with_a_secret_obeys_no_controller_that_does_not_ask_for_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    async with FakeController() as controller:
        controller.first = json.dumps({"type": "welcome", "incarnation": 1, "epoch": 9, "sample_hz": 1, "mode": "active"})
        async with one(tmp_path, "d1", Role.DECODE, controller.url, fleet_secret_file=secret) as it:
            async with asyncio.timeout(5):
                while "did not ask for the fleet secret" not in it.sidecar.link.state:
                    await asyncio.sleep(0.01)
            assert controller.hellos == [] and it.sidecar.driver.highest_epoch == 0


async def test_health_state_and_metrics_say_what_is_true(tmp_path: Path) -> None:
    async with one(tmp_path, "d1", Role.DECODE) as it, httpx.AsyncClient(base_url=it.url) as client:
        it.plugin.say(PluginSample(role=Role.DECODE, values={"batch": float("1")}, chunks={"96": 2, "bad": 1}))
        async with asyncio.timeout(2):
            while it.sidecar.sampler.newest is None:
                await asyncio.sleep(0.002)
        health = (await client.get("/healthz")).json()
        assert health["status"] == "degraded" and len(health["reasons"]) == 1
        assert (await client.get("/healthz/live")).json() == {"status": "ok"}
        state = json.loads((await client.get("/state")).text)
        assert state["role"] == "decode" and state["gpu"] == {"absent": "no GPU index is configured"} and state["move"] is None
        page = (await client.get("/metrics")).text
        assert 'fluidpd_sidecar_borrowed_chunk_tokens_bucket{le="128.0"} 2.0' in page and "\nfluidpd_sidecar_gpu" not in page


async def test_an_engine_that_stops_answering_is_sampled_as_unreachable_not_as_zero(tmp_path: Path) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url, cross_check_s=0.05) as it:
        await controller.until(lambda: bool(controller.samples))
        it.sidecar.engine.reachable = False  # type: ignore[attr-defined]
        await controller.until(lambda: controller.samples[-1]["engine_state"] == "unreachable")
        assert controller.samples[-1]["values"] == {} and controller.samples[-1]["role"] is None


async def test_a_quarantine_is_no_longer_shown_once_the_engine_was_restarted(tmp_path: Path) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url) as it:
        engine: Any = it.sidecar.engine
        await controller.until(lambda: it.sidecar.link.connected)
        engine.prepare = SwitchResult(SwitchAnswer.BROKE, "torn")
        await controller.send(move_order(), "m1", worker="d1")
        await controller.until(lambda: it.sidecar.driver.move is not None and not it.sidecar.driver.move.open)
        move = it.sidecar.driver.move
        assert move is not None and move.state.end is End.QUARANTINED and move.engine_boot == "boot-1"
        assert any("quarantined" in reason for reason in it.sidecar.degraded())
        engine.boot = "boot-2"
        await it.plugin.close()
        await it.plugin.connect(boot="boot-d1-again")
        await controller.until(lambda: it.sidecar.link.connected and not it.sidecar.degraded())


async def test_a_full_disk_does_not_cut_a_worker_off_from_a_controller_that_restarted(tmp_path: Path) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url) as it:
        await controller.until(lambda: it.sidecar.link.connected)
        journal = it.sidecar.journal
        append = journal.append

        def full(*entries: Any) -> None:
            raise OSError(28, "No space left on device")

        journal.append = full  # type: ignore[method-assign]
        before = len(controller.hellos)
        await controller.connections[-1].close()
        await controller.until(lambda: it.sidecar.link.connected and len(controller.hellos) > before)
        incarnation = len(controller.hellos)
        controller.samples.clear()
        await controller.until(lambda: bool(controller.samples))
        assert controller.samples[-1]["incarnation"] == it.sidecar.driver.incarnation == incarnation
        assert it.sidecar.degraded() == ["the journal cannot be written: No space left on device"]
        terms = GrantTerms(prefill=(), max_outstanding_tokens=1, tbt_slo_s=0.04, guard_s=0, ttl_s=1)
        await controller.send(terms, "g1", worker="d1")
        await controller.until(lambda: bool(controller.receipts))
        assert controller.receipts[-1]["answer"] == "accepted"
        journal.append = append  # type: ignore[method-assign]
        it.sidecar._ask_facts.set()
        await controller.until(lambda: not it.sidecar.degraded())
        assert journal.facts.incarnation == incarnation


@pytest.mark.parametrize(
    ("hello", "capabilities", "state", "words"),
    [
        pytest.param({"disarmed_why": "SGLang 9.9 is not tested"}, (), "disarmed", "SGLang 9.9 is not tested", id="disarmed"),
        pytest.param(None, (), "missing", "none is connected to", id="missing"),
    ],
)
async def test_a_plugin_that_is_not_armed_is_said_everywhere_and_the_worker_stays_live(
    tmp_path: Path, hello: dict[str, str] | None, capabilities: tuple[str, ...], state: str, words: str
) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url) as it:
        await it.plugin.close()
        if hello is not None:
            it.plugin.capabilities = capabilities
            await it.plugin.connect(**hello)
        it.sidecar._started_s -= 2  # a plugin that never came is not waited for any longer
        await controller.until(lambda: bool(controller.hellos) and controller.hellos[-1].plugin == state)
        said = controller.hellos[-1]
        assert words in said.plugin_why and said.capabilities == ()
        async with httpx.AsyncClient(base_url=it.url) as client:
            health = (await client.get("/healthz")).json()
            assert health["status"] == "degraded" and any(r.startswith(f"plugin {state}: ") for r in health["reasons"])
            assert (await client.get("/healthz/live")).status_code == 200
            found = (await client.get("/state")).json()["plugin"]
            assert (found["state"], found["capabilities"]) == (state, []) and words in found["why"]
            assert "fluidpd_sidecar_plugin_armed 0.0" in (await client.get("/metrics")).text


async def test_an_engine_that_cannot_flip_and_what_it_is_started_with_are_said_everywhere(tmp_path: Path) -> None:
    async with FakeController() as controller, one(tmp_path, "d1", Role.DECODE, controller.url) as it:
        await controller.until(lambda: bool(controller.hellos))
        engine: Any = it.sidecar.engine

        async def facts() -> EngineFacts:
            why = "speculative decoding (EAGLE) is not rebuilt by a role switch"
            return EngineFacts("sglang", "0.5.23", "b9", Role.DECODE, False, why, started_as=Role.PREFILL, radix_cache=True)

        engine.facts = facts
        it.sidecar._ask_facts.set()
        await controller.until(lambda: bool(controller.samples) and controller.samples[-1]["flippable"] is False)
        await it.plugin.close()  # it says hello anew
        await controller.until(lambda: controller.hellos[-1].plugin == "missing")
        said = controller.hellos[-1]
        assert (said.flippable, said.started_as, said.radix_cache, said.engine_start) == (False, Role.PREFILL, True, "b9")
        async with httpx.AsyncClient(base_url=it.url) as client:
            reasons = (await client.get("/healthz")).json()["reasons"]
            assert "not flippable: speculative decoding (EAGLE) is not rebuilt by a role switch" in reasons
            assert "fluidpd_sidecar_flippable 0.0" in (await client.get("/metrics")).text
