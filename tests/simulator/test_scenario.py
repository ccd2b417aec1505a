"""Scenario files: what they say is what is simulated, and what is wrong in them is named by place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fluidpd.simulator.scenario import BadScenario, Part, Scenario, parse_scenario
from fluidpd.simulator.workload import Request, Workload

TWO = """
name = "two"
join = "overlay"
policies = ["static", "seed"]
[fleet]
prefill = 3
decode = 5
[[part]]
trace = "a"
shape = { kind = "burst", at_s = 2, for_s = 1, times = 4 }
[[part]]
trace = "b"
later_s = 7
"""


def find(part: Part, seed: int) -> Workload:
    return Workload(part.trace, tuple(Request(float(i), 10, 5) for i in range(10)), generated=False)


def test_parts_are_shaped_shifted_and_joined_as_the_file_says() -> None:
    scenario = parse_scenario("two.toml", TWO)
    assert (scenario.fleet.prefill, scenario.fleet.decode, scenario.policies) == (3, 5, ("static", "seed"))
    made = scenario.workload(find)
    assert made.name == "composite(a + b)" and len(made.requests) == 20
    assert made.requests[-1].arrival_s == 16.0
    assert sum(2 <= r.arrival_s <= 3 for r in made.requests) >= 4
    joined = parse_scenario("two.toml", TWO.replace("overlay", "concatenate")).workload(find)
    assert joined.name == "composite(a -> b)"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("name", "nam"), "nam.*not permitted"),
        (('"seed"]', '"sed"]'), "no policy 'sed'"),
        (("times = 4", "times = -4"), r"part\.0\.shape.*greater than 0"),
        (('kind = "burst"', 'kind = "bust"'), r"part\.0\.shape"),
        (("prefill = 3", "prefill = 0"), r"fleet\.prefill"),
        (('policies = ["static", "seed"]', "policies = []"), "names none"),
        (("[[part]]", "[[prt]]"), "part.*required|prt.*not permitted"),
        (("join = ", "join == "), "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_by_place(change: tuple[str, str], says: str) -> None:
    with pytest.raises(BadScenario, match=says):
        parse_scenario("two.toml", TWO.replace(*change))


def test_the_schema_describes_every_part(root: Path) -> None:
    schema = Scenario.model_json_schema()
    assert {"Part", "Ramp", "SquareWave", "Burst", "Fleet", "SloTargets"} <= set(schema["$defs"])
    assert json.dumps(schema)


def test_the_example_in_the_docs_is_a_scenario(root: Path) -> None:
    text = (root / "docs" / "simulator.md").read_text()
    example = re.search(r"```toml\n(.*?)```", text, re.S)
    assert example is not None
    assert len(parse_scenario("docs", example[1]).part) == 2
