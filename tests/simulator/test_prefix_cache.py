"""Each worker's own prefix cache: what it saves, what it forgets, and that it never takes space that was promised."""

from __future__ import annotations

import random
from importlib.resources import files

import pytest

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.policies import simulate
from fluidpd.simulator.prefix import BLOCK_TOKENS, PrefixCache
from fluidpd.simulator.request_run import RunResult
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)


def named(*rows: tuple[float, int, tuple[int, ...]], output: int = 5) -> Workload:
    """Requests of (arrival, prompt, blocks)."""
    return Workload("named", tuple(Request(at, prompt, output, 0, blocks) for at, prompt, blocks in rows), True)


def run(workload: Workload, name: str = "static", **settings: int) -> RunResult:
    return simulate(name, workload, COST, SimSettings(**{"prefill": 1, "decode": 1, "budget_tokens": 8192, **settings}))


def cached(result: RunResult) -> list[int]:
    return [o.cached_tokens for o in result.outcomes]


def test_the_least_recently_used_block_is_dropped_and_a_prompts_beginning_outlives_its_end() -> None:
    cache = PrefixCache()
    cache.add((1, 2), 4 * BLOCK_TOKENS)
    cache.add((3, 4), 4 * BLOCK_TOKENS)
    assert cache.use((1, 2), 5000) == 2 * BLOCK_TOKENS
    cache.shrink(3 * BLOCK_TOKENS)
    assert cache.has((3, 4), 5000) == BLOCK_TOKENS, "its end went first"
    cache.shrink(BLOCK_TOKENS)
    assert cache.has((3, 4), 5000) == 0 and cache.tokens == BLOCK_TOKENS
    cache.shrink(-100)
    assert cache.tokens == 0


def test_only_an_unbroken_beginning_is_found_and_a_prompts_last_token_is_always_computed() -> None:
    cache = PrefixCache()
    cache.add((1, 2, 3), 10**6)
    assert cache.has((1, 9, 3), 5000) == BLOCK_TOKENS
    assert cache.has((9, 2, 3), 5000) == 0
    assert cache.has((1, 2), 1024) == 1023


@pytest.mark.parametrize("name", ["static", "colocated_chunked", "colocated_prefill_first"])
def test_what_a_worker_computed_before_it_does_not_compute_again(name: str) -> None:
    blocks = tuple(range(8))
    prefill, decode = (1, 0) if name.startswith("colocated") else (1, 1)
    plain, found = (run(named((0.0, 4000, of), (1.0, 4000, of)), name, prefill=prefill, decode=decode) for of in ((), blocks))
    assert cached(found) == [0, 3999] and cached(plain) == [0, 0]
    slow, fast = plain.outcomes[1].ttft_s, found.outcomes[1].ttft_s
    assert slow is not None and fast is not None and fast < 0.5 * slow
    assert found.tally.cached_tokens == 3999


def test_a_worker_knows_nothing_of_what_another_has_computed() -> None:
    rows = [(float(i), 2048, (1, 2, 3, 4)) for i in range(6)]
    assert cached(run(named(*rows), prefill=3)) == [0, 0, 0, 2047, 2047, 2047], "the router takes them in turn"
    assert cached(run(named(*rows), prefill=1)) == [0, *[2047] * 5]


def test_two_prompts_that_wait_together_share_what_the_first_computed_when_the_second_starts() -> None:
    result = run(named((0.0, 8192, tuple(range(16))), (0.001, 8192, tuple(range(16)))))
    assert cached(result) == [0, 8191]


def test_a_cache_lives_in_what_is_free_and_forgets_when_prompts_need_the_space() -> None:
    # Room for one prompt of 4,096 tokens and little more: the second prompt pushes the first one's blocks out.
    rows = ((0.0, 4096, tuple(range(8))), (2.0, 4096, tuple(range(8, 16))), (4.0, 4096, tuple(range(8))))
    assert cached(run(named(*rows), kv_capacity_tokens=5000)) == [0, 0, 0]
    assert cached(run(named(*rows), kv_capacity_tokens=50_000)) == [0, 0, 4095]


def test_a_borrowed_prompt_is_computed_where_nothing_of_it_is_cached() -> None:
    rows = [(0.1 * i, 6144, (1, 2, 3, 4, *range(100 * i, 100 * i + 8))) for i in range(1, 61)]
    result = run(named(*rows, output=40), "fluidtoken", prefill=1, decode=3)
    assert result.summary.completed == 60 and result.summary.borrowed_prompts > 5
    assert cached(result).count(4 * BLOCK_TOKENS) == 60 - 1 - result.summary.borrowed_prompts
    assert set(cached(result)) == {0, 4 * BLOCK_TOKENS}


@pytest.mark.parametrize("seed", range(6))
def test_conservation_holds_with_caches_under_every_policy_in_tight_memory(seed: int) -> None:
    """The laws are asserted in every run here: KV, cached blocks, and tokens in = prefilled + cached."""
    rng = random.Random(seed)
    chains = [tuple(rng.randrange(10**6) for _ in range(rng.randrange(1, 12))) for _ in range(8)]
    rows, at = [], 0.0
    for _ in range(120):
        at += rng.expovariate(12)
        chain = rng.choice(chains)
        keep = rng.randrange(0, len(chain) + 1)
        blocks = chain[:keep] + tuple(rng.randrange(10**9) for _ in range(rng.randrange(0, 4)))
        rows.append((at, max(1, BLOCK_TOKENS * len(blocks) - rng.randrange(0, 500)), blocks))
    workload = named(*rows, output=30)
    for name in ("static", "thresholds", "seed", "colocated_chunked", "colocated_prefill_first"):
        settings = SimSettings(
            prefill=2,
            decode=2,
            kv_capacity_tokens=rng.choice((14_000, 40_000, 200_000)),
            budget_tokens=1024,
            policy=PolicySettings(home_prefill=2, first_flip_after_s=1.0, residence_s=1.0, persist_s=0.2),
        )
        result = simulate(name, workload, COST, settings)
        assert result.summary.completed == 120, (name, result.tally.errors)
        assert result.tally.prompt_tokens + result.tally.cached_tokens == sum(r.prompt_tokens for r in workload.requests)


def test_leaping_changes_nothing_with_caches() -> None:
    rows = [(0.05 * i, 3000, tuple(range(i % 5, i % 5 + 6))) for i in range(60)]
    runs = [
        simulate("thresholds", named(*rows, output=50), COST, SimSettings(prefill=2, decode=2, leaps=leaps))
        for leaps in (True, False)
    ]
    assert cached(runs[0]) == cached(runs[1])
    for a, b in zip(runs[0].outcomes, runs[1].outcomes, strict=True):
        assert a.ttft_s == pytest.approx(b.ttft_s)
