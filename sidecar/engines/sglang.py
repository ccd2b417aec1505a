"""SGLang's HTTP surface as the port `Engine`: role read-back, what is left to do, the role switch, and a probe of the new kind.

Never raises to its caller, and never takes HTTP 200 for success: the answer's own words count.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from typing import Any

import httpx

from fluidpd.names import Role
from sidecar.clock import Clock
from sidecar.engines.loads import Loads, Unreadable, between, parse_loads
from sidecar.engines.page_reader import Judge, PageReader
from sidecar.ports import EngineFacts, Look, Measured, Probe, SwitchAnswer, SwitchResult, WorkLeft
from sidecar.settings import is_loopback

log = logging.getLogger(__name__)

_LOADS = "/v1/loads?include=core,disagg,queues,memory"
_BUSY = re.compile(r"\bbusy\b|\bidle\b|in.?flight|running req|pending req|not empty", re.IGNORECASE)
_LASTING = re.compile(
    r"backend|not supported|unsupported|not enabled|enable.pd.role.switch|decode_cuda_graph"
    r"|speculative|pipeline|expert|all.to.all|context parallel",
    re.IGNORECASE,
)
_WITH_ADMIN_KEY = "start the engine with --admin-api-key and set admin_key_file"
_ANY_RANK = {"prefill_dp_rank": -1, "prefill_cp_rank": -1, "target_tp_rank": -1, "target_pp_rank": -1}
_PROBE_HEADER = {"X-FluidPD-Probe": "1"}


def read_switch_answer(status: int, body: Any) -> SwitchResult:
    """What an answer to POST /pd_role_switch means. A body that is not the engine's leaves only looking."""
    if status == 404:
        return SwitchResult(SwitchAnswer.NOT_FLIPPABLE, "the engine has no /pd_role_switch: it needs SGLang 0.5.21 or newer")
    if status in (401, 403):
        return SwitchResult(SwitchAnswer.NOT_FLIPPABLE, "the engine wants its admin key: set admin_key_file")
    if not isinstance(body, dict) or not isinstance(body.get("success"), bool) or status not in (200, 400):
        return SwitchResult(SwitchAnswer.NO_ANSWER, f"HTTP {status} without the engine's answer")
    message = str(body.get("message") or "")
    if body["success"] and status == 200:
        return SwitchResult(SwitchAnswer.OK, message)
    if "in progress" in message:
        return SwitchResult(SwitchAnswer.NO_ANSWER, message)  # somebody's switch is under way: how it ends is seen by looking
    if body.get("safe_to_restore") is not True:
        return SwitchResult(SwitchAnswer.BROKE, message or "the engine says that its old role may not be restored")
    if _LASTING.search(message):
        hint = "; set decode_cuda_graph_memory_gb" if "decode_cuda_graph" in message else ""
        return SwitchResult(SwitchAnswer.NOT_FLIPPABLE, message + hint)
    if _BUSY.search(message):
        return SwitchResult(SwitchAnswer.BUSY, message)
    return SwitchResult(SwitchAnswer.REFUSED, message)


class SglangEngine:
    """Implements the port `Engine`. `client` has the engine's address as its base and carries no key of ours by default."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        clock: Clock,
        *,
        name: str = "sglang",
        bootstrap: str = "",
        admin_key: Callable[[], str | None] = lambda: None,
        timeout_s: float = 1.0,
        switch_timeout_s: float = 30.0,
        graph_memory_gb: float = 0.0,
        judge: Judge | None = None,
        also: frozenset[str] = frozenset(),
    ) -> None:
        """`judge` and `also`: as the reader of the metrics page has them."""
        self._client = client
        self._clock = clock
        self._name = name
        self._bootstrap = bootstrap
        self._admin_key = admin_key
        self._timeout_s = timeout_s
        self._switch_timeout_s = switch_timeout_s
        self._graph_memory_gb = graph_memory_gb
        self._before: Loads | None = None
        self._restarts = 0
        self.page = PageReader(client, clock, timeout_s, judge, also)
        self._switch_open: tuple[str, str] | None = None  # boot, and what was found then

    async def facts(self) -> EngineFacts | None:
        """What /server_info says, or None while it cannot be asked."""
        try:
            info = await self._json("/server_info")
        except Unreadable as error:
            log.debug("engine facts: %s", error)
            return None
        if not isinstance(info, dict):
            return None
        why = why_not_flippable(info, self._bootstrap)
        radix = info.get("disable_radix_cache")
        chunk = info.get("chunked_prefill_size")
        role, boot = _role_now(info), self._boot(info)
        return EngineFacts(
            engine=self._name,
            version=str(info.get("version") or "unknown"),
            boot=boot,
            role=role,
            flippable=not why,
            not_flippable_why=why,
            started_as=_role(info.get("disaggregation_mode")),
            radix_cache=not radix if isinstance(radix, bool) else None,
            max_prefill_chunk_tokens=chunk if isinstance(chunk, int) and chunk > 0 else None,
            switch_open_why=await self._why_switch_open(info, boot),
        )

    async def _why_switch_open(self, info: dict[str, Any], boot: str) -> str:
        """Asked once for each engine process, with a body that no handler ever sees: who may post is judged before it is read."""
        host, bound = self._client.base_url.host, str(info.get("host") or "")
        if is_loopback(host) and (not bound or is_loopback(bound)):
            return ""  # whoever is on this machine may do more than that
        if self._switch_open is None or self._switch_open[0] != boot:
            try:
                answer = await self._client.post(
                    "/pd_role_switch", content=b"{", headers={"Content-Type": "application/json"}, timeout=self._timeout_s
                )
            except httpx.HTTPError:
                return ""
            said = "" if answer.status_code not in (400, 422) else f"{host} lets anybody switch its role: {_WITH_ADMIN_KEY}"
            if said:
                log.warning("%s", said)
            self._switch_open = (boot, said)
        return self._switch_open[1]

    async def look(self) -> Look:
        """Role and health, asked now. The role is the loads' word, and /server_info's where the loads have none."""
        try:
            loads = parse_loads(await self._json(_LOADS), self._clock.now())
        except Unreadable as error:
            return Look(reachable=False, detail=str(error))
        role, stamp = loads.role, loads.made_s
        try:
            if role is None:
                role, stamp = _role_now(await self._json("/server_info")), None
            answer = await self._client.get("/health", timeout=max(2.0, self._timeout_s))
        except (httpx.HTTPError, Unreadable) as error:
            return Look(reachable=True, role=role, detail=await self._paused() or f"/health: {_text(error)}", stamp=stamp)
        if answer.status_code == 200:
            return Look(reachable=True, healthy=True, role=role, detail="/health answered 200", stamp=stamp)
        return Look(
            reachable=True, role=role, detail=await self._paused() or f"/health answered {answer.status_code}", stamp=stamp
        )

    async def work_left(self) -> WorkLeft:
        try:
            return parse_loads(await self._json(_LOADS), self._clock.now()).work_left()
        except Unreadable as error:
            return WorkLeft(readable=False, detail=str(error))

    async def measure(self, with_page: bool) -> Measured | None:
        """Plugin-free readings, or None where the engine does not answer."""
        try:
            loads = parse_loads(await self._json(_LOADS), self._clock.now())
        except Unreadable as error:
            log.debug("engine loads: %s", error)
            return None
        rates, fell = between(self._before, loads)
        self._before = loads
        self._restarts += fell
        notes = ["a counter fell: the engine restarted"] if fell else []
        values = {**loads.values(), **rates}
        sources = dict.fromkeys(values, "/v1/loads")
        if with_page:
            await self.page.refresh(loads)
            values, sources = {**self.page.values, **values}, {**self.page.sources, **sources}
            notes.extend(self.page.notes)
        return Measured(loads.role, values, tuple(notes), sources=sources)

    async def prepare_switch(self, role: Role) -> SwitchResult:
        """What would be refused, by the engine or by us, before anything drains."""
        refusal = await self._paused() or (await self._foreign_bootstrap() if role is Role.PREFILL else "")
        if refusal:
            return SwitchResult(SwitchAnswer.REFUSED, refusal)
        return await self._post_switch(role, True, min(10.0, self._switch_timeout_s))

    async def switch(self, role: Role) -> SwitchResult:
        if refusal := await self._paused():  # it may have been paused during the drain
            return SwitchResult(SwitchAnswer.REFUSED, refusal)
        return await self._post_switch(role, False, self._switch_timeout_s)

    async def abort_all(self) -> str:
        try:
            answer = await self._client.post(
                "/abort_request", json={"abort_all": True}, headers=self._as_admin(), timeout=self._timeout_s
            )
        except httpx.HTTPError as error:
            return f"/abort_request: {_text(error)}"
        if answer.status_code in (401, 403):
            return "the engine wants its admin key: set admin_key_file"
        return "" if answer.status_code == 200 else f"/abort_request answered {answer.status_code}"

    async def _paused(self) -> str:
        """Why a switch would lose requests. A paused engine holds some where no count shows them, and would answer ok."""
        try:
            ready = (await self._client.get("/ready", timeout=self._timeout_s)).status_code
            # /ping is the same without the pause, and a mere flag: /health would wait for a token of the paused engine.
            alive = (await self._client.get("/ping", timeout=self._timeout_s)).status_code if ready == 503 else ready
        except httpx.HTTPError:
            return ""  # an engine that does not answer is the switch's own business
        if (ready, alive) == (503, 200):
            return "generation is paused, and a switch would lose the requests that are held: POST /continue_generation first"
        return ""

    async def _foreign_bootstrap(self) -> str:
        """Why requests would not find this worker as prefill: its bootstrap server runs in either role, so it answers now."""
        if not self._bootstrap:
            return "the sidecar's bootstrap_port is not set, so decode workers could not be paired with it"
        port = self._bootstrap.rpartition(":")[2]
        try:
            answer = await self._client.get(f"http://{self._bootstrap}/route", params=_ANY_RANK, timeout=self._timeout_s)
        except httpx.HTTPError as error:
            return f"bootstrap port {port} does not answer ({_text(error)})"
        if answer.status_code == 503 and "registered" in answer.text:
            return ""  # a bootstrap server that no prefill worker has used yet
        try:
            said = answer.json() if answer.status_code == 200 else None
        except ValueError:
            said = None
        if not isinstance(said, dict):
            return f"bootstrap port {port} is served by another process: it answered HTTP {answer.status_code}"
        owner = said.get("prefill_http_port")
        if owner is not None and owner != self._client.base_url.port:
            return f"bootstrap port {port} is served by another process: that of the worker on port {owner}"
        return ""

    async def probe(self, role: Role) -> Probe:
        """A positive check of the new kind. Prefill on a real engine: every rank is known to its bootstrap server."""
        if self._name == "emulated":
            return await self._probe_generate()
        if role is Role.PREFILL and self._bootstrap:
            return await self._probe_bootstrap()
        look = await self.look()
        return Probe(look.healthy and look.role is role, "health", look.detail)

    async def _probe_generate(self) -> Probe:
        body = {"text": "probe", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            answer = await self._client.post("/generate", json=body, headers=_PROBE_HEADER, timeout=max(2.0, self._timeout_s))
        except httpx.HTTPError as error:
            return Probe(False, "generate", _text(error))
        return Probe(answer.status_code == 200, "generate", f"HTTP {answer.status_code}")

    async def _probe_bootstrap(self) -> Probe:
        try:
            answer = await self._client.get(f"http://{self._bootstrap}/route", params=_ANY_RANK, timeout=self._timeout_s)
        except httpx.HTTPError as error:
            return Probe(False, "bootstrap", _text(error))
        return Probe(answer.status_code == 200, "bootstrap", f"HTTP {answer.status_code} {answer.text[:120]}".strip())

    async def _post_switch(self, role: Role, prepare_only: bool, timeout_s: float) -> SwitchResult:
        body: dict[str, Any] = {"new_role": role.value, "prepare_only": prepare_only}
        if role is Role.DECODE:
            body["decode_cuda_graph_memory_gb"] = self._graph_memory_gb
        try:
            answer = await self._client.post("/pd_role_switch", json=body, headers=self._as_admin(), timeout=timeout_s)
        except httpx.HTTPError as error:
            return SwitchResult(SwitchAnswer.NO_ANSWER, _text(error))
        try:
            said = answer.json()
        except ValueError:
            said = None
        return read_switch_answer(answer.status_code, said)

    def _as_admin(self) -> dict[str, str]:
        key = self._admin_key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _boot(self, info: dict[str, Any]) -> str:
        """SGLang states no boot id. The random seed of its start, and its counters falling, tell one process from the next."""
        said = str(info.get("boot") or info.get("random_seed"))
        return hashlib.sha256(f"{said}/{info.get('port')}/{self._restarts}".encode()).hexdigest()[:16]

    async def _json(self, path: str) -> Any:
        try:
            answer = await self._client.get(path, timeout=self._timeout_s)
        except httpx.HTTPError as error:
            raise Unreadable(f"{path}: {_text(error)}") from error
        if answer.status_code != 200:
            raise Unreadable(f"{path} answered HTTP {answer.status_code}")
        try:
            return answer.json()
        except ValueError as error:
            raise Unreadable(
                f"{path} answered {'an empty body' if not answer.content else 'something that is not JSON'}"
            ) from error


def _role_now(info: dict[str, Any]) -> Role | None:
    """The scheduler's own state: after a switch the top level of /server_info still names the role of the start."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    return _role(state.get("disaggregation_mode") or info.get("disaggregation_mode"))


def _role(said: Any) -> Role | None:
    return Role(said) if said in (Role.PREFILL, Role.DECODE) else None


def _above_one(info: dict[str, Any], name: str) -> bool:
    size = info.get(name)
    return isinstance(size, int) and size > 1


def why_not_flippable(info: dict[str, Any], bootstrap: str = "") -> str:
    """What rules a role switch out for as long as this engine runs, by its /server_info; the plainest reason first."""
    mode, backend = str(info.get("disaggregation_mode") or "null"), str(info.get("disaggregation_transfer_backend") or "")
    own_port, port = info.get("disaggregation_bootstrap_port"), bootstrap.rpartition(":")[2]
    a2a, speculative = info.get("moe_a2a_backend") or "none", info.get("speculative_algorithm")
    rules = (
        (mode == "null", "the engine does not run in P/D disaggregation mode: start it with --disaggregation-mode"),
        (
            not _is_backend_able(backend),
            f"the transfer backend {backend} has no role switch: use mooncake or mori",
        ),
        (_above_one(info, "ep_size"), f"expert parallelism (ep_size {info.get('ep_size')}) is not rebuilt by a role switch"),
        (a2a != "none", f"MoE all-to-all ({a2a}) is not rebuilt by a role switch"),
        (_above_one(info, "pp_size"), f"pipeline parallelism (pp_size {info.get('pp_size')}) is not rebuilt by a role switch"),
        (
            _above_one(info, "dp_size") or bool(info.get("enable_dp_attention")),
            f"data parallelism (dp_size {info.get('dp_size')}): a role switch with it is not tested",
        ),
        (
            _above_one(info, "dcp_size"),
            f"decode context parallelism (dcp_size {info.get('dcp_size')}) is not rebuilt by a role switch",
        ),
        (bool(speculative), f"speculative decoding ({speculative}) is not rebuilt by a role switch"),
        (not info.get("enable_pd_role_switch"), "the engine was started without --enable-pd-role-switch"),
        (
            bool(port) and isinstance(own_port, int) and str(own_port) != port,
            f"the sidecar's bootstrap_port is {port}, the engine's is {own_port}: set both to the same",
        ),
    )
    return next((why for refused, why in rules if refused), "")


def _is_backend_able(backend: str) -> bool:
    return not backend or backend.startswith(("mooncake", "mori"))


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
