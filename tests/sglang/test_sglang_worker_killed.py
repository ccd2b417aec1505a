"""A real worker dies while it makes another one's tokens. Its file comes last: the fleet is not whole afterwards."""

from __future__ import annotations

import pytest
from real_clients import Api, generate, pair, prompt, until
from real_fleet import RealFleet

pytestmark = pytest.mark.fleet("whole")


def test_a_peer_that_is_killed_does_not_break_the_stream(real_fleet: RealFleet, real_api: Api) -> None:
    p1, d1 = real_fleet.worker("p1"), real_fleet.worker("d1")
    body = generate(prompt(20, 10), 1000)
    calm = pair(p1, d1, "/generate", body)
    calm.join(120)
    moved = pair(p1, d1, "/generate", body)
    until(lambda: moved.tokens >= 12, 60, "the stream to be under way")
    real_api.move("d1", "prefill")
    real_api.moved("d1", "prefill")
    real_api.move("d1", "decode")
    real_api.moved("d1", "decode")
    assert not moved.is_done
    real_fleet.kill("d2")
    real_fleet.children.pop("d2")
    moved.join(120)
    assert moved.told() == calm.told()
