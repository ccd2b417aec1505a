"""FluidToken in emulated workers: rooms claimed through sidecars, prompts borrowed, text unchanged."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

from emulator_fleet import Fleet, TinyFleet, fleet_with_sidecars, prompt, until

from fluidpd.slo import nearest_rank
from sidecar.emulator import claims
from sidecar.emulator.text import expected_text

PD = {"p": "prefill", "d": "decode"}


async def slow_prefill(f: Fleet, seconds: float = 0.4) -> None:
    await f.post("p", "/slow_down", {"forward_sleep_time": seconds})


async def load(f: Fleet, n: int, words: int = 600, tokens: int = 6) -> None:
    answers = await asyncio.gather(*(f.both("p", "d", prompt(words, seed=i), tokens) for i in range(n)))
    for i, (half, said) in enumerate(answers):
        assert said.text == expected_text(prompt(words, seed=i), tokens) and said.done
        assert half.done and half.finish == {"type": "length", "length": 0}


def clean(f: Fleet) -> bool:
    return all(
        w.engine.model.idle and not w.engine.model.kv_committed and not w.engine.pages.used for w in f.emulator.workers.values()
    )


async def keep_granting(tiny: TinyFleet) -> None:
    while True:
        tiny.sidecars["d"].grant("p", ttl_s=0.6)
        await asyncio.sleep(0.2)


async def test_borrowed_prompts_read_the_same_and_their_prefill_halves_end_well(tmp_path: Path) -> None:
    async with fleet_with_sidecars(PD, tmp_path, prefill_chunk_tokens=600) as (f, tiny):
        await slow_prefill(f)
        granting = asyncio.create_task(keep_granting(tiny))
        await load(f, 10)
        granting.cancel()
        await until(lambda: clean(f))
        decode, prefill = await f.get("d", "/emulator"), await f.get("p", "/emulator")
        assert decode["borrowed"]["prompts"] > 0 and decode["borrowed"]["tokens"] == 600 * decode["borrowed"]["prompts"]
        assert prefill["claims"]["given"] == decode["borrowed"]["prompts"]
        assert sum(decode["chunk_sizes"].values()) > 0
        assert decode["floor_steps"] == 0 and (decode["lent_gap_p99_s"] or 0) <= 0.037
        await until(lambda: any(m["chunks"] for m in tiny.sidecars["d"].of("sample")))
        answers = tiny.sidecars["p"].of("claim_answer")
        assert sum(a["given"] for a in answers) == prefill["claims"]["given"]


async def test_lending_keeps_token_gaps_inside_the_slo_on_the_engines_clock(tmp_path: Path) -> None:
    async with fleet_with_sidecars(PD, tmp_path, prefill_chunk_tokens=600) as (f, tiny):
        running = [asyncio.create_task(f.both("p", "d", f"stream {i}", 100)) for i in range(4)]
        await until(lambda: len(f.worker("d").engine.model.running) == 4)
        await slow_prefill(f)
        granting = asyncio.create_task(keep_granting(tiny))
        await load(f, 5)
        granting.cancel()
        assert f.worker("d").engine.model.counters.borrowed_prompts > 0
        for i, (_, said) in enumerate(await asyncio.gather(*running)):
            assert said.text == expected_text(f"stream {i}", 100)
            times = [c["meta_info"]["emulator"]["t_s"] for c in said.chunks]
            assert nearest_rank([b - a for a, b in pairwise(times)], 0.9) <= 0.0375
        samples = tiny.sidecars["d"].of("sample")
        assert any(m["values"]["borrowed_tokens_total"] > 0 for m in samples)


async def test_nothing_is_claimed_without_a_grant_after_it_expired_or_once_revoked(tmp_path: Path) -> None:
    async with fleet_with_sidecars(PD, tmp_path, prefill_chunk_tokens=600) as (f, tiny):
        await slow_prefill(f, 0.2)
        side = tiny.sidecars["d"]
        await load(f, 3)
        side.grant("p", ttl_s=0.05)
        await until(lambda: f.worker("d").engine.model.grant is not None)
        await asyncio.sleep(0.06)
        await load(f, 3)
        side.grant("p", epoch=5)
        side.grant("p", epoch=4)  # of a leader that lost its leadership
        side.say(type="revoke", why="decode over")
        await until(lambda: f.worker("d").engine.model.grant is None)
        side.grant("p", epoch=4)
        await load(f, 3)
        assert side.of("claim_wanted") == []


async def test_a_prefill_worker_refuses_what_has_started_and_what_it_does_not_know_and_repeats_its_answers(
    tmp_path: Path,
) -> None:
    async with fleet_with_sidecars(PD, tmp_path) as (f, tiny):
        await slow_prefill(f, 0.3)
        side = tiny.sidecars["p"]
        body = {"text": prompt(50), "sampling_params": {"max_new_tokens": 3}, "stream": True, **f.pair("p")}
        room = body["bootstrap_room"]
        tasks = [asyncio.create_task(f.ask(n, body)) for n in PD]
        await until(lambda: f.worker("p").engine.model.prefilling)
        waiting = {"text": prompt(60), "sampling_params": {"max_new_tokens": 3}, "stream": True, **f.pair("p")}
        half = asyncio.create_task(f.ask("p", waiting))
        await until(lambda: f.worker("p").engine.model.queue)
        side.fleet.claims_answered = False
        for claim_id, asked, claimer in (
            ("1", room, "d"),
            ("2", 12345, "d"),
            ("3", waiting["bootstrap_room"], "d"),
            ("4", waiting["bootstrap_room"], "d"),
            ("5", waiting["bootstrap_room"], "e"),
        ):
            side.say(type="claim", id=claim_id, room=asked, claimer=claimer)
        await until(lambda: len(side.of("claim_answer")) == 5)
        verdicts = {a["id"]: (a["given"], a["why"]) for a in side.of("claim_answer")}
        assert verdicts == {
            "1": (False, "started"),
            "2": (False, "unknown"),
            "3": (True, ""),
            "4": (True, ""),
            "5": (False, "given_to_other"),
        }
        given = await half
        assert given.text == "" and given.finish == {"type": "length", "length": 0} and given.done
        await asyncio.gather(*tasks)


async def test_a_draining_prefill_worker_gives_nothing_away(tmp_path: Path) -> None:
    async with fleet_with_sidecars(PD, tmp_path) as (_, tiny):
        side = tiny.sidecars["p"]
        await side.order("drain", role="prefill")
        side.fleet.claims_answered = False
        side.say(type="claim", id="1", room=5, claimer="d")
        await until(lambda: side.of("claim_answer"))
        assert side.of("claim_answer")[0]["why"] == "draining"


async def test_a_lost_answer_is_asked_for_again_and_the_pairing_itself_says_what_was_given(tmp_path: Path) -> None:
    claims_wait, claims.ANSWER_S = claims.ANSWER_S, 0.1
    try:
        async with fleet_with_sidecars(PD, tmp_path, prefill_chunk_tokens=600) as (f, tiny):
            await slow_prefill(f, 0.2)
            tiny.claims_answered = False
            granting = asyncio.create_task(keep_granting(tiny))
            await load(f, 6)
            granting.cancel()
            await until(lambda: clean(f))
            asked = [m["id"] for m in tiny.sidecars["d"].of("claim_wanted")]
            assert len(asked) > len(set(asked))
            assert f.worker("p").engine.model.counters.claims_given == f.worker("d").engine.model.counters.borrowed_prompts > 0
    finally:
        claims.ANSWER_S = claims_wait


async def test_an_abort_while_borrowed_frees_everything(tmp_path: Path) -> None:
    async with fleet_with_sidecars(PD, tmp_path) as (f, tiny):
        await slow_prefill(f, 1.0)
        granting = asyncio.create_task(keep_granting(tiny))
        tasks = [asyncio.create_task(f.both("p", "d", prompt(9_000, seed=i), 5)) for i in range(2)]
        await until(lambda: f.worker("d").engine.model.borrowed)
        granting.cancel()
        for task in tasks:
            task.cancel()
        await until(lambda: clean(f))


async def test_under_triage_a_prompt_that_can_be_in_time_overtakes_those_that_are_late(tmp_path: Path) -> None:
    async with fleet_with_sidecars(PD, tmp_path, prefill_chunk_tokens=600) as (f, tiny):
        await slow_prefill(f, 0.3)
        order: list[str] = []

        async def ask(name: str, seed: int) -> None:
            half, said = await f.both("p", "d", prompt(600, seed=seed), 3)
            order.append(name)
            assert said.text == expected_text(prompt(600, seed=seed), 3) and half.done

        late = [asyncio.create_task(ask(f"late {i}", i)) for i in range(6)]
        await until(lambda: len(f.worker("p").engine.model.queue) >= 4)
        await asyncio.sleep(0.25)  # their target is over
        tiny.sidecars["p"].grant("p", ttl_s=5.0, ttft_slo_s=0.2, triage_margin_s=0.0)
        await until(lambda: f.worker("p").engine.model.triage is not None)
        fresh = asyncio.create_task(ask("fresh", 99))
        await asyncio.gather(*late, fresh)
        assert order.index("fresh") < len(order) - 2 and len(order) == 7
        tiny.sidecars["p"].say(type="revoke", why="over")
        await until(lambda: f.worker("p").engine.model.triage is None)
