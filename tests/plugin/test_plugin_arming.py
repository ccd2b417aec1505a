"""When the plugin may touch an engine, and what its failures cost the engine: nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sidecar.plugin.arming import Armed, Disarmed, Guard, Hook, judge, shape, shapes
from sidecar.plugin.settings import PluginSettings
from sidecar.plugin.tested import signatures

TABLE = {"1.0": {"m.f": "self, x="}}


def test_only_a_tested_version_with_the_same_signatures_is_armed() -> None:
    assert judge("1.0", TABLE, {"m.f": "self, x="}) == Armed("1.0")
    other = judge("1.1", TABLE, {})
    assert isinstance(other, Disarmed) and "SGLang 1.1 was not tested" in other.why and "1.0" in other.why
    changed = judge("1.0", TABLE, {"m.f": "self, x=, y"})
    assert isinstance(changed, Disarmed) and changed.why == "m.f takes (self, x=, y) here, (self, x=) when it was tested"
    gone = judge("1.0", TABLE, {"m.f": "missing"})
    assert isinstance(gone, Disarmed) and "takes (missing)" in gone.why
    new = judge("1.0", TABLE, {"m.g": "self"})
    assert isinstance(new, Disarmed) and "m.g is not in the tested table" in new.why


def test_a_shape_tells_names_order_kinds_and_defaults() -> None:
    def f(self: Any, a: int, b: int = 1, *rest: int, only: int, also: int = 2, **more: int) -> None: ...

    assert shape(f) == "self, a, b=, *rest, kw:only, kw:also=, **more"
    assert shapes(["json.dumps", "json.nothing", "no_such_module.f"])["json.nothing"] == "missing"
    assert shapes(["no_such_module.f"]) == {"no_such_module.f": "missing"}


def test_the_table_names_the_version_that_the_recipe_installs() -> None:
    assert "0.5.23" in signatures() and all(s != "missing" for s in signatures()["0.5.23"].values())


def test_settings_that_make_no_sense_are_said_and_replaced() -> None:
    made = PluginSettings.of({"FLUIDPD_PLUGIN_SOCKET": " /x ", "FLUIDPD_PLUGIN_FUSE": "maybe", "FLUIDPD_PLUGIN_MAX_ERRORS": "0"})
    assert (made.socket_path, made.fuse, made.max_errors, len(made.notes)) == ("/x", None, 5, 2)
    assert PluginSettings.of({"FLUIDPD_PLUGIN_FUSE": "off"}).fuse is False


# ---------------------------------------------------------------- failures


def test_a_hook_that_fails_before_the_engine_ran_leaves_the_engine_its_own_way() -> None:
    guard = Guard()

    def broken(original: Any, x: int) -> Any:
        raise KeyError(x)

    assert guard.around("h", broken)(lambda x: x + 1, 4) == 5
    assert guard.errors_total == 1 and guard.errors_by_hook == {"h": 1} and guard.armed


def test_a_hook_that_fails_after_the_engine_ran_does_not_run_it_twice() -> None:
    guard, ran = Guard(), []

    def broken(original: Any, x: int) -> Any:
        original(x)
        raise KeyError(x)

    assert guard.around("h", broken)(lambda x: ran.append(x) or "result", 4) == "result"
    assert ran == [4]


def test_an_error_of_the_engine_goes_up_as_it_is_and_is_not_counted() -> None:
    guard = Guard()

    def engine() -> None:
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="the engine's own"):
        guard.around("h", lambda original: original())(engine)
    assert guard.errors_total == 0


def test_after_enough_failures_every_hook_passes_straight_through() -> None:
    guard, told, seen = Guard(max_errors=2), [], []
    guard.on_disarm(told.append)
    broken = guard.around("broken", lambda original: {}["x"])
    well = guard.around("well", lambda original: seen.append(1) or original())
    assert [broken(lambda: 1), broken(lambda: 1), well(lambda: 2)] == [1, 1, 2]
    assert not guard.armed and len(told) == 1 and "2 failures inside hooks" in told[0] and seen == []


def test_what_a_hook_began_is_ended_by_the_hooks_even_after_disarming() -> None:
    guard, seen, open_work = Guard(max_errors=1), [], [True]
    guard.unfinished = lambda: open_work[0]
    well = guard.around("well", lambda original: seen.append(1) or original())
    guard.disarm("a person said so")
    assert well(lambda: 2) == 2 and seen == [1]
    open_work[0] = False
    assert well(lambda: 2) == 2 and seen == [1]
    open_work[0] = True
    guard.errors_total = 2  # and if they fail again, they are out for good
    assert well(lambda: 2) == 2 and seen == [1]


def test_hooks_that_go_on_failing_while_they_wind_down_end_what_is_open_at_once() -> None:
    guard, gave_up = Guard(max_errors=2), []
    guard.unfinished, guard.give_up = lambda: True, lambda: gave_up.append(1)
    broken = guard.around("broken", lambda original: {}["x"])
    assert [broken(lambda: 1) for _ in range(8)] == [1] * 8
    assert gave_up == [1] and guard.errors_total == 4


def test_what_runs_before_and_after_the_engine_is_told_the_time_and_may_change_only_the_result() -> None:
    guard, seen = Guard(), []
    hook = guard.guarded(
        "h", Hook("x", before=lambda now_s, x: seen.append((now_s, x)), after=lambda now_s, result, x: (result, x, now_s > 0))
    )
    assert hook(lambda x: x + 1, 4) == (5, 4, True)
    assert seen[0][0] > 0 and seen[0][1] == 4 and guard.hook_calls["h"] == 1 and guard.spent_s > 0


@pytest.mark.parametrize("broken", ["before", "after"])
def test_a_failure_before_or_after_the_engine_changes_nothing_is_counted_and_disarms_in_the_end(broken: str) -> None:
    guard, ran, well = Guard(max_errors=2), [], []

    def fails(*_: Any) -> Any:
        raise KeyError("x")

    parts: dict[str, Any] = {
        "before": lambda now_s: well.append("before"),
        "after": lambda now_s, result: well.append("after") or result,
    }
    hook = guard.guarded("h", Hook("x", **(parts | {broken: fails})))
    assert [hook(lambda: ran.append(1) or "result") for _ in range(3)] == ["result"] * 3
    assert len(ran) == 3 and guard.errors_by_hook == {"h": 2} and not guard.armed
    # `after` counts on what `before` has done, so without it there is none.
    assert well == ([] if broken == "before" else ["before", "before"])


def test_an_error_of_the_engine_between_before_and_after_goes_up_as_it_is() -> None:
    guard, after = Guard(), []

    def engine() -> None:
        raise RuntimeError("the engine's own")

    hook = guard.guarded("h", Hook("x", before=lambda now_s: None, after=lambda now_s, result: after.append(1)))
    with pytest.raises(RuntimeError, match="the engine's own"):
        hook(engine)
    assert guard.errors_total == 0 and after == []


def test_the_engines_time_is_not_the_hooks_when_before_has_failed() -> None:
    guard, inside = Guard(), []

    def engine() -> None:
        began_s = time.monotonic()
        time.sleep(0.05)
        inside.append(time.monotonic() - began_s)

    hook, began_s = guard.guarded("h", Hook("x", before=lambda now_s: 1 / 0)), time.monotonic()
    hook(engine)
    assert guard.errors_total == 1 and guard.spent_s <= time.monotonic() - began_s - inside[0]


async def test_a_coroutine_hook_is_guarded_too() -> None:
    guard = Guard()

    async def engine(x: int) -> int:
        return x + 1

    async def broken(original: Any, x: int) -> int:
        raise KeyError(x)

    async def well(original: Any, x: int) -> int:
        return 10 * await original(x)

    assert await guard.around("b", broken)(engine, 1) == 2
    assert await guard.around("w", well)(engine, 1) == 20
    assert guard.errors_total == 1


def test_the_clock_of_a_hook_counts_only_its_own_time() -> None:
    import time

    guard = Guard()
    slow = guard.around("h", lambda original: original())
    slow(lambda: time.sleep(0.05))
    assert guard.hook_calls["h"] == 1 and guard.spent_s < 0.02
