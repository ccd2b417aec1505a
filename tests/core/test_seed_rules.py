"""The seed's four rules, as printed: what each needs, and what it does. A baseline only; nothing live uses them."""

from __future__ import annotations

from core_fleets import decode, old_memory, prefill, snapshot, targets

from fluidpd.decision import Decision
from fluidpd.indices import derive
from fluidpd.names import Action, Reason, Role
from fluidpd.policy.memory import Memory
from fluidpd.policy.seed import decide_as_the_seed
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Snapshot


def judge(snap: Snapshot, memory: Memory | None = None) -> tuple[Decision, Memory]:
    return decide_as_the_seed(snap, derive(snap, targets()), memory or old_memory(), PolicySettings(), snap.now_s, targets())


def after_persisting(snap: Snapshot) -> Decision:
    _, memory = judge(snap)
    return judge(snapshot(*snap.workers, now_s=snap.now_s + 1.0), memory)[0]


def test_at_ease_nothing_is_done() -> None:
    told, _ = judge(snapshot(prefill("p", 200), decode("d", kv_share=0.2, batch=8, context=8000)))
    assert (told.action, told.reason) == (Action.HOLD, Reason.BALANCED)


def test_a_prefill_spike_with_decode_slack_lends_at_once() -> None:
    told, _ = judge(snapshot(prefill("p", *[4000] * 12), decode("d1", kv_share=0.1, batch=4, context=4000), decode("d2")))
    assert told.action is Action.BORROW and told.lenders == ("d1", "d2")


def test_a_sustained_prefill_deficit_moves_the_cheapest_decode_worker() -> None:
    snap = snapshot(prefill("p", *[4000] * 20), decode("d1", kv_share=0.1, batch=4, context=4000), decode("d2"))
    assert judge(snap)[0].action is Action.BORROW, "not before it has persisted"
    told = after_persisting(snap)
    assert told.action is Action.FLIP and told.flips[0].worker == "d2" and told.flips[0].to_role is Role.PREFILL


def test_a_sustained_decode_deficit_moves_a_prefill_worker_that_is_idle() -> None:
    told = after_persisting(snapshot(prefill("p1"), prefill("p2"), decode("d", kv_share=1.0, batch=256, context=500_000)))
    assert told.action is Action.FLIP and told.flips[0].to_role is Role.DECODE


def test_the_last_worker_of_a_role_stays_and_a_new_role_is_kept_for_a_while() -> None:
    lonely = snapshot(prefill("p", *[4000] * 20), decode("d"))
    assert after_persisting(lonely).flips == ()
    fresh = [decode(name, role_since_s=99.0) for name in ("d1", "d2")]
    assert after_persisting(snapshot(prefill("p", *[4000] * 20), *fresh)).flips == ()


def test_the_pools_mean_hides_a_hot_decode_worker_and_the_seed_lends_on_it_all_the_same() -> None:
    """What the seed does wrong is kept: that is what it is compared for."""
    hot = decode("hot", kv_share=0.99, batch=200, context=490_000)
    told, _ = judge(snapshot(prefill("p", *[4000] * 12), hot, decode("d2"), decode("d3")))
    assert "hot" in told.lenders
