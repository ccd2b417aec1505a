"""POST /pd_role_switch: SGLang's own answers, and the gate that holds early requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from emulator_fleet import fleet, fleet_with_sidecars, until

from fluidpd.names import Role
from sidecar.emulator.settings import SwitchTimes
from sidecar.emulator.text import expected_text

QUICK = SwitchTimes(to_decode=(0.02, 0.03), to_prefill=(0.01, 0.02))


@pytest.mark.parametrize(
    ("role", "body", "status", "success", "safe", "says"),
    [
        ("decode", {"new_role": "prefill"}, 200, True, False, "ok"),
        ("decode", {"new_role": "prefill", "prepare_only": True}, 200, True, True, "ready"),
        ("prefill", {"new_role": "decode", "decode_cuda_graph_memory_gb": 0}, 200, True, False, "ok"),
        ("prefill", {"new_role": "decode"}, 400, False, True, "decode_cuda_graph_memory_gb is required"),
        ("prefill", {"new_role": "decode", "decode_cuda_graph_memory_gb": -1}, 400, False, True, "non-negative"),
        ("prefill", {"new_role": "decode", "decode_cuda_graph_memory_gb": 999}, 400, False, True, "insufficient"),
        ("decode", {"new_role": "decode"}, 200, True, False, "ok"),
        ("decode", {"new_role": "decode", "prepare_only": True}, 200, True, False, "ready"),
        ("decode", {}, 400, False, True, "invalid new_role=''"),
    ],
)
async def test_the_switch_answers_as_sglang_does(
    role: str, body: dict[str, object], status: int, success: bool, safe: bool, says: str
) -> None:
    async with fleet({"w": role}, switch_s=QUICK) as f:
        response = await f.post("w", "/pd_role_switch", body)
        said = response.json()
        assert response.status_code == status and said["success"] is success and said["safe_to_restore"] is safe
        fields = {"rid", "http_worker_ipc", "success", "message", "old_role", "new_role", "safe_to_restore"}
        assert says in said["message"] and set(said) == fields
        switched = success and says == "ok" and body["new_role"] != role
        assert f.worker("w").role == (Role(role).other if switched else Role(role))


async def test_an_unknown_role_and_a_wrong_type_are_refused_with_400() -> None:
    async with fleet({"w": "decode"}) as f:
        assert (await f.post("w", "/pd_role_switch", {"new_role": "both"})).status_code == 400
        assert (await f.post("w", "/pd_role_switch", {"new_role": "prefill", "prepare_only": [1]})).status_code == 400


async def test_a_busy_worker_refuses_and_its_stream_goes_on() -> None:
    async with fleet({"p": "prefill", "d": "decode"}) as f:
        task = asyncio.create_task(f.both("p", "d", "busy", 20))
        await until(lambda: f.worker("d").engine.model.running)
        response = await f.post("d", "/pd_role_switch", {"new_role": "prefill"})
        assert (
            response.status_code == 400
            and response.json()["safe_to_restore"] is True
            and "not idle" in response.json()["message"]
        )
        _, said = await task
        assert said.text == expected_text("busy", 20)


async def test_both_workers_swap_their_roles_and_serve_swapped_and_a_second_flip_needs_no_graphs() -> None:
    async with fleet({"a": "prefill", "b": "decode"}, switch_s=QUICK) as f:
        for new in (("decode", "prefill"), ("prefill", "decode"), ("decode", "prefill")):
            for name, role in zip("ab", new, strict=True):
                graph = {"decode_cuda_graph_memory_gb": 0} if f.worker(name).switch.switches == 0 else {}
                assert (await f.post(name, "/pd_role_switch", {"new_role": role, **graph})).status_code == 200
            prefill, decode = ("b", "a") if new[0] == "decode" else ("a", "b")
            _, said = await f.both(prefill, decode, "swapped", 4)
            assert said.text == expected_text("swapped", 4)


@pytest.mark.parametrize(
    ("fault", "status", "safe", "role_after", "healthy"),
    [
        ("busy", 400, True, "decode", 200),
        ("backend", 400, True, "decode", 200),
        ("graph_memory", 400, True, "decode", 200),
        ("dead", 400, False, "decode", 503),
        ("ok_but_nothing", 200, False, "decode", 200),
    ],
)
async def test_injected_faults_answer_as_they_would(fault: str, status: int, safe: bool, role_after: str, healthy: int) -> None:
    async with fleet({"w": "decode"}, switch_s=QUICK) as f:
        await f.post("w", "/emulator/fault", {"what": fault, "times": 1})
        response = await f.post("w", "/pd_role_switch", {"new_role": "prefill"})
        assert response.status_code == status and response.json()["safe_to_restore"] is safe
        assert f.worker("w").role == role_after
        assert (await f.client.get(f.url("w") + "/health")).status_code == healthy
        again = await f.post("w", "/pd_role_switch", {"new_role": "prefill"})
        assert (again.status_code == 200) is (healthy == 200)


async def test_a_switch_may_happen_and_never_be_answered() -> None:
    async with fleet({"w": "decode"}, switch_s=QUICK) as f:
        await f.post("w", "/emulator/fault", {"what": "timeout_then_done", "times": 1})
        asked = asyncio.create_task(f.post("w", "/pd_role_switch", {"new_role": "prefill"}))
        await until(lambda: f.worker("w").role is Role.PREFILL)
        await asyncio.sleep(0.05)
        assert not asked.done()
        asked.cancel()


async def test_faults_are_off_unless_allowed() -> None:
    async with fleet({"w": "decode"}, faults_allowed=False) as f:
        assert (await f.post("w", "/emulator/fault", {"what": "busy", "times": 1})).status_code == 403


async def test_early_requests_of_the_new_role_are_held_until_the_gate_opens(tmp_path: Path) -> None:
    roles = {"p": "prefill", "d": "decode", "x": "decode"}
    async with fleet_with_sidecars(roles, tmp_path, switch_s=QUICK) as (f, tiny):
        side = tiny.sidecars["x"]
        assert (await side.order("drain", role="decode"))["ok"]
        assert (await side.order("hold", role="prefill"))["ok"]
        body = {"text": "early bird", "sampling_params": {"max_new_tokens": 3}, "stream": True, **f.pair("x")}
        halves = [asyncio.create_task(f.ask(n, body)) for n in ("x", "d")]
        await until(lambda: f.worker("x").gate.held == 1)
        late = await f.post("x", "/generate", {**body, **f.pair("p")})
        assert late.status_code == 503  # a request of the old role: the router asks another worker
        remapped = await side.order("remap", role="prefill")
        assert remapped["ok"] and remapped["numbers"]["moves"] > 0
        assert (await f.post("x", "/pd_role_switch", {"new_role": "prefill"})).status_code == 200
        probe = await f.post(
            "x", "/generate", {"text": "probe", "sampling_params": {"max_new_tokens": 1}}, headers={"X-FluidPD-Probe": "1"}
        )
        assert probe.status_code == 200 and f.worker("x").gate.held == 1
        opened = await side.order("open_gate", role="prefill")
        assert opened["numbers"]["admitted"] == 1
        _, said = await asyncio.gather(*halves)
        assert said.text == expected_text("early bird", 3)


async def test_held_requests_are_refused_when_the_move_goes_home(tmp_path: Path) -> None:
    async with fleet_with_sidecars({"x": "decode", "p": "prefill"}, tmp_path) as (f, tiny):
        side = tiny.sidecars["x"]
        await side.order("drain", role="decode")
        await side.order("hold", role="prefill")
        held = asyncio.create_task(f.ask("x", {"text": "a", "sampling_params": {"max_new_tokens": 3}, **f.pair("x")}))
        leaver = asyncio.create_task(f.ask("x", {"text": "a", "sampling_params": {"max_new_tokens": 3}, **f.pair("x")}))
        await until(lambda: f.worker("x").gate.held == 2)
        leaver.cancel()
        await until(lambda: f.worker("x").gate.held == 1)
        await side.order("drop_held")
        assert (await held).status == 503
        await side.order("undrain")
        _, said = await f.both("p", "x", "home again", 3)
        assert said.text == expected_text("home again", 3)


async def test_probes_of_either_role_pass_while_draining_and_count_nowhere(tmp_path: Path) -> None:
    async with fleet_with_sidecars({"p": "prefill", "d": "decode"}, tmp_path) as (f, tiny):
        for name in ("p", "d"):
            await tiny.sidecars[name].order("drain")
            body = {"text": "probe", "sampling_params": {"max_new_tokens": 1}}
            response = await f.post(name, "/generate", body, headers={"X-FluidPD-Probe": "1"})
            assert response.status_code == 200 and response.json()["text"] == expected_text("probe", 1)
            assert response.json()["meta_info"]["completion_tokens"] == 1
            worker = f.worker(name)
            await until(lambda w=worker: w.engine.model.idle and w.engine.model.kv_committed == 0)
            assert worker.tally.requests_total == 0 and worker.engine.model.borrow_rate is None
