"""`fluidpd advise`: one screen and one document, both simulated, with the numbers that the advice stands on."""

from __future__ import annotations

import json

import pytest

ASKED = ("advise", "azure2023_code", "--minutes", "0.3", "--workers", "3")


def test_the_screen_names_the_split_the_verdict_and_every_splits_share(fluidpd):
    done = fluidpd(*ASKED)
    assert done.code == 0, done.err
    assert "simulated" in done.err and "simulated" in done.out
    for split in ("1P:2D", "2P:1D"):
        assert split in done.out
    assert "Split: " in done.out and "Elasticity " in done.out
    assert len(done.out.splitlines()) < 24, "one screen"


def test_the_document_holds_what_the_screen_says(fluidpd):
    document = json.loads(fluidpd(*ASKED, "--ttft", "1.5", "--json").out)
    assert document["engine"] == "simulated" and document["slo"]["ttft_s"] == 1.5
    assert [(s["prefill"], s["decode"]) for s in document["splits"]] == [(1, 2), (2, 1)]
    assert document["elasticity_pays"] in ("yes", "no", "no difference")
    assert document["policy"]["home_prefill"] == document["best_split"]["prefill"]
    assert document["says"][0].startswith("Split: ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("no_such_trace",), "no trace named"),
        (("azure2023_code", "--workers", "1"), "workers"),
        (("/nowhere/mine.csv",), "no trace file"),
    ],
)
def test_what_cannot_be_advised_on_is_said(fluidpd, options, says):
    told = fluidpd("advise", *options)
    assert told.code == 2 and says in told.err


def test_a_trace_of_one_request_is_too_short_for_advice(fluidpd, tmp_path):
    file = tmp_path / "one.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,10\n")
    told = fluidpd("advise", str(file))
    assert told.code == 2 and "give more --minutes" in told.err
