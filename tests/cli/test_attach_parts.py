"""The settings that `fluidpd attach` writes for its parts: the person's, with what only this fleet can say, and no secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from cli.attach_parts import Parts
from cli.attach_plan import Asked, CannotAttach, Found, NotUnderstood
from fluidpd.names import Role

ROUTER = "http://r:8000"
FOUND = (
    Found(
        Asked("p1", "http://h:1", socket=Path("/run/p1.sock"), admin_key_file=Path("/etc/key")), Role.PREFILL, bootstrap_port=7
    ),
    Found(Asked("d1", "http://h:2"), Role.DECODE),
)


@pytest.fixture
def parts(tmp_path):
    made = Parts(ROUTER, FOUND, tmp_path / "s", active=False, controller_port=8070)
    yield made
    made.stop()


def written(parts: Parts, name: str) -> dict:
    return yaml.safe_load((parts.folder / "etc" / f"{name}.yaml").read_text())


def config(tmp_path: Path, text: str) -> Path:
    (tmp_path / "c.yaml").write_text(text)
    return tmp_path / "c.yaml"


def test_without_settings_it_is_advisory_and_keeps_all_in_its_own_folder(parts):
    parts.configure(None, None)
    made = written(parts, "controller")
    assert (made["mode"], made["router"]["url"]) == ("advisory", ROUTER)
    assert made["database"]["url"] == f"sqlite+aiosqlite:///{parts.folder}/fluidpd.db"
    p1, d1 = written(parts, "sidecar-p1"), written(parts, "sidecar-d1")
    assert (p1["worker_url"], p1["bootstrap_port"], p1["plugin_socket"], p1["admin_key_file"]) == (
        "http://h:1",
        7,
        "/run/p1.sock",
        "/etc/key",
    )
    assert "bootstrap_port" not in d1 and d1["plugin_socket"] == str(parts.folder / "d1.sock")
    assert p1["controller_url"] == "ws://127.0.0.1:8070/link" and p1["port"] != d1["port"]


def test_targets_and_names_of_the_settings_reach_the_sidecars_too(parts, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("geheim\n")
    text = "mode: active\nslo:\n  ttft_s: 3.5\nidentity:\n  cluster: c\n  model: m\npolicy:\n  flip: false\n"
    parts.configure(config(tmp_path, text), secret)
    made, sidecar = written(parts, "controller"), written(parts, "sidecar-d1")
    assert made["mode"] == "advisory"  # only --active makes it so
    assert made["policy"] == {"flip": False} and made["security"]["fleet_secret_file"] == str(secret)
    assert sidecar["slo"]["ttft_s"] == 3.5 and sidecar["model"] == "m" and "cluster" not in sidecar
    assert sidecar["fleet_secret_file"] == str(secret)
    files = list((parts.folder / "etc").iterdir())
    assert not any("geheim" in file.read_text() for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_with_tokens_the_sidecars_share_a_secret_that_was_made_for_them(parts, tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[]")
    parts.configure(config(tmp_path, f"security:\n  tokens_file: {tokens}\n"), None)
    named = written(parts, "controller")["security"]["fleet_secret_file"]
    assert written(parts, "sidecar-d1")["fleet_secret_file"] == named
    assert len(Path(named).read_text().strip()) >= 43 and stat.S_IMODE(Path(named).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("policy:\n  flipp: true\n", "flipp"),
        ("router:\n  url: http://other:1\n", "which one is it"),
        ("database: x\n", "database must be a section"),
        ("- a list\n", "must be a mapping"),
        ("server:\n  host: 0.0.0.0\n", "tokens_file"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_settings_that_cannot_be_used_are_said_before_anything_starts(parts, tmp_path, text, said):
    with pytest.raises(NotUnderstood, match=said):
        parts.configure(config(tmp_path, text), None)
    assert parts.children == {}


def test_settings_that_are_not_there_are_said_by_name(parts):
    with pytest.raises(NotUnderstood, match=r"/nowhere/c\.yaml cannot be read"):
        parts.configure(Path("/nowhere/c.yaml"), None)


def test_a_folder_belongs_to_one_attach_at_a_time(parts):
    with pytest.raises(CannotAttach, match="in use by another"):
        Parts(ROUTER, FOUND, parts.folder, active=False, controller_port=0)
    parts.stop()
    Parts(ROUTER, FOUND, parts.folder, active=False, controller_port=0).stop()
