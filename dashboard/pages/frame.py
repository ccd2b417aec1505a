"""What stands around every page: title, navigation, badges, the time shown, and how it is kept up to date.

Never holds anything of the page itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dashboard import urls
from dashboard.assets import Asset
from dashboard.pages.badges import BadgesView
from dashboard.pages.nav import Entry
from dashboard.rendering import render
from dashboard.urls import Asked

ZONE_WORDS = {"utc": "UTC", "local": "local", "relative": "ago"}
NO_RECORDS = Markup('<span class="badge bad">NO RECORDS</span>')
ZONE_TITLES = {"utc": "Times in UTC", "local": "Times of this browser's zone", "relative": "How long ago"}


@dataclass(frozen=True, slots=True)
class Link:
    text: str
    href: str
    is_current: bool
    title: str = ""


@dataclass(frozen=True, slots=True)
class Picker:
    """The time picker: presets, two fields in Grafana's words, the way back to now. A GET form: it changes only the address."""

    words: str
    problem: str
    presets: tuple[Link, ...]
    start: str
    end: str
    kept: tuple[tuple[str, str], ...]  # hidden fields: the rest of the state
    earlier: str
    later: str  # empty on a window that ends now
    wider: str
    live: str  # where "back to live" leads; empty on a window that ends now


@dataclass(frozen=True, slots=True)
class Frame:
    """For base.html. Every page's view has one, named `frame`."""

    title: str
    theme: str  # light, dark, or "" to follow the reader's system
    tz: str
    tab: str  # the table that the address opens
    assets: dict[str, Asset]
    nav: tuple[Link, ...]
    letters: tuple[tuple[str, str, str], ...]  # (letters that follow g, where they lead, the page's name)
    badges: Markup
    is_stale: bool
    where: str
    path: str
    picker: Picker | None  # None on pages that show no stretch of time
    zones: tuple[Link, ...]
    badges_url: str
    stream_url: str
    is_live: bool


def frame(
    asked: Asked,
    *,
    page: str,
    path: str,
    title: str,
    theme: str,
    assets: dict[str, Asset],
    entries: Sequence[Entry],
    badges: BadgesView | None,  # None: the records cannot be read
    where: str,
    has_time: bool,
) -> Frame:
    return Frame(
        title=title,
        theme=theme,
        tz=asked.tz,
        tab=asked.tab,
        assets=assets,
        nav=tuple(Link(e.label, asked.elsewhere(e.path), e.key == page, f"g {e.letters[0]}") for e in entries),
        letters=tuple((e.letters, asked.elsewhere(e.path), e.label) for e in entries),
        badges=NO_RECORDS if badges is None else render(badges),
        is_stale=badges is not None and badges.is_stale,
        where=where,
        path=path,
        picker=picker(asked, path) if has_time else None,
        zones=tuple(
            Link(ZONE_WORDS[z], asked.href(path, tz="" if z == "utc" else z), z == asked.tz, ZONE_TITLES[z]) for z in urls.ZONES
        ),
        badges_url=urls.PART.format(name="badges"),
        stream_url=urls.STREAM,
        is_live=asked.window.is_live,
    )


def picker(asked: Asked, path: str) -> Picker:
    window = asked.window

    def absolute(since_s: float, until_s: float) -> str:
        return asked.href(path, from_=urls.iso_minute(since_s), to=urls.iso_minute(until_s))

    half = window.length_s / 2
    return Picker(
        words=window.words,
        problem=window.problem,
        presets=tuple(
            Link(name, asked.href(path, from_=f"now-{name}", to=urls.NOW), window.key == (f"now-{name}", urls.NOW))
            for name in urls.PRESETS_S
        ),
        start=window.start,
        end=window.end,
        kept=tuple((k, v) for k, v in asked.state.items() if k not in ("from", "to")),
        earlier=absolute(window.since_s - half, window.until_s - half),
        later="" if window.is_live else absolute(window.since_s + half, window.until_s + half),
        wider=absolute(window.since_s - half, window.until_s + half),
        live="" if window.is_live else asked.href(path, from_="", to=""),
    )
