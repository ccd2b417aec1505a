"""An alert's life: pending, firing, kept firing, resolved; and what it does when nothing is known."""

from __future__ import annotations

from dataclasses import replace

from fluidpd.alerts import Alert, AlertState, Rule, Severity, Silence, Told, fingerprint, new, step

RULE = Rule("FluidPDTest", Severity.PAGE, for_s=60, keep_s=300)


def life(
    rule: Rule, holds: list[tuple[float, bool | None]], alert: Alert | None = None
) -> tuple[Alert, list[tuple[float, Told]]]:
    alert = alert or new(rule, {"worker": "w1"}, "lab")
    told = []
    for at_s, held in holds:
        alert, event = step(alert, rule, held, at_s, value=0.5)
        if event is not None:
            told.append((at_s, event))
    return alert, told


def test_it_fires_once_it_held_for_long_enough_and_says_so_once() -> None:
    alert, told = life(RULE, [(0, True), (30, True), (60, True), (75, True)])
    assert alert.state is AlertState.FIRING and told == [(60, Told.FIRING)]
    assert (alert.pending_s, alert.started_s) == (0, 60)


def test_what_holds_for_a_moment_only_is_forgotten() -> None:
    alert, told = life(RULE, [(0, True), (30, False), (45, True), (90, True)])
    assert alert.state is AlertState.PENDING and told == [] and alert.pending_s == 45


def test_it_fires_on_for_a_while_so_that_it_does_not_flap() -> None:
    alert, told = life(RULE, [(0, True), (60, True), (100, False), (200, True), (210, False), (509, False), (510, False)])
    assert told == [(60, Told.FIRING), (510, Told.RESOLVED)] and alert.state is AlertState.RESOLVED
    assert alert.resolved_s == 510 and alert.started_s == 60


def test_no_data_is_no_end_and_no_beginning() -> None:
    fires, told = life(RULE, [(0, True), (60, True), (100, False), (200, None), (4000, None)])
    assert fires.state is AlertState.NODATA and fires.state.is_firing and told == [(60, Told.FIRING)]
    after, told = life(RULE, [(4010, False), (4309, False), (4310, False)], fires)
    assert told == [(4310, Told.RESOLVED)] and after.started_s == 60
    assert life(RULE, [(0, None), (100, None)])[0].state is AlertState.INACTIVE
    assert life(RULE, [(0, True), (30, None)])[0].state is AlertState.INACTIVE


def test_its_beginning_stays_whatever_happens_until_it_begins_anew() -> None:
    quick = replace(RULE, for_s=0, keep_s=0)
    alert, _ = life(quick, [(10, True), (20, True), (30, None), (40, True)])
    assert alert.started_s == 10
    again, told = life(quick, [(50, False), (60, True)], alert)
    assert again.started_s == 60 and [t for _, t in told] == [Told.RESOLVED, Told.FIRING]


def test_a_clock_set_back_delays_nothing_and_ends_nothing_early() -> None:
    alert, told = life(RULE, [(1000, True), (100, True), (130, True), (160, True)])
    assert told == [(160, Told.FIRING)] and alert.pending_s == 100


def test_the_fingerprint_is_of_the_labels_alone() -> None:
    one, other = new(RULE, {"worker": "w1", "slo": "x"}, "lab"), new(RULE, {"slo": "x", "worker": "w1"}, "lab")
    assert one.fingerprint == other.fingerprint == fingerprint(one.labels)
    assert step(one, RULE, True, 5.0, value=0.9, annotations={"summary": "x"})[0].fingerprint == one.fingerprint
    assert new(RULE, {"worker": "w2", "slo": "x"}, "lab").fingerprint != one.fingerprint


def test_a_silence_mutes_what_has_all_its_labels_while_it_stands() -> None:
    alert = new(RULE, {"worker": "w1"}, "lab")
    silence = Silence(1, {"alertname": "FluidPDTest", "worker": "w1"}, "known", "ana", created_s=10, expires_s=20)
    assert [silence.mutes(alert, t) for t in (9, 10, 19, 20)] == [False, True, True, False]
    assert not replace(silence, ended_s=12.0).mutes(alert, 15)
    assert not silence.mutes(new(RULE, {"worker": "w2"}, "lab"), 15)
