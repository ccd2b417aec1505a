"""A throw-away PostgreSQL for tests: a cluster of its own in a temporary folder, on a free port, gone when the test session ends.

Never the machine's own cluster, and never safe against a power cut: fsync is off, as nothing in it outlives the tests. A crash of
the server alone loses nothing that was committed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

PASSWORD = "of-the-tests"
ROLE = "fluidpd"
REMEDY = "no PostgreSQL server or no asyncpg: apt-get install postgresql, then `make setup`"


def binaries() -> Path | None:
    """The folder with initdb and postgres: Debian keeps it out of PATH, one for each version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: float(p.parent.parent.name))
    in_path = shutil.which("postgres")
    if found:
        return found[-1].parent
    return Path(in_path).resolve().parent if in_path else None


def postgres_missing() -> bool:
    if binaries() is None or find_spec("asyncpg") is None or shutil.which("setpriv") is None:
        return True
    return os.geteuid() == 0 and _account() is None  # PostgreSQL refuses to run as root


def _account() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


class PostgresServer:
    """One server. The role `fluidpd` owns what it makes; over TCP it needs PASSWORD, over the socket nothing."""

    def __init__(self, folder: Path) -> None:
        found = binaries()
        assert found is not None, REMEDY
        self._bin, self.folder = found, folder
        self._data, self._log = folder / "data", folder / "postgres.log"
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------ life

    def make(self) -> None:
        account = _account() if os.geteuid() == 0 else None
        secret = self.folder / "pw"
        secret.write_text(PASSWORD)
        if account is not None:
            for path in (self.folder, secret):
                os.chown(path, account.pw_uid, account.pw_gid)
        auth = ["--username", ROLE, "--pwfile", str(secret), "--auth-local", "trust", "--auth-host", "scram-sha-256"]
        self._run("initdb", "-D", str(self._data), "--no-sync", "--encoding", "UTF8", "--locale", "C", *auth)

    def start(self) -> None:
        """Returns when it takes connections."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "16MB",
            "max_connections": 60,
            "autovacuum": "off",
        }
        argv = self._as_owner("postgres", "-D", str(self._data), *[f"--{name}={value}" for name, value in settings.items()])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        deadline = time.monotonic() + 30
        ready = [str(self._bin / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the test PostgreSQL did not start:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT is PostgreSQL's immediate shutdown: it recovers at the next start, as after a crash. SIGINT is its fast one."""
        if self._process is None:
            return
        self.thaw()
        self._process.send_signal(how)
        self._process.wait(20)
        self._process = None

    def restart(self, how: signal.Signals = signal.SIGQUIT) -> None:
        self.stop(how)
        self.start()

    # ------------------------------------------------------------ faults

    def processes(self) -> list[int]:
        """The server and its children, which serve the connections."""
        assert self._process is not None
        top = self._process.pid
        children = Path(f"/proc/{top}/task/{top}/children").read_text().split()
        return [top, *map(int, children)]

    def freeze(self) -> None:
        """SIGSTOP to all of it: connections stay open and nothing answers. Returns when each of them is seen stopped."""
        deadline = time.monotonic() + 20
        while not self.frozen:
            for pid in self.processes():
                _signal(pid, signal.SIGSTOP)
            assert time.monotonic() < deadline, "nothing may run any more"
            time.sleep(0.02)

    @property
    def frozen(self) -> bool:
        return all(_state(pid) in ("T", "") for pid in self.processes())

    def thaw(self) -> None:
        for pid in self.processes():
            _signal(pid, signal.SIGCONT)

    # ------------------------------------------------------------ databases

    def url(self, database: str) -> str:
        """With the password in it, as one process of a test needs it."""
        return f"postgresql+asyncpg://{ROLE}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def bare_url(self, database: str) -> str:
        """Without the password: that one comes from a file."""
        return f"postgresql+asyncpg://{ROLE}@127.0.0.1:{self.port}/{database}"

    def create(self, template: str = "template1") -> str:
        """A new database; returns its name."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.sql(f'create database {name} template "{template}"')
        return name

    def drop(self, database: str) -> None:
        self.sql(f"drop database if exists {database} with (force)")

    def sql(self, statement: str, database: str = "postgres") -> list[list[str]]:
        """Rows of one statement, by psql: an eye of its own, which shares no code with what is tested."""
        argv = ["psql", "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-h", str(self.folder), "-p", str(self.port)]
        done = self._run(*argv, "-U", ROLE, "-d", database, "-c", statement)
        return [line.split("|") for line in done.stdout.splitlines() if line]

    # ------------------------------------------------------------ running things

    def _as_owner(self, *argv: str) -> list[str]:
        """Ends with this process, even when that is killed; not as root."""
        account = _account() if os.geteuid() == 0 else None
        who = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"] if account else []
        return ["setpriv", *who, "--pdeathsig=QUIT", str(self._bin / argv[0]), *argv[1:]]

    def _run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.defpath, "LC_ALL": "C"}
        done = subprocess.run(self._as_owner(*argv), capture_output=True, text=True, cwd=self.folder, timeout=60, env=env)
        if done.returncode != 0:
            raise RuntimeError(f"{argv[0]} failed: {done.stderr.strip()}")
        return done


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server of one's own: for tests that freeze, restart or fill it. The others share the session's."""
    folder = Path(tempfile.mkdtemp(prefix="fluidpd-pg-"))  # not below pytest's folder: only its owner may enter that
    server = PostgresServer(folder)
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # a child that ended meanwhile


def _state(pid: int) -> str:
    """T: stopped. Empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class Migrated:
    """New databases at the newest schema: the first is migrated, the others are copies of it."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self._template = ""
        self._made: list[str] = []

    def new(self) -> str:
        """URL of a new one."""
        from controller.store.engine import migrate

        if not self._template:
            self._template = self.server.create()
            migrate(self.server.url(self._template))
        name = self.server.create(self._template)
        self._made.append(name)
        return self.server.url(name)

    def drop_all(self) -> None:
        """What one test made: connections that it left open are cut."""
        while self._made:
            self.server.drop(self._made.pop())
