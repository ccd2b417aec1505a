"""What the eye needs and colour alone does not give: letters, patterns, paper. No browser: pages and stylesheets are read."""

from __future__ import annotations

import itertools
import re

import httpx
import pytest

from dashboard.assets import STATIC_DIR
from dashboard.rendering import make_environment
from fluidpd.names import Phase

CSS = "".join(path.read_text(encoding="utf-8") for path in sorted(STATIC_DIR.glob("*.css")))
KEY = re.compile(r'<ul class="key"[^>]*>(.*?)</ul>', re.DOTALL)
SWATCH = re.compile(r'<i class="sw ([\w-]+)">(\w?)</i>')


def texture(swatch: str) -> str:
    """How a swatch of a key is drawn, its colours left out: what is left for somebody who sees none."""
    rules = re.findall(rf"\.sw\.{swatch}(?=[\s,{{])[^{{}}]*{{([^}}]*)}}", CSS)
    assert rules, f"no style for .sw.{swatch}"
    return re.sub(r"var\(--[\w-]+\)|#[0-9a-f]{3,6}", "ink", " ".join(" ".join(rules).split()))


@pytest.mark.parametrize("path", ["/", "/worker/w4", "/incident"])
async def test_what_a_key_names_differs_by_letter_or_pattern(browser: httpx.AsyncClient, path: str) -> None:
    keys = KEY.findall((await browser.get(path)).text)
    assert keys
    for key in keys:
        named = SWATCH.findall(key)
        drawn = {letter or texture(swatch) for swatch, letter in named}
        assert len(drawn) == len(named), named


def test_phases_that_follow_each_other_never_differ_by_colour_alone() -> None:
    patterned = make_environment().get_template("macros.html").module.patterned  # type: ignore[attr-defined]
    patterns = [patterned(phase.value) for phase in Phase]
    assert all(before != after for before, after in itertools.pairwise(patterns)), patterns
    for phase in Phase:
        assert ("gradient" in texture(f"ph-{phase.value}")) == bool(patterned(phase.value)), "the key shows what the bar shows"


async def test_every_pattern_that_a_page_draws_with_is_defined_on_it(browser: httpx.AsyncClient) -> None:
    for path in ("/", "/transitions", "/transition/m-05", "/worker/w4", "/incident"):
        html = (await browser.get(path)).text
        used = set(re.findall(r"url\(#([\w-]+)\)", html))
        assert used <= set(re.findall(r'<pattern id="([\w-]+)"', html)), path
        assert len(re.findall(r'<pattern id="hatch-draining"', html)) == 1, path


async def test_a_role_is_a_letter_wherever_it_has_a_colour(browser: httpx.AsyncClient) -> None:
    for path in ("/", "/fleet", "/transitions"):
        html = (await browser.get(path)).text
        badges = re.findall(r'<span class="role role-(\w+)"[^>]*>(.*?)</span>', html)
        assert badges and all(text == role[0].upper() for role, text in badges), path
    lanes = re.findall(r'<svg class="lane".*?</svg>', (await browser.get("/")).text, re.DOTALL)
    assert lanes
    for lane in lanes:
        roles = {letter for kind, letter in (("s-prefill", "P"), ("s-decode", "D")) if f'class="{kind}"' in lane}
        assert roles <= set(re.findall(r'class="in">(\w)', lane)), lane


async def test_paper_has_a_stylesheet_on_every_page_and_the_dark_theme_is_one_of_screens(browser: httpx.AsyncClient) -> None:
    for path in ("/", "/fleet", "/transitions", "/decisions", "/overrides", "/slo", "/audit", "/settings", "/incident"):
        links = re.findall(r"<link [^>]*>", (await browser.get(path)).text)
        assert 'media="print"' in links[-1], f"{path}: it comes last, so that it has the last word"
    app = (STATIC_DIR / "app.css").read_text(encoding="utf-8")
    dark = [line for line in app.splitlines() if re.search(r':root(\[data-theme="dark"\]|:not)', line)]
    assert len(dark) == 2 and all(line.startswith("@media screen") for line in dark)
