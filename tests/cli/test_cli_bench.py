"""`fluidpd bench table1`: tables and a page that say simulated, finished cells kept, the same with any number of processes."""

from __future__ import annotations

import ast
import json
import re

import pytest

from cli import bench, bench_run
from cli.bench_code import code_version, without_docstrings
from cli.bench_run import compute, workload_of
from fluidpd.benchmark import plan
from fluidpd.benchmark.cells import Cell, Task, computed
from fluidpd.benchmark.testbeds import CLAIMS
from fluidpd.simulator import check
from fluidpd.simulator.policies import POLICIES

TINY = "A,square_residence,static 2P:6D,thresholds,bound,run"
CELL = Cell(Task.RUN, "A", "square_residence", "static", 2, 0.5)


@pytest.fixture(autouse=True)
def without_traces(monkeypatch):
    monkeypatch.setenv("FLUIDPD_DATA", "/nowhere")
    monkeypatch.setattr(check, "ALWAYS", True)
    workload_of.cache_clear()


@pytest.fixture
def tiny(monkeypatch):
    """Half a minute of load instead of hours."""
    monkeypatch.setattr(plan, "QUICK", (("A", "azure2023_code", 0.4), ("A", "square_residence", 0.4)))
    monkeypatch.setattr(plan, "QUICK_GOODPUT", ("azure2023_code", 0.2, ("static",)))


def test_a_tiny_run_says_simulated_and_sets_the_claims_apart(fluidpd, tiny, tmp_path):
    done = fluidpd(
        "bench", "table1", "--quick", "--only", "azure2023_code,static 2P:6D,fluidtoken", "--cache", str(tmp_path), "-j", "1"
    )
    assert done.code == 0, done.err
    assert "simulated" in done.err and "SIMULATED" in done.out and "CLAIM" in done.out
    assert CLAIMS["fluidtoken"].system in done.out


def test_the_document_names_command_workloads_targets_and_claims(fluidpd, tiny, tmp_path):
    options = ("--only", TINY, "--cache", str(tmp_path), "--jobs", "1", "--json")
    document = json.loads(fluidpd("bench", "table1", "--quick", *options).out)
    assert document["engine"] == "simulated" and document["command"].startswith("fluidpd bench table1 --quick --only")
    assert document["workloads"][0]["generated"] is True
    assert {cell["label"] for cell in document["cells"]} == {"static 2P:6D", "thresholds", "bound"}
    run = next(cell for cell in document["cells"] if cell["label"] == "thresholds")
    assert run["whole"]["requests"] > run["second_half"]["requests"] > 0
    low, high = run["whole"]["interval"]
    assert low <= run["whole"]["attainment"] <= high
    assert any("not run" in target["found"] for target in document["targets"])


def test_an_interrupted_run_goes_on_from_its_finished_cells(fluidpd, tiny, tmp_path):
    options = ("--only", TINY, "--cache", str(tmp_path), "--jobs", "1", "--json")
    first = fluidpd("bench", "table1", "--quick", *options)
    kept = tmp_path / "cells.jsonl"
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])  # the last one was being written when it was killed
    so_far = json.loads(fluidpd("bench", "table1", "--quick", *options, "--finished").out)
    assert len(so_far["cells"]) == len(lines) - 1
    again = fluidpd("bench", "table1", "--quick", *options)
    assert f"{len(lines) - 1} of them known" in again.err and "1 cells computed" in again.err
    assert json.loads(again.out) == json.loads(first.out)


def test_the_result_does_not_depend_on_how_many_processes_there_are(fluidpd, tiny, tmp_path):
    options = ("--quick", "--only", "A,square_residence,static*,bound", "--json")
    alone = fluidpd("bench", "table1", *options, "--jobs", "1", "--cache", str(tmp_path / "a"))
    beside = fluidpd("bench", "table1", *options, "--jobs", "2", "--cache", str(tmp_path / "b"))
    assert json.loads(alone.out)["cells"] == json.loads(beside.out)["cells"]


def test_cells_of_other_code_are_taken_over_only_where_running_some_again_gives_the_same(fluidpd, tiny, tmp_path):
    options = ("--quick", "--only", "A,square_residence,static*,run", "--cache", str(tmp_path), "--jobs", "1", "--json")
    first = fluidpd("bench", "table1", *options)
    kept = tmp_path / "cells.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    kept.write_text("".join(json.dumps({**row, "code": "of yesterday"}) + "\n" for row in rows))
    adopted = fluidpd("bench", "table1", *options, "--adopt")
    assert "the same: all taken over" in adopted.err
    assert json.loads(adopted.out)["cells"] == json.loads(first.out)["cells"]
    wrong = [{**row, "code": "of yesterday", "record": {**row["record"], "wasted_gpu_s": -1.0}} for row in rows]
    kept.write_text("".join(json.dumps(row) + "\n" for row in wrong))
    refused = fluidpd("bench", "table1", *options, "--adopt")
    assert "different" in refused.err
    assert json.loads(refused.out)["cells"] == json.loads(first.out)["cells"]


def test_cells_of_older_code_are_shown_only_when_asked_for_and_the_page_says_how_many(fluidpd, tiny, tmp_path):
    options = ("--quick", "--only", "A,square_residence,static*,run", "--cache", str(tmp_path))
    first = fluidpd("bench", "table1", *options, "--jobs", "1", "--json")
    kept, page = tmp_path / "cells.jsonl", tmp_path / "page.md"
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    rows = [{**row, "code": "of yesterday"} for row in rows[:-1]] + rows[-1:]
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(json.loads(fluidpd("bench", "table1", *options, "--finished", "--json").out)["cells"]) == 1
    shown = json.loads(fluidpd("bench", "table1", *options, "--finished", "--older", "--write", str(page), "--json").out)["cells"]
    assert [{k: v for k, v in cell.items() if k != "older_code"} for cell in shown] == json.loads(first.out)["cells"]
    assert sum("older_code" in cell for cell in shown) == len(rows) - 1
    assert f"{len(rows) - 1} of the {len(rows)} cells were computed by older code" in page.read_text()
    refused = fluidpd("bench", "table1", *options, "--older")
    assert refused.code == 2 and "give it with --finished" in refused.err


def test_what_is_run_again_are_the_cells_in_which_most_was_decided():
    def cell(name: str) -> Cell:
        return Cell(Task.RUN, "A", name, "goodput", 2, 1.0)

    def record(flips: int, lent: int) -> dict[str, object]:
        return {"flips": {"to_prefill": flips, "to_decode": 0}, "borrowed_tokens": lent}

    calm = {cell(f"calm{i}"): (record(0, 0), 0.1) for i in range(9)}
    busy = {cell("moves"): (record(9, 0), 0.1), cell("lends"): (record(0, 5_000), 0.1), cell("slow"): (record(0, 0), 50.0)}
    assert bench_run.proofs_of({**calm, **busy})[:3] == [cell("moves"), cell("lends"), cell("slow")]


def test_one_different_run_keeps_every_cell_of_that_policy_from_being_taken_over(fluidpd, tiny, tmp_path):
    options = ("--quick", "--only", "A,static 2P:6D,static 7P:1D", "--cache", str(tmp_path), "--jobs", "1", "--json")
    fluidpd("bench", "table1", *options)
    kept = tmp_path / "cells.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    wrong = [{**r, "code": "of yesterday", "record": {**r["record"], "wasted_gpu_s": -1.0}} for r in rows]
    kept.write_text("".join(json.dumps(row) + "\n" for row in wrong))
    told = fluidpd("bench", "table1", *options, "--adopt").err
    assert "run static: 1 of" in told and "different on" in told
    assert "goodput static: its runs differ, so nothing is taken over" in told


def test_the_page_and_its_plots_are_written_without_a_date(fluidpd, tiny, tmp_path):
    page = tmp_path / "docs" / "benchmark.md"
    options = ("--quick", "--cache", str(tmp_path / "cache"), "--jobs", "1", "--only", "run,bound,goodput,static*,thresholds")
    done = fluidpd("bench", "table1", *options, "--write", str(page))
    assert done.code == 0, done.err
    text = page.read_text()
    assert "fluidpd bench table1 --quick" in text and "*simulated*" in text and "generated" in text
    assert not re.search(r"20\d\d-\d\d-\d\d", text)
    assert max(len(line) for line in text.splitlines() if not line.startswith(("|", "    "))) <= 160
    for name in re.findall(r"\((img/[^)]+)\)", text):
        assert "simulated" in (page.parent / name).read_text()
    again = fluidpd("bench", "table1", *options, "--write", str(page))
    assert again.code == 0 and page.read_text() == text


def test_a_cell_that_fails_is_named_and_takes_no_other_with_it(fluidpd, tiny, tmp_path, monkeypatch):
    def broken(cell, *more):
        if cell.prefill == 3:
            raise ValueError("no such worker")
        return computed(cell, *more)

    monkeypatch.setattr(bench_run, "computed", broken)
    options = ("--quick", "--only", "A,square_residence,static*,run", "--cache", str(tmp_path), "--jobs", "1", "--json")
    done = fluidpd("bench", "table1", *options)
    assert "static 3P:5D failed and is left out: ValueError: no such worker" in done.err
    assert "static 3P:5D" not in {cell["label"] for cell in json.loads(done.out)["cells"]}
    assert len(json.loads(done.out)["cells"]) == 7


def test_where_nothing_is_finished_there_is_nothing_to_show(fluidpd, tiny, tmp_path):
    done = fluidpd("bench", "table1", "--quick", "--finished", "--cache", str(tmp_path))
    assert done.code == 4 and "without --finished" in done.err


def test_a_filter_that_fits_nothing_says_what_there_is(fluidpd):
    done = fluidpd("bench", "table1", "--only", "azure2019")
    assert done.code == 2 and "azure2023_code" in done.err and "thresholds" in done.err


def test_one_cell_computed_twice_is_the_same_to_the_bit():
    assert compute(CELL)[0] == compute(CELL)[0]


def test_every_policy_of_the_registry_has_its_cells_whatever_is_in_it():
    assert {c.policy for c in plan.full() if c.task is Task.RUN} == set(POLICIES)
    assert len({c.label for c in plan.full() if c.policy == "static"}) == 7


def test_a_comment_leaves_finished_cells_valid_and_a_number_does_not():
    def dumped(source: str) -> str:
        return ast.dump(without_docstrings(source))

    assert dumped('"""Old."""\nA = 1  # why\n') == dumped('"""New."""\n\nA = 1\n') != dumped("A = 2\n")


def test_policies_that_differ_in_code_differ_in_version_and_nobody_deciding_ignores_the_rules():
    versions = {name: code_version(Cell(Task.RUN, "A", "azure2023_code", name, 2, 1.0)) for name in POLICIES}
    assert len(set(versions.values())) == len(versions)
    assert code_version(CELL) != code_version(Cell(Task.GOODPUT, "A", "azure2023_code", "static", 2, 1.0))


def test_help_has_examples():
    assert "--write docs/benchmark.md" in (bench.table1.__doc__ or "")
