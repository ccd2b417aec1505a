"""Borrowed chunks fused with the decode batch (mixed chunks on): same text, room given, nothing left over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from real_clients import until
from real_environment import SglangEnvironment
from real_fleet import RealFleet
from stub_sidecars import Grants, StubSidecar
from test_sglang_claims import SPEC, Pair, prompts

FUSED = replace(
    SPEC,
    flags={"*": "--max-total-tokens 32768 --disable-overlap-schedule"},
    variables={"FLUIDPD_PLUGIN_FUSE": "on"},
)


@pytest.fixture(scope="module")
def fused(sglang_environment: SglangEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    fleet = RealFleet(FUSED, sglang_environment, tmp_path_factory.mktemp("fused"))
    sidecars = tuple(StubSidecar(w.name, fleet.socket(w), w.bootstrap) for w in fleet.workers)
    for sidecar in sidecars:
        sidecar.peers = sidecars
    try:
        fleet.start()
        until(lambda: all(s.samples_total > 2 for s in sidecars), 30, "samples of both workers")
        yield Pair(*fleet.workers, *sidecars)
    finally:
        fleet.stop()
        for sidecar in sidecars:
            sidecar.close()


def test_fused_chunks_change_no_output_and_give_everything_back(fused: Pair) -> None:
    asked, background = prompts(6, seed=1, low=600, high=900), prompts(2, seed=9, low=50, high=100)
    alone = [a.ids for a in fused.ask_all(asked)]
    streams_alone = [s.wait().ids for s in [fused.ask(p, 100) for p in background]]
    fused.assert_clean()
    with fused.slow_prefill(), Grants(fused.sidecars, tbt_slo_s=2.0).renewed():
        streams = [fused.ask(p, 100) for p in background]
        until(lambda: all(s.at_s for s in streams), 60, "streams that run")
        answers = fused.ask_all(asked)
        assert [s.wait().ids for s in streams] == streams_alone
    assert [a.ids for a in answers] == alone
    fused.assert_clean()
    assert fused.count("lent_steps_total") > 0
