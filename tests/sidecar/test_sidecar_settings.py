"""Settings: where they come from, which outranks which, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sidecar.settings import ConfigError, SidecarSettings, load_settings

LEAST = {"worker": "w1", "worker_url": "http://127.0.0.1:30000"}


def test_a_file_is_outranked_by_the_environment_and_that_by_overrides(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("worker: a\nworker_url: http://127.0.0.1:1\nsample_hz: 10\nlimits: {verify_s: 3}\nnode: n1\n")
    environ = {
        "FLUIDPD_SIDECAR__WORKER": "b",
        "FLUIDPD_SIDECAR__SAMPLE_HZ": "5",
        "FLUIDPD_SIDECAR__LIMITS__SWITCH_S": "7",
        "HOME": "/root",
    }
    s = load_settings(file, {"worker": "c", "port": None}, environ)
    assert (s.worker, s.sample_hz, s.node, s.limits.verify_s, s.limits.switch_s, s.port) == ("c", 5.0, "n1", 3.0, 7.0, 0)


def test_defaults_listen_on_this_machine_only() -> None:
    s = load_settings(None, LEAST, {})
    assert s.host == "127.0.0.1" and s.controller_url == "ws://127.0.0.1:8070/link" and s.handoff_share == 0.4


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"presist": 1}, "presist: no such setting"),
    ({"worker": "a b"}, "worker"),
    ({"worker_url": "127.0.0.1:30000"}, "must be an address like http"),
    ({"worker_url": "http://"}, "must be an address like http"),
    ({"worker_url": "http://169.254.169.254"}, "link-local"),
    ({"sidecar_url": "http://2130706433:8090"}, "no plain host name"),
    ({"allowed_peers": ["10.0.0.0/33"]}, "neither a network"),
    ({"tls_cert_file": "w1.crt"}, "go together"),
    ({"controller_url": "http://x"}, "WebSocket address"),
    ({"sample_hz": "nan"}, "sample_hz"),
    ({"handoff_share": 1.5}, "handoff_share"),
    ({"limits.verify_s": -1}, "limits.verify_s"),
    ({"host": "0.0.0.0"}, "set fleet_secret_file, or listen on 127.0.0.1"),
    ({"port": 70000}, "port"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(None, LEAST | wrong, {})


def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("worker: [")
    listed = tmp_path / "list.yaml"
    listed.write_text("- worker\n")
    for path, said in ((tmp_path / "none.yaml", "cannot be read"), (bad, "not YAML"), (listed, "must be a mapping")):
        with pytest.raises(ConfigError, match=said):
            load_settings(path, None, {})


def test_a_secret_is_read_from_its_file_and_never_kept_in_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    s = SidecarSettings.model_validate(LEAST | {"fleet_secret_file": file})
    with pytest.raises(ConfigError, match="cannot be read"):
        s.secret()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        s.secret()
    file.write_text("s3cret\n")
    assert s.secret() == "s3cret" and "s3cret" not in repr(s) + s.model_dump_json()


@pytest.mark.parametrize(
    ("url", "bootstrap"), [("http://w1:30000", "w1:9"), ("http://10.0.0.2", "10.0.0.2:9"), ("http://[::1]:8", "[::1]:9")]
)
def test_the_bootstrap_address_is_the_workers_host(url: str, bootstrap: str) -> None:
    s = SidecarSettings.model_validate(LEAST | {"worker_url": url, "bootstrap_port": 9})
    assert s.bootstrap == bootstrap
