"""`fluidpd token`, and secrets that somebody would rather type: what is printed, what is kept, what is refused."""

from __future__ import annotations

import json
import stat

import pytest


def test_a_token_is_printed_once_on_stdout_and_works_at_once(fluidpd, tmp_path):
    from controller.security.tokens import TokenBook

    file = tmp_path / "tokens.json"
    made = fluidpd("token", "create", "ana", "--scope", "operate", "--ttl", "90d", "--file", str(file))
    token = made.out.strip()
    assert made.code == 0 and token.startswith("fpd_") and token not in made.err
    found = TokenBook(file).find(token)
    assert found is not None and found.scopes == ("operate",) and found.expires_wall_s is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = fluidpd("token", "list", "--file", str(file))
    assert "ana" in listed.out and found.id in listed.out
    assert token not in listed.out and found.sha256 not in listed.out
    (row,) = json.loads(fluidpd("token", "list", "--file", str(file), "-o", "json").out)
    assert row["last_used_wall_s"] is None and row["expired"] is False
    assert fluidpd("token", "revoke", found.id, "--file", str(file)).code == 0
    assert fluidpd("token", "revoke", found.id, "--file", str(file)).code == 4


def test_the_settings_say_where_the_file_is_even_before_it_exists(fluidpd, tmp_path, monkeypatch):
    config = tmp_path / "fluidpd.yaml"
    config.write_text(f"security:\n  tokens_file: {tmp_path}/tokens.json\n")
    assert fluidpd("token", "create", "ana", "--scope", "read", "--config", str(config)).code == 0
    assert (tmp_path / "tokens.json").exists()
    assert fluidpd("token", "list").code == 78
    monkeypatch.setenv("FLUIDPD_SECURITY__TOKENS_FILE", str(tmp_path / "tokens.json"))
    assert "ana" in fluidpd("token", "list").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scope", "sidecar", "--scope", "read"), "stands alone"),
        (("--scope", "read", "--worker", "w1"), "scope sidecar"),
        (("--scope", "read", "--ttl", "soon"), "no duration"),
        (("--scope", "root"), "root"),
        ((), "scope"),
    ],
)
def test_a_token_that_makes_no_sense_is_refused_and_nothing_is_written(fluidpd, tmp_path, arguments, said):
    done = fluidpd("token", "create", "ana", *arguments, "--file", str(tmp_path / "tokens.json"))
    assert done.code == 2 and said in done.err
    assert not (tmp_path / "tokens.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--token", "x"),
        ("status", "--token=x"),
        ("controller", "--password", "x"),
        ("sidecar", "--fleet-secret", "x"),
        ("sidecar", "--admin-key=x"),
        ("pin", "w3", "-m", "use fpd_0123456789012345678901234567890123456789012"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_with_what_to_do(fluidpd, controller, arguments):
    done = fluidpd(*arguments)
    assert done.code == 2 and "FLUIDPD_TOKEN_FILE" in done.err and "fpd_0123" not in done.err
    assert controller.requests == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("controller", "--host", "0.0.0.0"), "tokens_file"),
        (("sidecar", "--worker", "w1", "--worker-url", "http://10.0.0.5:1", "--host", "0.0.0.0"), "fleet_secret_file"),
        (("dashboard", "--host", "0.0.0.0"), "a login over http"),
        (("dashboard", "--host", "::"), "a login over http"),
    ],
)
def test_no_part_listens_beyond_this_machine_without_proof_unless_somebody_insists(fluidpd, monkeypatch, command, said):
    refused = fluidpd(*command)
    assert refused.code == 78 and said in refused.err and "insecure_no_auth" in refused.err
    started = []
    for part in ("controller", "sidecar", "dashboard"):
        monkeypatch.setattr(f"cli.{part}.run", lambda serve, what, address: started.append((what, address)))
    assert fluidpd(*command, "--insecure-no-auth").code == 0
    assert [what for what, _ in started] == [command[0]]


@pytest.mark.parametrize("part", ["sidecar", "dashboard"])
def test_shown_settings_of_every_part_have_no_secret(fluidpd, monkeypatch, part):
    monkeypatch.setenv("FLUIDPD_SIDECAR__WORKER", "w1")
    monkeypatch.setenv("FLUIDPD_SIDECAR__WORKER_URL", "http://user:geheim@10.0.0.5:30000")
    monkeypatch.setenv("FLUIDPD_DASHBOARD__CONTROLLER_TOKEN", "geheim")
    monkeypatch.setenv("FLUIDPD_DASHBOARD__DATABASE_URL", "postgresql+asyncpg://fluidpd:geheim@db/fluidpd")
    shown = fluidpd("config", "show", "--part", part)
    assert shown.code == 0 and "geheim" not in shown.out and "***" in shown.out
