"""Membership against the real sglang-router, with workers that only answer what it asks at registration."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from controller.ports import RouterTrouble
from controller.routers.sglang_router import SglangRouter
from fluidpd.names import Role

pytestmark = pytest.mark.router


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class _Worker(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        info = {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1}
        body = json.dumps({"data": [{"id": "m"}]} if "models" in self.path else info).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def worker() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Worker)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[SglangRouter, list[str]]]:
    with ExitStack() as stack:
        urls = [stack.enter_context(worker()) for _ in range(3)]
        port = free_port()
        log = stack.enter_context((tmp_path / "router.log").open("wb"))
        arguments = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
        arguments += ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--log-level", "warn"]
        arguments += ["--prefill", urls[0], "4001", "--decode", urls[1]]
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | {"NO_PROXY": "127.0.0.1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sglang_router.launch_router", *arguments, stdout=log, stderr=log, env=environment
        )
        router = SglangRouter(f"http://127.0.0.1:{port}", health_wait_s=5)
        try:
            async with asyncio.timeout(30):
                while True:
                    try:
                        if len(await router.members()) == 2:
                            break
                    except RouterTrouble:
                        pass
                    await asyncio.sleep(0.05)
            yield router, urls
        finally:
            await router.close()
            process.terminate()
            try:
                async with asyncio.timeout(5):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def test_a_worker_joins_changes_its_role_and_leaves(tmp_path: Path) -> None:
    async with running(tmp_path) as (router, urls):
        third = urls[2]
        spent: dict[str, float] = {}
        for step, (role, port) in enumerate(
            [(Role.PREFILL, 4003), (Role.DECODE, 4003), (Role.PREFILL, 4004), (Role.PREFILL, 4004), (None, None)]
        ):
            began = time.monotonic()
            await router.ensure(third, role, port)
            spent[f"{step}:{role}"] = time.monotonic() - began
            members = await router.members()
            assert (members[third].role if role else members.get(third)) is role
            assert set(urls[:2]) <= set(members)  # nobody else is touched
        print({k: round(v, 3) for k, v in spent.items()})

        # Two that compete: the last wish wins, whatever the router's queue does with the first.
        early = asyncio.ensure_future(router.ensure(third, Role.PREFILL, 4003))
        await asyncio.sleep(0.01)
        early.cancel()
        await router.ensure(third, Role.DECODE)
        await asyncio.sleep(0.3)
        assert (await router.members())[third].role is Role.DECODE
        early = asyncio.ensure_future(router.ensure(urls[1], Role.PREFILL, 4002))
        await asyncio.sleep(0.01)
        early.cancel()
        await router.ensure(urls[1], None)
        await asyncio.sleep(0.3)
        assert urls[1] not in await router.members()


async def test_a_worker_that_does_not_answer_and_a_router_that_is_not_there_are_named(tmp_path: Path) -> None:
    async with running(tmp_path) as (router, _):
        router._health_wait_s = 0.5
        with pytest.raises(RouterTrouble, match="/health answers"):
            await router.ensure(f"http://127.0.0.1:{free_port()}", Role.DECODE)
    lonely = SglangRouter(f"http://127.0.0.1:{free_port()}", health_wait_s=0.5)
    with pytest.raises(RouterTrouble, match="is it running"):
        await lonely.members()
    await lonely.close()
