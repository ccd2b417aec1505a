"""A pause is the database's: a controller that starts anew keeps to it, until its end."""

from __future__ import annotations

from control_fakes import Fleet, prompts

from fluidpd.names import Role


async def test_a_pause_outlives_a_restart_of_the_controller_and_its_end_lets_it_act_again() -> None:
    roles = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
    f = await Fleet(roles, residence_s=0.0, persist_s=0.1, warmup_s=0.1).up()
    await f.controller.set_pause("hands off now", 600, "ana")
    f.controller = f.another_controller()
    await f.up()
    for name, sidecar in f.sidecars.items():
        if sidecar.role is Role.PREFILL:
            sidecar.queue = prompts(8) if name.startswith("p") else ()
    await f.run(2.0)
    held = f.controller.collector.pause(f.clock.now())
    assert held is not None and (held.actor, held.reason) == ("ana", "hands off now")
    assert f.store.transitions == {}
    await f.controller.resume("bo", "it is over")
    await f.run(3.0)
    assert f.store.transitions
