"""The bodies that the API takes, and records as JSON on the way out.

Never takes text for a number, and never lets a number that is none through.
"""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Path, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from controller.stream import json_bytes
from fluidpd.names import Role

# A database may refuse control characters, and a log is misled by them.
_PLAIN = r"^[^\x00-\x1f\x7f]+$"
Named = Annotated[str, Path(min_length=1, max_length=200, pattern=_PLAIN)]
NamedQuery = Annotated[str | None, Query(min_length=1, max_length=200, pattern=_PLAIN)]
MAX_TTL_S = 86_400.0

# A reason is for a colleague at 3 a.m.: five characters that are not blanks, one line.
ReasonText = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=5, max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")
]
Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False, strict=True)]


Version = Annotated[int, Field(ge=0, strict=True)]
_SEEN = "the version that was read; 0 = none stood; absent = whatever stands"


_EVERYWHERE = "in every pool of the database; needs scope admin"


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PinBody(_Body):
    role: Role
    ttl_s: Ttl
    reason: ReasonText
    expected_version: Version | None = Field(default=None, description=_SEEN)


class PauseBody(_Body):
    reason: ReasonText
    ttl_s: Ttl
    roll_back: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="open moves go back, where it is not too late for that, instead of finishing"
    )
    expected_version: Version | None = Field(default=None, description=_SEEN)
    everywhere: Annotated[bool, Field(strict=True)] = Field(default=False, description=_EVERYWHERE)


class ReasonBody(_Body):
    reason: ReasonText


class DropBody(ReasonBody):
    """Ends a pin or the pause."""

    expected_version: Version | None = Field(default=None, description=_SEEN)


class ResumeBody(DropBody):
    everywhere: Annotated[bool, Field(strict=True)] = Field(default=False, description=_EVERYWHERE)


class MoveBody(_Body):
    role: Role
    reason: ReasonText
    force: Annotated[bool, Field(strict=True)] = Field(default=False, description="past the survivor guard; needs scope admin")


class GrantBody(_Body):
    reason: ReasonText
    ttl_s: Ttl


def to_json(value: Any) -> Any:
    """Records, enums, tuples and mappings as plain JSON values; a number that is none becomes null."""
    return orjson.loads(json_bytes(value))


def reply(value: Any, status: int = 200) -> JSONResponse:
    """Strict JSON whatever the value held."""
    return _Strict(value, status, headers={"Cache-Control": "no-store"})


class _Strict(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json_bytes(content)
