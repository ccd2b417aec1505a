"""Settings: what is refused, with what words; what is accepted; and which source wins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from controller.settings import ConfigError, ControllerSettings, load_settings, redacted, schema
from fluidpd.names import Mode


def a_file(folder: Path, text: str) -> Path:
    path = folder / "fluidpd.yaml"
    path.write_text(text, encoding="utf-8")
    return path


REFUSED = {
    "a threshold above the one it must stay below": ("policy: {prefill_over: 0.8, prefill_stop: 0.9}", "prefill_stop"),
    "equal thresholds": ("policy: {decode_low: 0.95}", "decode_low"),
    "a zero threshold": ("policy: {prefill_high: 0}", "policy.prefill_high"),
    "a negative threshold": ("policy: {prefill_high: -1.2}", "policy.prefill_high"),
    "a threshold as text with a blank": ('policy: {prefill_high: "0.8 "}', "policy.prefill_high"),
    "a negative time": ("policy: {persist_s: -1}", "policy.persist_s"),
    "a time that is no number": ("policy: {persist_s: .nan}", "policy.persist_s"),
    "an infinite time": ("policy: {persist_s: .inf}", "policy.persist_s"),
    "a time as text": ('policy: {persist_s: "10"}', "policy.persist_s"),
    "an absurd residence": ("policy: {residence_s: 1.0e+9}", "policy.residence_s"),
    "yes for a number": ("server: {port: yes}", "server.port"),
    "a fraction for a whole number": ("policy: {min_prefill: 1.5}", "policy.min_prefill"),
    "a share of workers as text": ('policy: {max_concurrent: "10%"}', "policy.max_concurrent"),
    "a key that is misspelled": ("policy:\n  presist_s: 3", "did you mean persist_s?"),
    "a section that is misspelled": ("polic: {}", "did you mean policy?"),
    "a key that is set twice": ("server:\n  port: 1\n  port: 2", "set twice"),
    "a section that is a number": ("server: 3", "server"),
    "a list for a section": ("- server", "must be sections"),
    "text that is no YAML": ("server: [", "is not YAML"),
    "a mode that is none": ("mode: dry-run", "one of active, advisory"),
    "a database that is none of ours": ("database: {url: 'mysql://x'}", "postgresql+asyncpg"),
    "a database that forgets": ("database: {url: 'sqlite+aiosqlite://'}", "forgets everything"),
    "a router that is no address": ("router: {url: localhost}", "router.url"),
    "a router among the metadata": ("router: {url: 'http://169.254.169.254'}", "router.url"),
    "a network that is none": ("security: {allowed_workers: ['10.0.0.0/33']}", "security.allowed_workers"),
    "a certificate without its key": ("security: {tls_cert_file: c.crt}", "go together"),
    "a name with a blank": ("identity: {cluster: 'a b'}", "identity.cluster"),
    "a guard that eats the step": ("policy: {guard_s: 0.04}", "policy.guard_s"),
    "a margin that eats the step": ("policy: {tbt_margin_s: 0.04}", "policy.tbt_margin_s"),
    "a tokens file that is not there": ("security: {tokens_file: missing.json}", "security.tokens_file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused_as_a_whole_with_the_field_that_is_wrong(tmp_path: Path, name: str) -> None:
    text, named = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_settings(a_file(tmp_path, text))


def test_the_message_names_file_line_field_and_what_is_allowed(tmp_path: Path) -> None:
    path = a_file(tmp_path, "# a comment\nserver:\n  host: 127.0.0.1\n  port: 99999\npolicy:\n  persist_s: '1'\n")
    with pytest.raises(ConfigError) as refused:
        load_settings(path)
    port, persist = str(refused.value).splitlines()
    assert port.startswith(f"{path}, line 4: server.port: ") and "a whole number from 0 to 65535" in port
    assert persist.startswith(f"{path}, line 6: policy.persist_s: ") and "a number from 0 to 3600 (default 1.0)" in persist


def test_a_password_is_not_repeated_in_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(a_file(tmp_path, "database: {url: 'mysql://me:hunter2@db/x'}"))
    assert "hunter2" not in str(refused.value)


def test_a_file_that_is_missing_or_binary_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_settings(tmp_path / "binary.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n", "policy: {}\n"])
def test_nothing_said_means_the_documented_defaults(tmp_path: Path, text: str) -> None:
    assert load_settings(a_file(tmp_path, text)) == ControllerSettings() == load_settings()
    assert (load_settings().server.port, load_settings().policy.persist_s, load_settings().mode) == (8070, 1.0, Mode.ACTIVE)


def test_a_partial_section_inherits_the_rest(tmp_path: Path) -> None:
    settings = load_settings(a_file(tmp_path, "policy: {decode_high: 0.97}\nslo: {ttft_s: 1}\n"))
    assert (settings.policy.decode_high, settings.policy.decode_low, settings.slo.ttft_s, settings.slo.tbt_s) == (
        0.97,
        0.85,
        1.0,
        0.04,
    )


def test_a_flag_outranks_the_environment_which_outranks_the_file(tmp_path: Path) -> None:
    path = a_file(tmp_path, "server: {port: 1, host: localhost}\npolicy: {persist_s: 5}\nmode: advisory\n")
    env = {"FLUIDPD_SERVER__PORT": "2", "FLUIDPD_POLICY__PERSIST_S": "2.5", "FLUIDPD_POLICY__BORROW": "false"}
    settings = load_settings(path, env, {"server": {"port": 3}})
    assert (settings.server.port, settings.server.host, settings.policy.persist_s) == (3, "localhost", 2.5)
    assert (settings.policy.borrow, settings.mode) == (False, Mode.ADVISORY)
    assert load_settings(None, {"FLUIDPD_MODE": "advisory"}).mode is Mode.ADVISORY


def test_a_value_may_stand_in_a_file_that_the_environment_names(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("postgresql+asyncpg://fluidpd:s3cret@db/fluidpd\n")
    settings = load_settings(None, {"FLUIDPD_DATABASE__URL_FILE": str(tmp_path / "url")})
    assert settings.database.url.endswith("@db/fluidpd")
    assert "s3cret" not in json.dumps(redacted(settings))
    with pytest.raises(ConfigError, match="FLUIDPD_DATABASE__URL_FILE: cannot read"):
        load_settings(None, {"FLUIDPD_DATABASE__URL_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FLUIDPD_POLICI__PERSIST_S", "1", "did you mean policy?"),
        ("FLUIDPD_POLICY__PERSIST", "1", "did you mean persist_s?"),
        ("FLUIDPD_POLICY__PERSIST_S", "soon", "environment FLUIDPD_POLICY__PERSIST_S: policy.persist_s"),
        ("FLUIDPD_SERVER__PORT", "yes", "server.port"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_settings(None, {name: value})


def test_variables_of_other_processes_and_of_the_client_are_left_alone() -> None:
    env = {
        "FLUIDPD_SIDECAR__NAME": "w1",
        "FLUIDPD_DASHBOARD__PORT": "1",
        "FLUIDPD_TOKEN": "x",
        "FLUIDPD_FAILPOINT": "y",
        "PATH": "z",
    }
    assert load_settings(None, env) == ControllerSettings()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fleet.example"])
def test_a_server_that_others_can_reach_wants_tokens(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.tokens_file"):
        load_settings(None, {}, {"server": {"host": host}})
    with pytest.raises(ConfigError, match="insecure_no_auth"):
        load_settings(None, {"FLUIDPD_SERVER__HOST": host})
    assert load_settings(None, {}, {"server": {"host": host}, "security": {"insecure_no_auth": True}}).is_open
    (tmp_path / "tokens.json").write_text("[1]")
    found = load_settings(None, {}, {"server": {"host": host}, "security": {"tokens_file": str(tmp_path / "tokens.json")}})
    assert not found.is_loopback and not found.is_open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_tokens(host: str) -> None:
    assert load_settings(None, {}, {"server": {"host": host}}).is_loopback


def test_the_example_and_the_committed_schema_are_those_of_this_version(root: Path) -> None:
    assert load_settings(root / "config" / "fluidpd.example.yaml") == ControllerSettings()
    committed = json.loads((root / "config" / "schema.json").read_text())
    assert committed == schema(), "run `fluidpd config schema > config/schema.json`"
