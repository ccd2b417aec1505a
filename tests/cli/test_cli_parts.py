"""Starting parts, settings and the database's schema: what goes wrong is one clear line and the right exit code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli.output import parse_span, span
from cli.serving import run
from cli.version import shadowed


def test_a_wrong_file_names_line_field_and_what_is_allowed(fluidpd, tmp_path):
    file = tmp_path / "fluidpd.yaml"
    file.write_text('server:\n  port: "10"\n')
    for command in (("config", "check", str(file)), ("controller", "--config", str(file))):
        done = fluidpd(*command)
        assert done.code == 78
        assert "line 2" in done.err and "server.port" in done.err and "65535" in done.err


def test_a_right_file_is_ok_and_shown_with_its_defaults(fluidpd, tmp_path):
    file = tmp_path / "fluidpd.yaml"
    file.write_text("policy:\n  persist_s: 2.5\n")
    assert fluidpd("config", "check", str(file)).code == 0
    shown = json.loads(fluidpd("config", "show", str(file)).out)
    assert shown["policy"]["persist_s"] == 2.5
    assert shown["server"]["port"] == 8070


def test_a_database_password_is_not_shown(fluidpd, monkeypatch):
    monkeypatch.setenv("FLUIDPD_DATABASE__URL", "postgresql+asyncpg://fluidpd:geheim@db/fluidpd")
    assert "geheim" not in fluidpd("config", "show").out


def test_a_missing_file_is_a_configuration_error(fluidpd):
    assert fluidpd("config", "check", "/nowhere/fluidpd.yaml").code == 78


def test_the_schema_is_a_schema(fluidpd):
    assert "properties" in json.loads(fluidpd("config", "schema").out)


def test_listening_beyond_loopback_without_tokens_does_not_start(fluidpd):
    done = fluidpd("controller", "--host", "0.0.0.0")
    assert done.code == 78
    assert "tokens_file" in done.err


def test_a_sidecar_without_a_worker_does_not_start(fluidpd):
    done = fluidpd("sidecar")
    assert done.code == 78
    assert "worker" in done.err


def test_the_schema_of_the_database_is_checked_and_upgraded(fluidpd, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUIDPD_DATABASE__URL", f"sqlite+aiosqlite:///{tmp_path}/f.db")
    assert fluidpd("db", "check").code == 69
    assert "would upgrade from nothing" in fluidpd("db", "upgrade", "--dry-run").out
    assert not (tmp_path / "f.db").exists()
    assert fluidpd("db", "upgrade").code == 0
    assert fluidpd("db", "upgrade").code == 0
    assert fluidpd("db", "check").code == 0
    assert fluidpd("db", "upgrade", "--dry-run").out == "nothing to do\n"


def test_a_busy_port_is_a_sentence(capsys):
    async def serve() -> None:
        raise OSError(errno.EADDRINUSE, "in use")

    with pytest.raises(typer.Exit) as stopped:
        run(serve, "controller", "127.0.0.1:8070")
    assert stopped.value.exit_code == 69
    assert "127.0.0.1:8070 is in use" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback():
    async def serve() -> None:
        raise KeyError("a defect")

    with pytest.raises(KeyError):
        run(serve, "controller", "127.0.0.1:8070")


def test_spans_are_read_and_said():
    assert [parse_span(text) for text in ("90", "90s", "30m", "1.5h", "1d")] == [90, 90, 1800, 5400, 86400]
    for text in ("", "0", "-5s", "ten", "5 minutes", "nan"):
        with pytest.raises(typer.BadParameter):
            parse_span(text)
    assert [span(value) for value in (0.04, 5.25, 1800, 7200.0, None)] == ["40 ms", "5.25 s", "30 min", "2 h", "-"]


def test_a_package_of_someone_else_is_noticed(tmp_path, monkeypatch):
    other = tmp_path / "config"
    other.mkdir()
    (other / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert [name for name, _ in shadowed(Path(__file__).resolve().parents[2])] == ["config"]


def test_help_needs_no_server_no_http_client_and_no_database(root):
    code = (
        "import sys; from typer.testing import CliRunner; from cli.main import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "print(sorted({'httpx', 'fastapi', 'sqlalchemy', 'pydantic', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
