"""Emulated workers behind the real sglang-router, as users run it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from emulator_fleet import Fleet, fleet, free_ports, prompt, until

from sidecar.emulator.text import expected_chat_text, expected_text

pytestmark = [pytest.mark.router, pytest.mark.slow]


@asynccontextmanager
async def router(f: Fleet, prefill: list[str], decode: list[str], folder: Path) -> AsyncIterator[str]:
    port, metrics = free_ports(2)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics), "--policy", "round_robin", "--log-level", "warn"]
    for name in prefill:
        command += ["--prefill", f.url(name), str(f.worker(name).spec.bootstrap_port)]
    for name in decode:
        command += ["--decode", f.url(name)]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(30):
                while await registered(f.client, url) < len(prefill) + len(decode):
                    assert process.poll() is None, (folder / "router.log").read_text()
                    await asyncio.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(10)


async def registered(client: httpx.AsyncClient, url: str) -> int:
    try:
        return sum(w["is_healthy"] for w in (await client.get(f"{url}/workers")).json()["workers"])
    except (httpx.HTTPError, ValueError):
        return 0


async def streamed(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, bool]:
    text, done = "", False
    async with client.stream("POST", url, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                choice = (chunk.get("choices") or [{}])[0]
                text += chunk.get("text") or choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text, done


async def test_all_apis_stream_exactly_through_the_real_router(tmp_path: Path) -> None:
    async with fleet({"p": "prefill", "d": "decode"}) as f, router(f, ["p"], ["d"], tmp_path) as url:
        model = f.emulator.settings.model
        asked: list[tuple[str, dict[str, Any], str]] = []
        for i in range(20):
            words, n = prompt(20 + 40 * i, seed=i), 5 + i
            if i % 3 == 0:
                asked.append(("/generate", {"text": words, "sampling_params": {"max_new_tokens": n}}, expected_text(words, n)))
            elif i % 3 == 1:
                asked.append(("/v1/completions", {"model": model, "prompt": words, "max_tokens": n}, expected_text(words, n)))
            else:
                messages = [{"role": "user", "content": words}]
                chat = {"model": model, "messages": messages, "max_tokens": n}
                asked.append(("/v1/chat/completions", chat, expected_chat_text(messages, n)))
        answers = await asyncio.gather(*(streamed(f.client, url + path, {**body, "stream": True}) for path, body, _ in asked))
        for (path, _, text), (said, done) in zip(asked, answers, strict=True):
            assert said == text and done, path
        plain = await f.client.post(f"{url}/generate", json={"text": "plain", "sampling_params": {"max_new_tokens": 4}})
        assert plain.json()["text"] == expected_text("plain", 4)
        assert f.worker("d").tally.requests_total == 21 and f.worker("p").tally.requests_total == 0


async def test_a_draining_worker_costs_no_request_and_a_client_that_leaves_frees_both_halves(tmp_path: Path) -> None:
    async with fleet({"p": "prefill", "d": "decode", "e": "decode"}) as f, router(f, ["p"], ["d", "e"], tmp_path) as url:
        f.worker("d").engine.model.draining = True
        bodies = [{"text": f"retry {i}", "sampling_params": {"max_new_tokens": 4}, "stream": i % 2 == 0} for i in range(6)]
        for i, body in enumerate(bodies):
            if body["stream"]:
                assert await streamed(f.client, f"{url}/generate", body) == (expected_text(f"retry {i}", 4), True)
            else:
                response = await f.client.post(f"{url}/generate", json=body)
                assert response.status_code == 200 and response.json()["text"] == expected_text(f"retry {i}", 4)
        f.worker("d").engine.model.draining = False
        leaving = asyncio.create_task(
            streamed(f.client, f"{url}/generate", {"text": "bye", "sampling_params": {"max_new_tokens": 900}, "stream": True})
        )
        await until(lambda: any(w.engine.model.running for w in f.emulator.workers.values()))
        leaving.cancel()
        await until(lambda: all(w.engine.model.idle and not w.open for w in f.emulator.workers.values()))
