"""Whether the plugin may touch this SGLang at all, and what happens when one of its hooks fails.

Never guesses: an engine that is not in the tested table is left alone, and why is said.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

Original = Callable[..., Any]
Around = Callable[..., Any]  # around(original, *args, **kwargs): calls original at most as often as the engine allows
Before = Callable[..., None]  # before(now_s, *args, **kwargs)
After = Callable[..., Any]  # after(now_s, result, *args, **kwargs): what the caller gets


@dataclass(frozen=True, slots=True)
class Hook:
    """One place in the engine: the dotted path of a function or method, and what runs around it, or only before and after it.

    What runs in every iteration is of the second kind: it needs no stand-in for the engine's function, and is told the time
    (monotonic seconds) by the guard, whose clock has been read anyway.
    """

    target: str
    around: Around | None = None
    is_needed: Callable[[], bool] | None = None  # asked first, where the hook has nothing to do in almost every iteration
    before: Before | None = None
    after: After | None = None


@dataclass(frozen=True, slots=True)
class Armed:
    version: str


@dataclass(frozen=True, slots=True)
class Disarmed:
    version: str
    why: str


Arming = Armed | Disarmed


def shape(function: Callable[..., Any]) -> str:
    """A function's parameters as one comparable text: names, order, kinds, and which have a default."""
    words = []
    for p in inspect.signature(inspect.unwrap(function)).parameters.values():
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        only = "kw:" if p.kind is p.KEYWORD_ONLY else ""
        words.append(f"{only}{star}{p.name}{'' if p.default is p.empty else '='}")
    return ", ".join(words)


def shapes(targets: Iterable[str]) -> dict[str, str]:
    """The shape of each target as it is here; "missing" where there is none. Imports the engine's modules."""
    return {target: _shape_of(target) for target in targets}


def _shape_of(target: str) -> str:
    words = target.split(".")
    for cut in range(len(words) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:cut]))
        except ModuleNotFoundError:
            continue
        for word in words[cut:]:
            found = getattr(found, word, None)
        return shape(found) if callable(found) else "missing"
    return "missing"


def judge(version: str, tested: Mapping[str, Mapping[str, str]], found: Mapping[str, str]) -> Arming:
    """Armed only if this version was tested and every hooked function has the parameters that it had then."""
    table = tested.get(version)
    if table is None:
        known = ", ".join(sorted(tested)) or "none"
        return Disarmed(version, f"SGLang {version} was not tested with this plugin; tested: {known}")
    for target, here in found.items():
        expected = table.get(target)
        if expected is None:
            return Disarmed(version, f"{target} is not in the tested table of SGLang {version}")
        if here != expected:
            return Disarmed(version, f"{target} takes ({here}) here, ({expected}) when it was tested")
    return Armed(version)


class _Watched:
    """The engine's own function during one call of a hook: tells its errors from ours, and its time from ours."""

    __slots__ = ("_function", "calls", "raised", "result", "spent_s")

    def __init__(self, function: Original) -> None:
        self._function = function
        self.calls = 0
        self.result: Any = None
        self.raised: BaseException | None = None
        self.spent_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        began_s = time.monotonic()
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise
        finally:
            self.spent_s += time.monotonic() - began_s
        return self.result


class _WatchedAsync(_Watched):
    __slots__ = ()

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        began_s = time.monotonic()
        try:
            self.result = await self._function(*args, **kwargs)
        except BaseException as error:
            self.raised = error
            raise
        finally:
            self.spent_s += time.monotonic() - began_s
        return self.result


@dataclass(slots=True)
class _Spent:
    """Of one hook: its calls, and the time inside it without the engine's own function."""

    calls: int = 0
    own_s: float = 0.0


def _where_needed(guarded: Around, is_needed: Callable[[], bool]) -> Around:
    @functools.wraps(guarded)
    def passed(original: Original, *args: Any, **kwargs: Any) -> Any:
        return guarded(original, *args, **kwargs) if is_needed() else original(*args, **kwargs)

    return passed


class Guard:
    """Keeps the engine alive whatever a hook does. After `max_errors` failures every hook passes straight through, for good."""

    def __init__(self, max_errors: int = 5) -> None:
        self.max_errors = max_errors
        self.errors_total = 0
        self.errors_by_hook: dict[str, int] = {}
        self.disarmed_why = ""
        self.spent_s = 0.0  # seconds inside our own code since the start
        self._by_hook: dict[str, _Spent] = {}
        # Whether something that a hook began still needs the hooks to end well: then they stay until it has, or they fail again.
        self.unfinished: Callable[[], bool] = lambda: False
        # Called once when they have failed again: whatever is still open must be ended now, without them.
        self.give_up: Callable[[], None] = lambda: None
        self._on_disarm: list[Callable[[str], None]] = []

    @property
    def armed(self) -> bool:
        return not self.disarmed_why

    @property
    def hook_s(self) -> dict[str, float]:
        """Time inside each hook without the engine's own functions."""
        return {name: spent.own_s for name, spent in self._by_hook.items()}

    @property
    def hook_calls(self) -> dict[str, int]:
        return {name: spent.calls for name, spent in self._by_hook.items()}

    def _of(self, name: str) -> _Spent:
        return self._by_hook.setdefault(name, _Spent())

    def on_disarm(self, handler: Callable[[str], None]) -> None:
        self._on_disarm.append(handler)

    def disarm(self, why: str) -> None:
        if self.disarmed_why:
            return
        self.disarmed_why = why
        log.error("fluidpd: the plugin is disarmed: %s", why)
        for handler in self._on_disarm:
            try:
                handler(why)
            except Exception:
                log.exception("fluidpd: a part of the plugin could not step back")

    def spent(self, name: str, own_s: float) -> None:
        """Count time of our own that no hook of ours wraps."""
        self.spent_s += own_s
        mine = self._of(name)
        mine.calls, mine.own_s = mine.calls + 1, mine.own_s + own_s

    def _stays_out(self) -> bool:
        return bool(self.disarmed_why) and (self.errors_total >= 2 * self.max_errors or not self.unfinished())

    def failed(self, where: str, error: Exception) -> None:
        """Count one failure of ours; the engine goes its own way."""
        self.errors_total += 1
        self.errors_by_hook[where] = self.errors_by_hook.get(where, 0) + 1
        log.error("fluidpd: %s failed (%d of %d): %r", where, self.errors_total, self.max_errors, error, exc_info=error)
        if self.errors_total >= self.max_errors:
            self.disarm(f"{self.errors_total} failures inside hooks, the last in {where}: {error!r}")
        if self.errors_total == 2 * self.max_errors:
            try:
                self.give_up()
            except Exception:
                log.exception("fluidpd: what was open could not be ended")

    def guarded(self, name: str, hook: Hook) -> Around:
        """`hook` made safe, as SGLang's registry wants it."""
        made = self.beside(name, hook.before, hook.after) if hook.around is None else self.around(name, hook.around)
        return made if hook.is_needed is None else _where_needed(made, hook.is_needed)

    def around(self, name: str, hook: Around) -> Around:
        """`hook` made safe. An error of the engine's own function goes up as it is; one of ours never does."""
        return self._around_async(name, hook) if inspect.iscoroutinefunction(hook) else self._around_sync(name, hook)

    def beside(self, name: str, before: Before | None, after: After | None) -> Around:
        """What runs before and after the engine's own function, made safe. `after` is left out where `before` has failed."""
        mine, clock = self._of(name), time.monotonic

        def guarded(original: Original, *args: Any, **kwargs: Any) -> Any:
            if self.disarmed_why and self._stays_out():
                return original(*args, **kwargs)
            mine.calls += 1
            then = after
            if before is not None:
                began_s = clock()
                try:
                    before(began_s, *args, **kwargs)
                except Exception as error:
                    self.failed(name, error)
                    then = None
                own_s = clock() - began_s
                self.spent_s += own_s
                mine.own_s += own_s
            result = original(*args, **kwargs)
            if then is not None:
                began_s = clock()
                try:
                    result = then(began_s, result, *args, **kwargs)
                except Exception as error:
                    self.failed(name, error)
                own_s = clock() - began_s
                self.spent_s += own_s
                mine.own_s += own_s
            return result

        return guarded

    def _around_sync(self, name: str, hook: Around) -> Around:
        mine = self._of(name)

        @functools.wraps(hook)
        def guarded(original: Original, *args: Any, **kwargs: Any) -> Any:
            if self.disarmed_why and self._stays_out():
                return original(*args, **kwargs)
            began_s = time.monotonic()
            watched = _Watched(original)
            try:
                return hook(watched, *args, **kwargs)
            except Exception as error:
                if error is watched.raised:
                    raise
                self.failed(name, error)
                if watched.calls and watched.raised is None:
                    return watched.result
                return original(*args, **kwargs)
            finally:
                own_s = time.monotonic() - began_s - watched.spent_s
                self.spent_s += own_s
                mine.calls, mine.own_s = mine.calls + 1, mine.own_s + own_s

        return guarded

    def _around_async(self, name: str, hook: Callable[..., Awaitable[Any]]) -> Around:
        mine = self._of(name)

        @functools.wraps(hook)
        async def guarded(original: Original, *args: Any, **kwargs: Any) -> Any:
            if self.disarmed_why and self._stays_out():
                return await original(*args, **kwargs)
            watched = _WatchedAsync(original)
            try:
                return await hook(watched, *args, **kwargs)
            except Exception as error:
                if error is watched.raised:
                    raise
                self.failed(name, error)
                if watched.calls and watched.raised is None:
                    return watched.result
                return await original(*args, **kwargs)
            finally:
                # An await of ours may wait for anything, so its time says nothing about cost: only calls are counted.
                mine.calls += 1

        return guarded
