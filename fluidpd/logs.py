"""Log lines as JSON objects, one a line, with the trace that they belong to.

Never decides what is logged: the level is the caller's.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fluidpd import trace


class LogSettings(BaseModel):
    """How a server writes its log, on stderr."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["text", "json"] = Field(default="text", description="json: an object a line, with trace ids")
    level: Literal["debug", "info", "warning", "error"] = Field(default="warning", description="the least that is written")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        said: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (now := trace.current()) is not None:
            said |= {"trace_id": now.trace_id, "span_id": now.span_id}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)


def set_up(settings: LogSettings) -> None:
    """Once, at the start of a server: every logger of the process writes so."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.format == "json" else logging.Formatter("%(message)s"))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    if settings.level != "debug":
        for noisy in ("httpx", "httpcore", "apscheduler", "websockets", "uvicorn.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
