"""What every test needs: a hermetic environment, and an honest account of what was not run.

Never hides a skip: each is listed with its remedy, and FLUIDPD_STRICT_SKIPS=1 turns any into a failure.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, not about the code.
settings.register_profile("fluidpd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fluidpd")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "sglang"))  # for the fleets of real engines
sys.path.insert(0, str(ROOT / "tests"))  # for postgres_server
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Tests of these kinds have their own make target: they are not selected unless FLUIDPD_TEST names the kind.
ELSEWHERE = {
    "gpu": "run `make test-gpu` on a machine with an NVIDIA GPU",
    "sglang": "run `make test-sglang` where SGLang is installed",
    "soak": "run `make soak`: many minutes",
    "faults": "run `make faults`: minutes of killed, stopped and starved processes",
}


def browser_missing() -> bool:
    return find_spec("playwright") is None or not any(shutil.which(name) for name in BROWSERS)


def router_missing() -> bool:
    return find_spec("sglang_router") is None


def postgres_missing() -> bool:
    from postgres_server import postgres_missing as missing

    return missing()


def prometheus_missing() -> bool:
    return not all(shutil.which(name) for name in ("prometheus", "promtool", "prometheus-alertmanager", "amtool"))


NEEDS = {
    "browser": (browser_missing, "no browser: apt-get install chromium, then `make setup`"),
    "router": (router_missing, "no sglang-router: run `make setup`"),
    "prometheus": (prometheus_missing, "no Prometheus: apt-get install prometheus prometheus-alertmanager"),
    "postgres": (postgres_missing, "no PostgreSQL server or no asyncpg: apt-get install postgresql, then `make setup`"),
}

# Fleets of real engines, in the order in which their tests run.
FLEETS = ("trio", "plain", "whole", "faked", "fused", "tp2")

_not_selected: dict[str, int] = {}
_fleets_selected: set[str] = set()


class RealFleets:
    """One fleet of real engines, and at most one that starts meanwhile: each takes gigabytes, and time from the others."""

    def __init__(self) -> None:
        self._name = ""
        self._held: AbstractContextManager[Any] | None = None
        self._made: Any = None
        self._ahead: tuple[str, AbstractContextManager[Any], Future[Any]] | None = None
        self._starter = ThreadPoolExecutor(1)

    def ask(self, name: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        """The fleet of that name: the one that runs, or else that one alone. An error of its start is raised here."""
        if name != self._name:
            self._stop_current()
            if self._ahead is None or self._ahead[0] != name:
                self.stop()
                self.start_ahead(name, start)
            assert self._ahead is not None
            (_, held, made), self._ahead = self._ahead, None
            self._made = made.result()
            self._name, self._held = name, held
        return self._made

    def start_ahead(self, name: str, start: Callable[[], AbstractContextManager[Any]]) -> None:
        """Start what will be asked for next, beside tests whose waits are long enough for it."""
        if self._ahead is None and name != self._name:
            held = start()
            self._ahead = name, held, self._starter.submit(held.__enter__)

    def stop(self) -> None:
        """Nothing runs afterwards. For a test whose fleet is not whole any more, too."""
        self._stop_current()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[2].exception() is None:
            ahead[1].__exit__(None, None, None)

    def _stop_current(self) -> None:
        held, self._name, self._held, self._made = self._held, "", None, None
        if held is not None:
            held.__exit__(None, None, None)


def fleet_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("fleet")
    return str(marker.args[0]) if marker is not None else ""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = os.environ.get("FLUIDPD_TEST", "")
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        kinds = [name for name in ELSEWHERE if item.get_closest_marker(name)]
        kind = kinds[0] if kinds and wanted not in kinds else None  # a test of two kinds runs with either
        (left if kind else kept).append(item)
        if kind:
            _not_selected[kind] = _not_selected.get(kind, 0) + 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
    items.sort(key=lambda item: ("", *FLEETS).index(fleet_of(item)))  # so that each fleet is started once
    _fleets_selected.update(fleet_of(item) for item in items)
    for name, (missing, remedy) in NEEDS.items():
        concerned = [item for item in items if item.get_closest_marker(name)]
        if concerned and missing():
            for item in concerned:
                item.add_marker(pytest.mark.skip(reason=remedy))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """With pytest -n the workers select: each selects the same, and one of them tells."""
    _not_selected.update(getattr(node, "workeroutput", {}).get("not_selected", {}))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    yield
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_selected"] = dict(_not_selected)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not strict():
        return
    if reporter.stats.get("skipped") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def strict() -> bool:
    return os.environ.get("FLUIDPD_STRICT_SKIPS", "") not in ("", "0")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped and not _not_selected:
        return
    terminalreporter.section("not run")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"skipped  {report.nodeid}: {reason.removeprefix('Skipped: ')}")
    for kind, count in sorted(_not_selected.items()):
        terminalreporter.write_line(f"{count} {kind} test{'s' if count > 1 else ''} not selected: {ELSEWHERE[kind]}")
    if skipped and strict():
        terminalreporter.write_line("FLUIDPD_STRICT_SKIPS is set: a skip fails this run. Apply the remedy above.", red=True)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the person who runs the tests leaks into them, and no proxy sits between them and localhost."""
    for name in list(os.environ):
        if name.startswith("FLUIDPD_") and name not in ("FLUIDPD_STRICT_SKIPS", "FLUIDPD_TEST"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture(scope="session")
def real_fleets() -> Iterator[RealFleets]:
    held = RealFleets()
    yield held
    held.stop()


@pytest.fixture(scope="session")
def sglang_environment() -> Any:
    """The environment of the real SGLang, built if it is not there yet."""
    from real_environment import NoEnvironment, environment

    try:
        return environment()
    except NoEnvironment as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def start_fleet(real_fleets: RealFleets, sglang_environment: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """start(name, spec): the running fleet of that name. `spec` makes its specification, given the folder it will have."""
    from real_fleet import running

    def start(name: str, spec: Callable[[Path], Any], ask: Callable[..., Any] = real_fleets.ask) -> Any:
        def made() -> AbstractContextManager[Any]:
            folder = tmp_path_factory.mktemp(name)
            return running(spec(folder), sglang_environment, folder)

        return ask(name, made)

    return start


@pytest.fixture(scope="session")
def start_ahead(real_fleets: RealFleets, start_fleet: Any) -> Callable[[str], None]:
    """start_ahead(name): start that fleet beside tests to which time does not matter, if any test will ask for it."""
    from real_fleet import SPECS

    def start(name: str) -> None:
        if name in _fleets_selected:
            start_fleet(name, SPECS[name], real_fleets.start_ahead)

    return start


@pytest.fixture(scope="module")
def bare_trio(start_fleet: Any) -> Any:
    """1 prefill and 2 decode workers with the plugin, and the router; nobody of FluidPD's beside them."""
    from real_fleet import TRIO

    return start_fleet("trio", lambda folder: TRIO)


@pytest.fixture
def plain_pair(start_fleet: Any) -> Any:
    """1 prefill and 1 decode worker as SGLang is, without the plugin, and the router."""
    from real_fleet import plain_spec

    return start_fleet("plain", plain_spec)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """The session's PostgreSQL, shared: who freezes or restarts one starts its own (`with postgres_server()`)."""
    from postgres_server import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def _migrated(postgres: Any) -> Any:
    from postgres_server import Migrated

    return Migrated(postgres)


@pytest.fixture
def postgres_url(_migrated: Any) -> Iterator[str]:
    """A new PostgreSQL database at the newest schema. Mark a test that asks for it `postgres`."""
    yield _migrated.new()
    _migrated.drop_all()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without any table, of both kinds."""
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'fluidpd.db'}"
        return
    server = request.getfixturevalue("postgres")
    name = server.create()
    yield server.url(name)
    server.drop(name)


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from controller.store.engine import migrate

    path = tmp_path_factory.mktemp("template") / "fluidpd.db"
    migrate(f"sqlite+aiosqlite:///{path}")
    return path.read_bytes()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a new database at the newest schema; a test that asks for it runs on both kinds."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    (tmp_path / "fluidpd.db").write_bytes(request.getfixturevalue("_sqlite_template"))
    return f"sqlite+aiosqlite:///{tmp_path / 'fluidpd.db'}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT
