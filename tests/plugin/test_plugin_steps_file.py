"""What a worker learned of its step times outlives its engine, as far as it still applies, and never harms one."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_plugin_steps import gpu, taught

from sidecar.plugin import entry as plugin
from sidecar.plugin.chunks import ChunkRule
from sidecar.plugin.engine import Engine
from sidecar.plugin.scheduler import SchedulerPart
from sidecar.plugin.settings import PluginSettings
from sidecar.plugin.steps import GUARD_FLOOR_S, KEPT_STEPS, Shape, StepModel
from sidecar.plugin.steps_file import StepsFile

MADE_BY = {"engine_version": "0.5.23", "model_path": "m", "tp_size": "2", "device": "H100", "fused": "True"}
FUSED = Shape(256, 1000, 16, 16000)
PLAIN = Shape(0, 0, 16, 16000)


def kept(path: Path, model: StepModel | None = None, **made_by: str) -> StepsFile:
    return StepsFile(path / "w1.steps.json", model or StepModel(), {**MADE_BY, **made_by})


def saved(path: Path, model: StepModel | None = None) -> StepModel:
    model = model or taught(gpu, fused=True)
    assert kept(path, model).save()
    return model


def test_a_restarted_engine_predicts_what_the_one_before_it_did_in_both_regimes(tmp_path: Path) -> None:
    before, after = saved(tmp_path), StepModel()
    assert kept(tmp_path, after).load()
    for shape in (FUSED, PLAIN):
        assert after.predict_s(shape) == before.predict_s(shape) is not None
    assert after.lent.guard_s() == before.lent.guard_s() >= GUARD_FLOOR_S
    assert after.lent.residual_p995_s() == before.lent.residual_p995_s()
    assert after.lent.largest_c == before.lent.largest_c


def test_a_chunk_rule_that_was_made_before_the_file_was_read_decides_by_it(tmp_path: Path) -> None:
    saved(tmp_path)
    model = StepModel()
    rule = ChunkRule(model, fused=True)
    kept(tmp_path, model).load()
    assert rule.step_s(256, 1000, 16, 16000) == model.predict_s(FUSED) is not None


def test_what_was_learned_before_yields_soon_to_what_is_measured_now(tmp_path: Path) -> None:
    saved(tmp_path)
    after = StepModel()
    kept(tmp_path, after).load()
    assert after.decode.steps == after.lent.steps == KEPT_STEPS  # below what counts as well known: each step is a lesson again
    stale = after.predict_s(PLAIN)
    for _ in range(400):
        after.learn(PLAIN, 2 * gpu(PLAIN))
    now = after.predict_s(PLAIN)
    assert stale is not None and now is not None and now == pytest.approx(2 * gpu(PLAIN), rel=0.15)


@pytest.mark.parametrize(
    "other", [{"engine_version": "0.5.24"}, {"model_path": "n"}, {"tp_size": "4"}, {"device": "H200"}, {"fused": "False"}]
)
def test_another_version_model_size_device_or_way_of_lending_begins_anew(
    tmp_path: Path, other: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    model = StepModel()
    with caplog.at_level(logging.INFO):
        assert not kept(tmp_path, model, **other).load()
    assert model.predict_s(PLAIN) is None and model.lent.guard_s() == GUARD_FLOOR_S
    assert next(iter(other)) in caplog.text and "anew" in caplog.text


def damaged(found: dict[str, Any], how: str) -> str:
    match how:
        case "torn":
            return json.dumps(found)[:-40]
        case "empty":
            return ""
        case "another format":
            return json.dumps(found | {"format": 2})
        case "no object":
            return "[1]"
        case "a regime less":
            del found["lent"]
        case "a short row":
            found["lent"]["a"][2] = [1.0]
        case "text for a number":
            found["lent"]["x"][0] = "0.1"
        case "no number":
            return json.dumps(found).replace('"usual_error": ', '"usual_error": NaN, "was": ', 1)
        case "a negative time":
            found["decode"]["x"][0] = -1.0
    return json.dumps(found)


@pytest.mark.parametrize(
    "how",
    [
        "torn",
        "empty",
        "another format",
        "no object",
        "a regime less",
        "a short row",
        "text for a number",
        "no number",
        "a negative time",
    ],
)
def test_a_damaged_file_is_named_left_aside_and_overwritten(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    file = tmp_path / "w1.steps.json"
    file.write_text(damaged(json.loads(file.read_text()), how))
    model = StepModel()
    assert not kept(tmp_path, model).load()
    assert str(file) in caplog.text and "anew" in caplog.text
    assert model.decode.steps == model.lent.steps == 0, "both or none"
    saved(tmp_path)
    assert kept(tmp_path).load()


def test_no_file_is_no_trouble_and_nothing_learned_is_nothing_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = kept(tmp_path)
    assert not file.load() and not file.save()
    assert caplog.text == "" and list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_and_only_when_something_was_learned(tmp_path: Path) -> None:
    model = taught(gpu, fused=True)
    file = kept(tmp_path, model)
    assert file.save() and not file.save()
    model.learn(PLAIN, gpu(PLAIN))
    assert file.save()
    assert [path.name for path in tmp_path.iterdir()] == ["w1.steps.json"]


def test_a_folder_that_cannot_be_written_is_said_once_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = taught(gpu, fused=True)
    file = StepsFile(tmp_path / "gone" / "w1.steps.json", model, MADE_BY)
    assert not file.save() and not file.save()
    assert caplog.text.count("cannot be kept") == 1


def test_a_state_is_never_read_in_the_middle_of_a_step() -> None:
    model = StepModel()
    for _ in range(20):
        model.learn(PLAIN, gpu(PLAIN))
    fit = model.decode
    within: list[object] = []
    take = fit._take

    def looked_at(*asked: Any) -> None:
        take(*asked)
        within.append(fit.state())

    fit._take = looked_at  # type: ignore[method-assign]
    model.learn(PLAIN, gpu(PLAIN))
    assert within == [None] and fit.state() is not None


def test_a_model_that_is_learning_all_the_time_is_kept_by_another_thread(tmp_path: Path) -> None:
    model = taught(gpu, fused=True, steps=20)
    stop = threading.Event()

    def learn() -> None:
        while not stop.is_set():
            model.learn(FUSED, gpu(FUSED))
            stop.wait(0.0005)

    learning = threading.Thread(target=learn)
    learning.start()
    try:
        assert all(kept(tmp_path, model).save() for _ in range(5))
    finally:
        stop.set()
        learning.join()
    assert kept(tmp_path).load()


def test_the_file_stands_beside_the_socket_unless_a_folder_is_named() -> None:
    settings = PluginSettings.of({"FLUIDPD_PLUGIN_SOCKET": "/run/fluidpd/w1.sock"})
    assert StepsFile.path_of(settings) == Path("/run/fluidpd/w1.steps.json")
    settings = PluginSettings.of({"FLUIDPD_PLUGIN_SOCKET": "/run/fluidpd/w1.sock", "FLUIDPD_PLUGIN_STATE": "/var/lib/fluidpd"})
    assert StepsFile.path_of(settings) == Path("/var/lib/fluidpd/w1.steps.json")


def test_an_engine_that_cannot_be_described_keeps_nothing_and_one_without_a_socket_looks_for_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody_knows() -> dict[str, str]:
        raise RuntimeError("no device")

    part = SchedulerPart.__new__(SchedulerPart)
    part.link, part.version = SimpleNamespace(), "0.5.23"  # type: ignore[assignment]
    part.engine = SimpleNamespace(described=nobody_knows)  # type: ignore[assignment]
    monkeypatch.setattr(plugin, "SETTINGS", PluginSettings(socket_path="/run/fluidpd/w1.sock"))
    assert part._steps_file() is None and "no device" in caplog.text
    monkeypatch.setattr(plugin, "SETTINGS", PluginSettings())
    assert part._steps_file() is None


def test_an_engine_is_described_by_all_that_its_step_times_depend_on() -> None:
    engine = Engine.__new__(Engine)
    args = SimpleNamespace(model_path="meta/llama", tp_size=2, dtype="auto", quantization=None, kv_cache_dtype="fp8_e5m2")
    engine.scheduler = SimpleNamespace(server_args=args, device="cpu")
    described = engine.described()
    assert described["model_path"] == "meta/llama" and described["tp_size"] == "2" and "CPUs" in described["device"]
    assert described["attention_backend"] == "" and json.loads(json.dumps(described)) == described
