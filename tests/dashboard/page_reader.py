"""Reads a page as a person would: tables with their captions, fields by their names, numbers by the value behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset({"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})


@dataclass
class Shown:
    """What one element shows: its words, the number behind them, the moment, the address it leads to."""

    text: str = ""
    number: float | None = None
    time: str = ""
    href: str = ""
    classes: str = ""
    title: str = ""


@dataclass
class ReadTable:
    caption: str = ""
    heads: list[Shown] = field(default_factory=list)
    sorts: list[str | None] = field(default_factory=list)
    rows: list[list[Shown]] = field(default_factory=list)

    def column(self, at: int) -> list[str]:
        return [row[at].text for row in self.rows]


class Page(HTMLParser):
    """`tables` by id, without "table-"; `fields` by data-field; `text` is all of it."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, ReadTable] = {}
        self.fields: dict[str, Shown] = {}
        self.links: list[str] = []
        self.headings: list[str] = []
        self._table: ReadTable | None = None
        self._into: list[tuple[str, Shown]] = []
        self._words: list[str] = []
        self.feed(html)
        self.close()
        self.text = " ".join("".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {k: v or "" for k, v in attrs}
        inside = [shown for _, shown in self._into]
        if tag == "table":
            self._table = self.tables.setdefault(told.get("id", "").removeprefix("table-"), ReadTable())
        elif tag == "tr" and self._table is not None:
            self._table.rows.append([])
        elif tag in ("th", "td") and self._table is not None:
            shown = Shown(classes=told.get("class", ""), title=told.get("title", ""))
            if told.get("scope") == "col":
                self._table.heads.append(shown)
                self._table.sorts.append(told.get("aria-sort"))
            else:
                self._table.rows[-1].append(shown)
            self._into.append((tag, shown))
        elif tag in ("caption", "h1") or "data-field" in told:
            shown = Shown()
            if "data-field" in told:
                self.fields[told["data-field"]] = shown
            self._into.append((tag, shown))
        elif tag == "data":
            for shown in inside:
                shown.number = float(told["value"])
        elif tag == "time":
            for shown in inside:
                shown.time = told["datetime"]
        elif tag == "a":
            self.links.append(told.get("href", ""))
            for shown in inside:
                shown.href = told.get("href", "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._table is not None:
            self._table.rows = [row for row in self._table.rows if row]
            self._table = None
        if self._into and self._into[-1][0] == tag:
            _, shown = self._into.pop()
            shown.text = " ".join(shown.text.split())
            if tag == "caption" and self._table is not None:
                self._table.caption = shown.text
            elif tag == "h1":
                self.headings.append(shown.text)

    def handle_data(self, data: str) -> None:
        self._words.append(data)
        for _, shown in self._into:
            shown.text += data
