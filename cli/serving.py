"""How a server command starts and ends: settings or exit 78, a busy port in one sentence, Ctrl-C as a clean stop.

Never builds a server: each package's `serve` does, and returns when it has stopped.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from cli.failpoint import arm_from
from cli.output import Exit, fail

Settings = TypeVar("Settings")


def given(**flags: Any) -> dict[str, Any]:
    """The flags that were given. Those that were not must not hide the environment or the file."""
    return {name: value for name, value in flags.items() if value is not None}


def settings_or_exit(load: Callable[[], Settings], what: str) -> Settings:
    """Settings, or exit 78 with the sentence that names the field and what is allowed."""
    try:
        return load()
    except FileNotFoundError as problem:
        fail(f"{what}: there is no file {problem.filename}: check the path", Exit.CONFIG)
    except OSError as problem:
        fail(f"{what}: {problem}", Exit.CONFIG)
    except ValueError as problem:  # pydantic's ValidationError is one, and so is every ConfigError
        fail(f"{what}: {explain(problem)}", Exit.CONFIG)
    except Exception as problem:
        if type(problem).__name__ != "ConfigError":
            raise
        fail(f"{what}: {problem}", Exit.CONFIG)


def explain(problem: ValueError) -> str:
    """A validation failure, one clause per field, without repeating values that may be secret."""
    errors: Any = getattr(problem, "errors", None)
    if not callable(errors):
        return str(problem)
    clauses = []
    for error in errors():
        where = ".".join(str(part) for part in error.get("loc", ()))
        clauses.append(f"{where or 'settings'}: {error.get('msg', 'invalid')}")
    return "; ".join(clauses)


def run(serve: Callable[[], Coroutine[Any, Any, None]], what: str, address: str) -> None:
    """Run a server until it stops. `address` is what it listens on, for the sentence about a busy port."""
    import uvloop

    arm_from(os.environ)
    before = signal.signal(signal.SIGTERM, stop_cleanly)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    except KeyboardInterrupt:
        return
    except Exception as problem:
        if (code := EXPECTED.get(type(problem).__name__)) is not None:
            fail(f"{what}: {problem}", code)
        if isinstance(problem, OSError) and problem.errno == errno.EADDRINUSE:
            fail(f"{what}: {address} is in use. Stop what holds it, or choose another with --port.", Exit.UNAVAILABLE)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_cleanly(*_: object) -> None:
    """SIGTERM where the server has no handler of its own, or hands the signal on after its shutdown: a stop, not a failure."""
    raise SystemExit(0)


# Failures that a server foresaw and put into a sentence; anything else is a defect and shows its traceback.
EXPECTED: Mapping[str, Exit] = {
    "ConfigError": Exit.CONFIG,
    "StoreUnavailable": Exit.UNAVAILABLE,
    "DatabaseHeld": Exit.CONFLICT,
    "StartFailed": Exit.UNAVAILABLE,
    "PortBusy": Exit.UNAVAILABLE,
}
