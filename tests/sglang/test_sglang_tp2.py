"""Two tensor-parallel ranks a worker: what rank 0 decides the other rank does as well, in the same iteration. In `make soak`.

Two ranks of each worker share this machine's cores: nothing is asked of their pace.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from real_fleet import PAIR, RealFleet
from test_sglang_claims import eager, prompts, with_stand_ins

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fleet("tp2"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores: run it where there are two"),
]
TP2 = replace(
    PAIR,
    router=False,
    flags={"*": f"{PAIR.flags['*']} --tp 2"},
    # A core for each rank; and without triton torch cannot compile what only tensor parallelism uses.
    variables={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"},
)


def test_claims_change_no_output_with_two_ranks_and_give_everything_back(start_fleet: Any) -> None:
    fleet = start_fleet("tp2", lambda folder: TP2)
    assert isinstance(fleet, RealFleet)
    asked = prompts(8, seed=1, low=600, high=1200)
    with with_stand_ins(fleet) as pair:
        with pair.slow_prefill(1.0):
            alone = [a.ids for a in pair.ask_all(asked)]
        pair.assert_clean()
        with pair.slow_prefill(1.0), eager(pair).renewed():
            answers = pair.ask_all(asked)
        assert [(a.status, a.ids) for a in answers] == [(200, ids) for ids in alone]
        pair.assert_clean()
        assert pair.count("claims_won_total") > 0 and pair.count("lent_steps_total") > 0
    for name in ("p1", "d1"):
        assert "Traceback" not in fleet.log(name) and "memory leak" not in fleet.log(name)
