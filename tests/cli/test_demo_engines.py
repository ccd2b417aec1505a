"""The demo's two kinds of engines: what is said of each, how its answers are judged, and what its machine can carry."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from cli.demo_emulated import EmulatedStage
from cli.demo_run import Run, judge_named, weighed
from cli.demo_sglang import SglangStage, _candidate
from cli.sglang_cpu.environment import NoEnvironment, environment, recipe_hash, where, write_plugin_folder
from cli.sglang_cpu.measure import KEY, CpuTimes
from cli.sglang_cpu.workers import split_for_memory
from cli.speech import EmulatedSpeech, Heard, SglangSpeech
from fluidpd.cost import parse_cost_table
from fluidpd.simulator.report import summarize
from fluidpd.simulator.workload import Request, Workload, shortened
from fluidpd.slo import SloTargets
from sidecar.emulator.text import expected_text

WORKLOAD = Workload("w", (Request(0.0, 100, 4), Request(1.0, 5000, 4)), generated=True)


@pytest.fixture
def sglang(monkeypatch) -> SglangStage:
    monkeypatch.setenv("FLUIDPD_DATA", "/nowhere")
    return SglangStage(SimpleNamespace(), "azure2023_code", 0.5, 1.0, 0, 2)


def run(name: str, **engine) -> Run:
    return Run(name, summarize(name, [], SloTargets()), 0.0, 1.0, [], engine)


# ---------------------------------------------------------------- names


def test_neither_engine_is_ever_shown_under_the_other_ones_name(sglang):
    emulated = EmulatedStage(WORKLOAD, 0, 4)
    late = {"lateness_s": {"p99": 0.001}, "lent_gap_p99_s": 0.03, "chunk_sizes": {"64": 2}, "valid": True}
    claims = {"claims": {"asked": 3, "won": 2}, "lent_steps": 9, "late_steps": 0, "floor_steps": 0, "hook_errors": 0}
    of_emulated = [emulated.label, emulated.intro, emulated.closing(), *emulated.remarks(run("static", **late))]
    more = {"handoffs": 1, "answers_compared": 5}
    of_sglang = [sglang.label, sglang.intro, sglang.closing(), *sglang.remarks(run("thresholds", **claims, **more))]
    assert not any("sglang" in said.lower() for said in of_emulated)
    assert not any("emulat" in said.lower() or "h100" in said.lower() for said in of_sglang)
    assert (emulated.label, sglang.label) == ("emulated", "sglang-cpu")


def test_a_cpus_times_are_called_that(sglang):
    assert "not to be compared" in sglang.closing()
    assert "prompts x0.9" in " ".join(sglang.workload.notes) and sglang.workload.generated


def test_a_burst_that_prefill_cannot_do_in_time_comes_first_and_then_a_load_that_it_can(sglang):
    cost = parse_cost_table(json.dumps(CpuTimes({128: 0.02, 4096: 1.6}, 0.01).table(32768)), KEY)
    burst, rest = sglang._burst(cost), sglang._fitting(cost)
    work_s = [cost.prefill_s(r.prompt_tokens) for r in burst.requests]
    assert sum(work_s) >= 2 * 6.0 > sum(work_s[:-1])  # six seconds for each of two prefill workers
    assert burst.duration_s <= 3.0 and f"its first {len(work_s)} requests" in burst.notes
    share = sum(cost.prefill_s(r.prompt_tokens) for r in rest.requests) / 2 / 30
    assert 0.2 < share < 0.4


# ---------------------------------------------------------------- answers


def test_an_emulated_answer_is_whole_only_if_every_token_is_the_right_one():
    speech = EmulatedSpeech()
    prompt = speech.prompt("t", 3, 5)
    assert len(prompt.split()) == 5
    words = expected_text(prompt, 2)
    heard = Heard()
    chunk = {"text": words, "meta_info": {"emulator": {"t_s": 2.0, "arrived_s": 1.5}}}
    assert speech.hear(chunk, 9.0, heard) == (1, 2.0)
    assert speech.judge(3, prompt, 2, heard) == (False, False)  # the end has not come
    heard.ended = True
    assert speech.judge(3, prompt, 2, heard) == (True, False)
    heard.texts.append("wrong")
    assert speech.judge(3, prompt, 2, heard) == (False, True)


def told(*ids: int, of: int = 0) -> dict:
    return {"text": "", "output_ids": list(ids), "meta_info": {"completion_tokens": of + len(ids)}}


def answer(speech: SglangSpeech, *ids: int) -> Heard:
    heard = Heard(ended=True)
    speech.hear(told(*ids), 1.0, heard)
    return heard


def test_a_digit_is_a_token_and_a_number_always_gets_the_same_prompt():
    speech = SglangSpeech()
    assert len(speech.prompt("static-0", 7, 300)) == 300
    assert speech.prompt("static-0", 7, 300) == speech.prompt("thresholds-1", 7, 300) != speech.prompt("static-0", 8, 300)


def test_tokens_that_come_together_are_counted_and_timed_together():
    speech, heard = SglangSpeech(), Heard()
    assert speech.hear(told(5), 1.0, heard) == (1, 1.0)
    assert speech.hear(told(6, 7, of=1), 2.0, heard) == (2, 2.0)
    assert speech.hear({"text": "", "output_ids": [], "meta_info": {"completion_tokens": 3}}, 3.0, heard) == (0, 3.0)
    assert heard.ids == [5, 6, 7]


def test_a_real_answer_is_held_against_the_first_one_to_the_same_prompt():
    speech = SglangSpeech()
    assert speech.judge(0, "1", 2, answer(speech, 5)) == (False, False)  # lost: it teaches nothing
    assert speech.judge(0, "1", 2, answer(speech, 5, 6)) == (True, False)
    assert speech.compared == 0
    assert speech.judge(0, "1", 2, answer(speech, 5, 6)) == (True, False)
    assert speech.judge(0, "1", 2, answer(speech, 5, 9)) == (False, True)
    assert speech.judge(0, "1", 2, answer(speech, 5)) == (False, False)  # cut short, not wrong
    assert speech.compared == 3


# ---------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("asked", "free_gib", "split", "fits"),
    [
        ((None, None), 22.0, (2, 2), True),
        ((None, None), 7.9, (1, 2), True),
        ((None, None), 5.0, (2, 2), False),
        ((2, None), 7.0, (2, 2), False),
        ((1, 1), 4.5, (1, 1), True),
    ],
)
def test_as_many_workers_are_started_as_there_is_memory_for(asked, free_gib, split, fits):
    made = split_for_memory(*asked, free_gib)
    assert ((made.prefill, made.decode), made.fits) == (split, fits)
    is_less = not fits or (made.prefill == 1 and asked[0] is None)
    assert f"{free_gib:.1f} GiB" in made.why and ("not enough" in made.why) == is_less


def test_measured_times_become_a_cost_table_that_only_grows():
    times = CpuTimes({128: 0.05, 512: 0.2, 1024: 0.15, 2048: 0.9}, 0.02)
    cost = parse_cost_table(json.dumps(times.table(4096)), KEY)
    assert cost.decode_s(1, 100) == pytest.approx(0.02)
    assert cost.prefill_s(512) == pytest.approx(0.2) == cost.prefill_s(1024)
    assert cost.prefill_s(2048) == pytest.approx(0.9)
    assert cost.kv_capacity_tokens == 4096


def test_prompts_are_shortened_and_that_is_written_down():
    made = shortened(WORKLOAD, 0.5, 2000)
    assert [r.prompt_tokens for r in made.requests] == [50, 2000]
    assert made.notes == ("prompts x0.5, at most 2000 tokens",)


def test_a_flip_back_takes_home_a_worker_that_began_as_decode():
    def row(name: str, role: str, state: str = "serving", flippable: bool = True) -> dict:
        return {"name": name, "role": role, "state": state, "flippable": flippable}

    rows = [row("p1", "prefill"), row("d1", "prefill"), row("d2", "decode")]
    assert _candidate(rows, "decode") == "d1"
    assert _candidate(rows, "prefill") == "d2"
    assert _candidate([row("p1", "prefill", "moving"), row("p2", "prefill", flippable=False)], "decode") is None


# ---------------------------------------------------------------- the environment


def test_an_environment_made_by_hand_must_be_complete(tmp_path):
    with pytest.raises(NoEnvironment, match=r"is not complete: run bash .*install\.sh"):
        environment({"SGLANG_CPU": str(tmp_path)})
    (tmp_path / "tiny-llama").mkdir()
    (tmp_path / "tiny-llama" / "config.json").write_text("{}")
    assert where({"SGLANG_CPU": str(tmp_path)}) == (tmp_path, True)


def test_the_cache_is_named_by_the_recipe_and_is_never_in_the_checkout(tmp_path, root):
    folder, _ = where({"HOME": "/x"})
    assert folder.name == f"sglang-{recipe_hash({})}" and not folder.is_relative_to(root)
    assert where({"FLUIDPD_SGLANG_CACHE": str(tmp_path / "c")}) == (tmp_path / "c", False)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "complete").touch()
    assert where({"FLUIDPD_SGLANG_CACHE": str(tmp_path / "c")}) == (tmp_path / "c", True)
    assert recipe_hash({"FLUIDPD_SGLANG_PYTHON": "python3.12"}) != recipe_hash({})


def test_an_interpreter_that_is_not_there_is_said_before_anything_is_built(tmp_path):
    asked = {"FLUIDPD_SGLANG_CACHE": str(tmp_path / "c"), "FLUIDPD_SGLANG_PYTHON": "no-such-python"}
    with pytest.raises(NoEnvironment, match="no no-such-python: install it"):
        environment(asked)
    assert not (tmp_path / "c").exists()


def test_a_build_that_fails_says_its_last_line_and_where_its_log_is(tmp_path, monkeypatch):
    import cli.sglang_cpu.environment as made

    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "install.sh").write_text("echo one; echo disk is full >&2; exit 1\n")
    monkeypatch.setattr(made, "RECIPE", recipe)
    said: list[str] = []
    with pytest.raises(NoEnvironment, match=r"could not be built \(disk is full\): see .*c\.log"):
        environment({"FLUIDPD_SGLANG_CACHE": str(tmp_path / "c"), "FLUIDPD_SGLANG_PYTHON": "sh"}, said.append)
    assert "about 2 minutes, 1.8 GB" in said[0]


def test_sglang_finds_the_plugin_and_nothing_else_of_our_environment(tmp_path):
    folder = write_plugin_folder(tmp_path / "plugin")
    assert write_plugin_folder(folder) == folder  # for each worker again
    assert sorted(p.name for p in folder.iterdir()) == ["fluidpd", "fluidpd-0.dist-info", "sidecar"]
    points = (folder / "fluidpd-0.dist-info" / "entry_points.txt").read_text()
    assert "[sglang.srt.plugins]\nfluidpd = sidecar.plugin.entry:register" in points
    assert Path(folder / "sidecar" / "plugin" / "entry.py").is_file()


def test_an_installed_fluidpd_says_by_itself_where_its_plugin_is(tmp_path, monkeypatch):
    import cli.sglang_cpu.environment as made

    monkeypatch.setattr(made, "ROOT", tmp_path)  # no pyproject.toml there
    folder = write_plugin_folder(tmp_path / "plugin")
    assert "sidecar.plugin.entry:register" in (folder / "fluidpd-0.dist-info" / "entry_points.txt").read_text()


# ---------------------------------------------------------------- one move each way


class Moves:
    """The controller's API as the demo's moves see it: each asked-for move ends as `ends` says, at once."""

    def __init__(self, *ends: str, refuse: str = "") -> None:
        self.ends, self.refuse, self.asked, self.rows = list(ends), refuse, [], []

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1")
        if path == "/workers":
            return httpx.Response(200, json=[{"name": "d1", "role": "decode", "state": "serving", "flippable": True}])
        if path == "/transitions":
            return httpx.Response(200, json=self.rows)
        if request.method == "POST":
            body = json.loads(request.content)
            self.asked.append(body)
            if self.refuse and not body["force"]:
                return httpx.Response(409, json={"rule": self.refuse, "detail": "no"})
            row = {"id": f"m{len(self.rows)}", "worker": "d1", "to_role": body["role"], "end": self.ends.pop(0), "detail": "busy"}
            self.rows.append({**row, "started_wall_s": 5.0})
            return httpx.Response(202, json=row)
        return httpx.Response(200, json=next(r for r in self.rows if r["id"] == path.rsplit("/", 1)[-1]))

    async def shown(self, stage: SglangStage) -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(self.handle), base_url="http://c") as api:
            await stage._ask_for(api, "prefill", 0.0)


async def test_a_move_that_was_rolled_back_under_load_is_asked_for_once_more(sglang, capsys):
    moves = Moves("rolled_back", "done")
    await moves.shown(sglang)
    assert [m["end"] for m in moves.rows] == ["rolled_back", "done"]
    assert "ended rolled_back: busy" in capsys.readouterr().err
    await (again := Moves("rolled_back", "rolled_back")).shown(sglang)
    assert len(again.rows) == 2 and "it was tried twice" in capsys.readouterr().err


async def test_only_the_survivor_rule_is_skipped_and_that_is_said(sglang):
    moves = Moves("done", refuse="survivor_over_limit")
    await moves.shown(sglang)
    assert [body["force"] for body in moves.asked] == [False, True]
    assert all("the demo shows a move" in body["reason"] for body in moves.asked)
    row = {"id": "m0", "worker": "d1", "from_role": "decode", "to_role": "prefill", "reason": "manual_move", "phases": []}
    assert "asked for by the demo, past the rule survivor_over_limit" in sglang._move(row)
    assert "by the policy (prefill_sustained_flip)" in sglang._move({**row, "id": "x", "reason": "prefill_sustained_flip"})


def test_a_run_is_called_after_who_judges_in_it() -> None:
    assert judge_named({}) == "goodput"
    assert judge_named({"judge": "thresholds", "borrow": True}) == "thresholds"


def test_moves_that_a_prediction_chose_show_what_they_were_weighed_against() -> None:
    flip = {"action": "flip", "flips": [{"worker": "d3", "from": "decode", "to": "prefill"}]}
    chosen = {
        **flip,
        "wall_s": 112.5,
        "numbers": {"good_if_stay": 41.0, "good_if_to_prefill": 47.5, "good_if_shed": None, "ppi": 2.0},
    }
    by_rule = {**flip, "wall_s": 113.0, "numbers": {"ppi": 2.0}}
    lent = {"action": "borrow", "flips": [], "wall_s": 111.0, "numbers": {"good_if_stay": 1.0, "good_if_lend": 2.0}}
    assert weighed([by_rule, chosen, lent], 100.0) == [
        " 12.5 s  d3 to prefill: requests predicted in time: stay 41, to prefill 47.5"
    ]
