"""Starting and stopping a sidecar process: clean, quick, and clear about what is in the way."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar.serve import PortBusy, StartFailed, serve
from sidecar.settings import SidecarSettings


def settings(directory: Path, **given: Any) -> SidecarSettings:
    said = {
        "worker": "w1",
        "worker_url": "http://127.0.0.1:9",
        "controller_url": "ws://127.0.0.1:9/link",
        "plugin_socket": directory / "p.sock",
        "state_dir": directory / "state",
    }
    return SidecarSettings.model_validate(said | given)


async def test_it_stops_within_five_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    stop, started = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(settings(tmp_path), stop=stop, started=started))
    await asyncio.wait_for(started.wait(), 5)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert not (tmp_path / "p.sock").exists()
    await asyncio.wait_for(serve(settings(tmp_path), stop=stop), 5)  # the lock and the port are free again


async def test_a_busy_port_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortBusy, match="choose another port"):
            await serve(settings(tmp_path, port=taken.getsockname()[1]), stop=asyncio.Event())


async def test_what_cannot_be_used_says_so_and_frees_what_was_taken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    stop = asyncio.Event()
    for wrong, said in (({"state_dir": file / "x"}, "state_dir"), ({"plugin_socket": tmp_path / ("x" * 120)}, "107 bytes")):
        with pytest.raises(StartFailed, match=said):
            await serve(settings(tmp_path, **wrong), stop=stop)
    (tmp_path / "state" / "journal.jsonl").write_bytes(b"torn\ntorn\ntorn\n")
    with pytest.raises(StartFailed, match="damaged at line 1"):
        await serve(settings(tmp_path), stop=stop)
    stop.set()
    await serve(settings(tmp_path), stop=stop)


async def test_a_terminated_process_ends_cleanly(tmp_path: Path, root: Path) -> None:
    code = (
        "import asyncio, sys; from sidecar.serve import serve; from sidecar.settings import load_settings;"
        "asyncio.run(serve(load_settings(None, {'worker': 'w1', 'worker_url': 'http://127.0.0.1:9',"
        "'plugin_socket': sys.argv[1] + '/p.sock', 'state_dir': sys.argv[1] + '/state'})))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path), cwd=root, env=dict(os.environ))
    try:
        async with asyncio.timeout(20):
            while not (tmp_path / "p.sock").exists():
                await asyncio.sleep(0.02)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0 and time.monotonic() - began < 5
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not (tmp_path / "p.sock").exists()
