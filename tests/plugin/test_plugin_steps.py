"""What a worker learns of its own step times, and how large a chunk it therefore dares."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fluidpd.simulator.worker import BorrowTerms
from sidecar.plugin.chunks import TRIAL_TOKENS_PER_S, ChunkRule
from sidecar.plugin.steps import GUARD_FLOOR_S, Shape, StepFit, StepModel


def gpu(s: Shape) -> float:
    """Like an H100: weights stream once, attention grows with context."""
    total = 0.008 + 4e-5 * (s.c + s.batch) + 2e-8 * s.context_tokens
    return total + (1e-8 * s.c * (s.o + s.c / 2) if s.c else 0)


def torch_cpu(s: Shape) -> float:
    """Torch's CPU attention recomputes the whole prefix for each chunk."""
    return 0.002 + 1e-4 * s.c + 1e-8 * (s.o + s.c) ** 2 if s.c else 0.004 + 5e-4 * s.batch


def taught(truth: Callable[[Shape], float], fused: bool, steps: int = 400, noise: float = 0.03) -> StepModel:
    model, rng = StepModel(), random.Random(7)
    for _ in range(steps):
        batch = rng.randrange(1, 32)
        context = batch * rng.randrange(200, 2000)
        c = rng.choice((64, 128, 256, 512))
        lent = Shape(c, rng.randrange(0, 4000), batch if fused else 0, context if fused else 0)
        for shape in (lent, Shape(0, 0, batch, context)):
            model.learn(shape, truth(shape) * (1 + rng.uniform(-noise, noise)))
    return model


@pytest.mark.parametrize(("truth", "fused"), [(gpu, True), (gpu, False), (torch_cpu, False)])
def test_it_learns_both_regimes_within_the_noise(truth: Callable[[Shape], float], fused: bool) -> None:
    model = taught(truth, fused)
    for shape in (Shape(256, 0, 16 if fused else 0, 16000 if fused else 0), Shape(256, 3000, 0, 0), Shape(0, 0, 16, 16000)):
        if shape.c and fused and not shape.batch:
            continue
        predicted = model.predict_s(shape)
        assert predicted is not None and abs(predicted - truth(shape)) < 0.08 * truth(shape)


def test_context_costs_what_it_costs_at_a_depth_that_an_average_per_token_would_miss() -> None:
    model = taught(torch_cpu, fused=False)
    shallow, deep = model.predict_s(Shape(256, 0, 0, 0)), model.predict_s(Shape(256, 6000, 0, 0))
    assert shallow is not None and deep is not None
    assert deep > 6 * shallow and abs(deep - torch_cpu(Shape(256, 6000, 0, 0))) < 0.1 * deep


def test_more_work_is_never_predicted_to_take_less_time() -> None:
    model = taught(gpu, fused=True, steps=40, noise=0.5)
    last = 0.0
    for c in range(64, 2048, 64):
        now = model.predict_s(Shape(c, 1000, 16, 16000))
        assert now is not None and now >= last
        last = now


def test_it_predicts_nothing_before_it_has_seen_enough() -> None:
    model = StepModel()
    for _ in range(7):
        model.learn(Shape(64, 0, 0, 0), 0.01)
    assert model.predict_s(Shape(64, 0, 0, 0)) is None and model.lent.residual_p995_s() is None
    assert model.predict_s(Shape(0, 0, 0, 0)) == 0.0


def test_the_guard_follows_the_worst_errors_and_has_a_floor() -> None:
    good = taught(gpu, fused=True, noise=0.0)
    assert good.lent.guard_s() == GUARD_FLOOR_S
    rng = random.Random(3)
    for _ in range(600):
        shape = Shape(128, 0, 8, 8000)
        good.learn(shape, gpu(shape) + (0.015 if rng.random() < 0.02 else 0.0))
    assert 0.010 < good.lent.guard_s() < 0.020
    assert good.decode.guard_s() == GUARD_FLOOR_S  # the regimes are kept apart


def test_a_prompt_at_once_is_believed_after_a_thousand_small_chunks() -> None:
    """It takes fifty times as long as any step before it: not a pause, another size."""
    fit = StepFit(7)
    rng = random.Random(3)

    def truth(shape: Shape) -> float:
        return 0.004 + shape.c * 1e-4 + (shape.c + shape.o) ** 2 * 1e-8

    for _ in range(1000):
        small = Shape(rng.choice((64, 128)), rng.randrange(0, 1900), 0, 0)
        fit.learn(small, truth(small) * rng.uniform(0.95, 1.05))
    whole = Shape(2000, 0, 0, 0)
    for _ in range(3):
        fit.learn(whole, truth(whole) * rng.uniform(0.95, 1.05))
    predicted_s = fit.predict_s(whole)
    assert predicted_s == pytest.approx(truth(whole), rel=0.25)
    small = Shape(64, 1000, 0, 0)
    assert fit.predict_s(small) == pytest.approx(truth(small), rel=0.25)


def test_a_pause_of_the_machine_does_not_bend_the_model() -> None:
    model = taught(gpu, fused=True)
    shape = Shape(256, 1000, 16, 16000)
    model.learn(shape, 2.0)
    predicted = model.predict_s(shape)
    assert predicted is not None and abs(predicted - gpu(shape)) < 0.1 * gpu(shape)


# ---------------------------------------------------------------- chunks

TERMS = BorrowTerms(until_s=1e9, peers={}, tbt_slo_s=0.040, guard_s=0.003)


@pytest.mark.parametrize("fused", [True, False])
def test_the_chunk_is_the_largest_whose_step_fits_the_deadline(fused: bool) -> None:
    rule = ChunkRule(taught(gpu, fused), fused)
    chunk = rule.next(0.0, TERMS, 2000, 1000, 16, 16000)
    assert chunk.tokens > 64 and not chunk.by_floor and chunk.fused is fused
    shape = Shape(chunk.tokens, 1000, 16, 16000)
    truth = gpu(shape) if fused else gpu(Shape(chunk.tokens, 1000, 0, 0)) + gpu(Shape(0, 0, 16, 16000))
    assert truth <= 0.040 - 0.001
    fused_tokens = ChunkRule(taught(gpu, True), True).next(0.0, TERMS, 2000, 1000, 16, 16000).tokens
    assert chunk.tokens <= fused_tokens  # a second pass streams the weights twice


def test_a_lone_prompt_has_no_deadline_to_keep() -> None:
    rule = ChunkRule(taught(torch_cpu, False), False)
    assert rule.next(0.0, TERMS, 4000, 4000, 0, 0).tokens == 1024  # twice the largest that was ever measured


def test_what_never_fits_still_moves_at_the_floor() -> None:
    rule = ChunkRule(taught(torch_cpu, False), False)
    rule.started(10.0)
    assert rule.next(10.1, TERMS, 2000, 6000, 8, 8000).tokens == 0
    floor = rule.next(10.3, TERMS, 2000, 6000, 8, 8000)
    assert floor.tokens == 64 and floor.by_floor
    assert rule.next(10.3, TERMS, 20, 6000, 8, 8000).tokens == 20


def test_without_a_model_it_starts_small_and_doubles_while_the_decodes_have_room_for_twice_as_much() -> None:
    rule = ChunkRule(StepModel(), False)
    sizes = []
    for gap_s in (0.005, 0.012, 0.019, 0.035, 0.012):
        tokens = rule.next(0.0, TERMS, 5000, 0, 4, 4000).tokens
        sizes.append(tokens)
        rule.model.learn(Shape(tokens, 0, 0, 0), gap_s)
        rule.ran(0.0, False, gap_s, 0.04)
    assert sizes == [64, 128, 256, 512, 64]
    assert rule.rate(TERMS, 4, 4000, None) == TRIAL_TOKENS_PER_S


def test_a_large_chunk_that_delayed_nobody_is_no_leave_to_delay_decodes() -> None:
    rule = ChunkRule(StepModel(), False)
    rule.model.learn(Shape(2000, 0, 0, 0), 0.2)  # nothing was decoded then
    rule.ran(0.0, False, None, 0.04)
    assert rule.next(0.1, TERMS, 2000, 0, 4, 4000).tokens == 64
    assert rule.next(0.1, TERMS, 2000, 0, 0, 0).tokens == 2000


def test_two_measured_overruns_stop_the_lending_for_a_while() -> None:
    rule = ChunkRule(taught(gpu, True), True)
    rule.ran(1.0, False, 0.05, 0.04)
    assert rule.next(1.01, TERMS, 2000, 0, 8, 8000).tokens
    rule.ran(1.02, False, 0.05, 0.04)
    assert rule.next(1.03, TERMS, 2000, 0, 8, 8000).tokens == 0 and rule.held_total == 1
    assert rule.next(1.3, TERMS, 2000, 0, 8, 8000).by_floor  # a borrowed prompt moves all the same
    assert not rule.next(2.1, TERMS, 2000, 0, 8, 8000).by_floor
    rule.ran(3.0, True, 0.05, 0.04)  # the floor's overruns are expected: they say nothing about the model
    rule.ran(3.1, True, 0.05, 0.04)
    assert rule.held_total == 1


def test_the_rate_is_what_was_achieved_even_if_the_model_promises_more() -> None:
    rule = ChunkRule(taught(gpu, True), True)
    modelled = rule.rate(TERMS, 16, 16000, 1e9)
    assert 1000 < modelled < 40000
    assert rule.rate(TERMS, 16, 16000, 400.0) == 500.0
