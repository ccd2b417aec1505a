"""The plugin protocol (JSON lines on a unix socket) and the sidecar-to-sidecar bodies. docs/protocol.md explains them.

The sidecar listens (socket mode 0600), the plugin inside the engine connects, and reconnects for ever. One line, one message,
`type` first. Never imports the engine, the emulator or a web framework: this module also runs inside SGLang's process.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fluidpd.command import GrantTerms
from fluidpd.names import Role
from fluidpd.telemetry import WaitingPrompt

PLUGIN_PROTOCOL = 1
MAX_LINE_BYTES = 4 * 1024 * 1024

# Capabilities a plugin may state in its hello. What is not stated is never assumed.
CAN_SAMPLE, CAN_BORROW, CAN_GIVE, CAN_HANDOFF, CAN_ADOPT, CAN_HOLD, CAN_REMAP, CAN_DROP_STALE, CAN_TRIAGE = (
    "sample",
    "borrow",
    "give",
    "handoff",
    "adopt",
    "hold",
    "remap",
    "drop_stale",
    "triage",
)


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


# ---------------------------------------------------------------- plugin -> sidecar


class PluginHello(Message):
    type: Literal["hello"] = "hello"
    protocol: int = PLUGIN_PROTOCOL
    part: Literal["all", "scheduler", "http"] = "all"
    engine: str
    engine_version: str
    boot: str  # a new value for every start of the engine
    role: Role
    capabilities: tuple[str, ...]
    kv_capacity_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    disarmed_why: str = ""  # the plugin does nothing in this engine, and why: then `capabilities` is empty
    cannot: dict[str, str] = Field(default_factory=dict)  # capability that this engine's configuration rules out -> why


class PluginSample(Message):
    """Aggregated per-iteration telemetry. `values` uses the names of fluidpd.telemetry.Readings; absent means not known."""

    type: Literal["sample"] = "sample"
    part: Literal["all", "scheduler", "http"] = "all"  # of http only the request counts are read: they join the others' samples
    role: Role
    engine_state: Literal["serving", "warming", "switching", "unhealthy"] = "serving"
    values: dict[str, Any] = Field(default_factory=dict)
    queue: tuple[WaitingPrompt, ...] | None = None
    queue_total: int | None = None
    chunks: dict[str, int] = Field(default_factory=dict)  # borrowed chunk size in tokens -> how often, since the last sample


class ClaimWanted(Message):
    """A decode plugin wants one of its own rooms that still waits at the prefill worker behind `bootstrap`."""

    type: Literal["claim_wanted"] = "claim_wanted"
    id: str
    room: int
    bootstrap: str


class ClaimAnswer(Message):
    """A prefill plugin's verdict: given means it has forgotten the room and ended its half as a normal 200."""

    type: Literal["claim_answer"] = "claim_answer"
    id: str
    room: int
    given: bool
    why: str = ""  # started, unknown, given_to_other, failed, draining, not_claimable


class HandoffState(Message):
    """All that a peer needs to continue one generation exactly where it stopped."""

    id: str  # unique per handoff of a request; a second handoff of the same request has a new id
    rid: str
    prompt_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)  # tokens that reached the client, or will from the old worker
    max_new_tokens: int = Field(ge=1)
    kv_tokens: int = Field(ge=0)
    kv_bytes: int = Field(ge=0)  # what moving the KV would carry on the wire; paced by the sidecar's token bucket
    digest: str  # emulator: sha256 of the prompt, read back from the first KV page; real engine: of the token ids
    payload: dict[str, Any] = Field(default_factory=dict)  # engine-specific: prompt ids, output ids, sampling parameters


class HandoffWanted(Message):
    """The draining worker stopped a generation at a token boundary and wants it continued elsewhere."""

    type: Literal["handoff_wanted"] = "handoff_wanted"
    state: HandoffState


class AdoptAnswer(Message):
    type: Literal["adopt_answer"] = "adopt_answer"
    id: str
    accepted: bool
    why: str = ""  # no_kv, wrong_role, draining, unknown


class Tokens(Message):
    """Tokens of an adopted generation, K's plugin -> K's sidecar -> J's sidecar -> J's plugin -> the client."""

    type: Literal["tokens"] = "tokens"
    id: str
    start: int  # index of the first token here in the whole output
    texts: tuple[str, ...]
    at_s: tuple[float, ...]  # engine clock of each token
    finish: dict[str, Any] | None = None  # SGLang's finish_reason object on the last message; an abort: the peer could not go on
    ids: tuple[int, ...] = ()  # token ids, one for each text, where the engine has them
    extra: dict[str, Any] = Field(default_factory=dict)  # engine-specific: text that no token of this message brings, logprobs


class RelayGone(Message):
    """The client of a relayed generation left: the peer must stop. J's plugin -> J's sidecar; sidecar -> K's plugin as well."""

    type: Literal["relay_gone"] = "relay_gone"
    id: str


class Reply(Message):
    """The answer to an `Order`. Sent once it is done, which for a drain may be seconds later."""

    type: Literal["reply"] = "reply"
    id: str
    ok: bool
    detail: str = ""
    numbers: dict[str, float] = Field(default_factory=dict)


# ---------------------------------------------------------------- sidecar -> plugin


class PluginWelcome(Message):
    type: Literal["welcome"] = "welcome"
    protocol: int = PLUGIN_PROTOCOL
    sample_hz: float = 20.0
    ttft_slo_s: float
    tbt_slo_s: float


class PluginRefused(Message):
    """Instead of a welcome: the hello cannot be used. The connection is closed after it; `why` says what would be accepted."""

    type: Literal["refused"] = "refused"
    protocol: int = PLUGIN_PROTOCOL
    why: str


class Grant(Message):
    type: Literal["grant"] = "grant"
    epoch: int
    terms: GrantTerms


class Revoke(Message):
    type: Literal["revoke"] = "revoke"
    why: str


class Claim(Message):
    """Asks a prefill plugin for a room. Idempotent: the same room and claimer get the same answer."""

    type: Literal["claim"] = "claim"
    id: str
    room: int
    claimer: str


class ClaimResult(Message):
    type: Literal["claim_result"] = "claim_result"
    id: str
    room: int
    given: bool
    why: str = ""


class Order(Message):
    """One engine-side effect of a role move; answered by a `Reply` with the same id.

    drain: refuse new claims, let requests with at most `natural_end_tokens` left end, hand the rest off (if `handoff`), reply
    when wholly idle (nothing running, all four P/D queues empty; numbers: handed_off, ended, waited_s).
    undrain: serve again. hold: keep early requests of `role` until open_gate or drop_held. remap: move pages for `role`.
    restore_arena: move them back. drop_stale: forget what is cached about the prefill worker behind `bootstrap`.
    """

    type: Literal["order"] = "order"
    id: str
    what: Literal["drain", "undrain", "hold", "open_gate", "drop_held", "remap", "restore_arena", "drop_stale"]
    role: Role | None = None
    deadline_s: float = 20.0
    natural_end_tokens: int = 32
    handoff: bool = True
    bootstrap: str = ""


class Adopt(Message):
    type: Literal["adopt"] = "adopt"
    state: HandoffState


class HandoffFailed(Message):
    """No peer took it, or the peer died. `received` tokens of the output reached this side; hand off again or go on here."""

    type: Literal["handoff_failed"] = "handoff_failed"
    id: str
    why: str
    received: int


class HandoffTaken(Message):
    type: Literal["handoff_taken"] = "handoff_taken"
    id: str
    peer: str


FromPlugin = Annotated[
    PluginHello | PluginSample | ClaimWanted | ClaimAnswer | HandoffWanted | AdoptAnswer | Tokens | RelayGone | Reply,
    Field(discriminator="type"),
]
ToPlugin = Annotated[
    PluginWelcome
    | PluginRefused
    | Grant
    | Revoke
    | Claim
    | ClaimResult
    | Order
    | Adopt
    | HandoffFailed
    | HandoffTaken
    | Tokens
    | RelayGone,
    Field(discriminator="type"),
]
FROM_PLUGIN: TypeAdapter[Any] = TypeAdapter(FromPlugin)
TO_PLUGIN: TypeAdapter[Any] = TypeAdapter(ToPlugin)


def line(message: Message) -> bytes:
    """One message as a line of strict JSON. A float that JSON cannot say becomes null: unknown, never zero."""
    return json.dumps(message.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode() + b"\n"


# ---------------------------------------------------------------- sidecar <-> sidecar (HTTP, fleet secret)


class PeerClaim(Message):
    """POST /peer/claim -> PeerClaimAnswer."""

    id: str
    room: int
    claimer: str


class PeerClaimAnswer(Message):
    given: bool
    why: str = ""


class PeerHandoffLine(Message):
    """One line of the NDJSON stream that POST /peer/handoff (body: HandoffState) answers with.

    First `accepted` true or false, then tokens until one carries `finish`. Closing the request is `relay_gone`.
    """

    accepted: bool | None = None
    why: str = ""
    tokens: Tokens | None = None


class PeerDropStale(Message):
    """POST /peer/drop_stale: a prefill worker changed roles; decode workers forget what they cached about it."""

    bootstrap: str
