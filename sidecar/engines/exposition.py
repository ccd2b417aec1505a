"""A worker's Prometheus page as series by name: the text format and OpenMetrics, in whatever shape a proxy left it.

Never guesses: a line that cannot be read costs itself alone and is counted, and a page that is none raises Unreadable.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fluidpd.names import PageTrouble
from sidecar.engines.loads import Unreadable

# A real page is about 0.1 MB, one of eight data-parallel ranks below 1 MB. Reading more would hold up what shares the process.
PAGE_LIMIT_BYTES = 4 * 2**20
WANTED_LIMIT_BYTES = 2**19  # of lines that are taken apart, which is slow: a real page has about 0.02 MB of them
LINE_LIMIT = 4096
_GZIP = b"\x1f\x8b"
# Only lines of an engine, under either spelling: exporters of OpenTelemetry and some proxies write an underscore for the colon.
_ENGINE_LINE = re.compile(rb"(?m)^[ \t]*((?:sglang|vllm)[:_][a-zA-Z0-9_:]*)[^\n]*")


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: Any  # a float, or the text where it is not a number


@dataclass(frozen=True, slots=True)
class Page:
    """A page by metric name as it is spelled there, and how many of its lines were not used, by why."""

    series: Mapping[str, tuple[Series, ...]]
    rejected: Mapping[PageTrouble, int] = field(default_factory=dict)

    def spelled(self, name: str) -> str | None:
        """A metric's name as it is on this page: with its colon, or with an underscore in its place; None if it is not."""
        return next((n for n in spellings(name) if n in self.series), None)


def spellings(name: str) -> tuple[str, ...]:
    """The engine's own first: where a page has both, the other is a copy of it."""
    return (name, name.replace(":", "_", 1)) if ":" in name else (name,)


def parse_page(body: str | bytes, status: int, wanted: Set[str]) -> Page:
    """The series named in `wanted`, in any spelling. Explicit timestamps and exemplars are read over: time is the receiver's.

    Raises Unreadable for an error status, an empty or oversized body, an HTML page, what is no text, and a page without one
    metric of an engine.
    """
    raw = _text_of(body, status)
    series: dict[str, list[Series]] = {}
    rejected: Counter[PageTrouble] = Counter()
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    names = {spelled for name in wanted for spelled in spellings(name)}
    is_engine, taken = False, 0
    for name, line in _lines(raw):
        is_engine = True
        if name not in names:
            continue
        taken += len(line)
        if taken > WANTED_LIMIT_BYTES:
            raise Unreadable(f"/metrics has more than {WANTED_LIMIT_BYTES // 2**10} KiB of {name}", PageTrouble.OVERSIZED)
        one = _series(name, line)
        if isinstance(one.value, str):
            rejected[PageTrouble.MALFORMED_LINE] += 1
        key = (name, tuple(sorted(one.labels.items())))
        if key in seen:
            rejected[PageTrouble.DUPLICATE_SERIES] += 1
        seen.add(key)
        series.setdefault(name, []).append(one)
    if not is_engine:
        raise Unreadable("/metrics has no sglang: or vllm: metric", PageTrouble.NO_METRIC)
    return Page({name: tuple(found) for name, found in series.items()}, rejected)


def _text_of(body: str | bytes, status: int) -> bytes:
    raw = body.encode("utf-8", "replace") if isinstance(body, str) else body
    if status != 200:
        raise Unreadable(f"/metrics answered HTTP {status}", PageTrouble.HTTP_STATUS)
    if raw.startswith(_GZIP):  # a proxy that compresses and does not say so
        raw = _unzipped(raw)
    if len(raw) > PAGE_LIMIT_BYTES:
        raise oversized()
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    start = raw[:256].lstrip()
    if not raw.strip():
        raise Unreadable("/metrics answered an empty page", PageTrouble.EMPTY)
    if start.startswith(b"<"):
        raise Unreadable("/metrics answered an HTML page", PageTrouble.HTML)
    if b"\0" in raw:
        raise Unreadable("/metrics answered something that is not text", PageTrouble.NOT_TEXT)
    return raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def oversized() -> Unreadable:
    return Unreadable(f"/metrics answered more than {PAGE_LIMIT_BYTES // 2**20} MiB", PageTrouble.OVERSIZED)


def _unzipped(raw: bytes) -> bytes:
    """At most one byte above the limit is made: a small page may unfold into a large one."""
    unfold = zlib.decompressobj(wbits=31)
    try:
        text = unfold.decompress(raw, PAGE_LIMIT_BYTES + 1)
    except zlib.error as error:
        raise Unreadable(f"/metrics answered gzip that cannot be read ({error})", PageTrouble.NOT_TEXT) from error
    if not unfold.eof and len(text) <= PAGE_LIMIT_BYTES:
        raise Unreadable("/metrics answered gzip that ends too early", PageTrouble.NOT_TEXT)
    return text


def _lines(raw: bytes) -> Iterator[tuple[str, str]]:
    for match in _ENGINE_LINE.finditer(raw):
        yield match[1].decode("ascii"), match[0].decode("utf-8", "replace")


def _series(name: str, line: str) -> Series:
    """One line by the library's parser; where it gives up, the rest of the line stands for the value: no reader takes text."""
    if len(line) > LINE_LIMIT:
        return Series({}, f"a line of {len(line)} characters")
    try:
        samples = [sample for family in text_string_to_metric_families(line + "\n") for sample in family.samples]
    except (ValueError, IndexError):
        samples = []
    if len(samples) != 1 or samples[0].name != name:
        return Series({}, line.strip()[len(name) :].strip())
    return Series(samples[0].labels, samples[0].value)
