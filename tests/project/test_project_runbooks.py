"""Every alert has a runbook that can be followed at 3 a.m., whoever raises it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from cli.main import app
from controller.alerting.messages import kebab, runbook
from controller.alerting.rules import BURN_PAGE, PROMETHEUS_ONLY, RULES
from controller.settings_alerting import AlertingSettings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "runbooks"
HEADINGS = ["Symptoms", "Verify", "Mitigate", "Diagnose", "Resolve"]
OURS = {BURN_PAGE.name, *PROMETHEUS_ONLY, *(rule.name for rule, _ in RULES)}


def shipped() -> set[str]:
    """The alerts of the rules for Prometheus."""
    found: set[str] = set()
    for file in (ROOT / "config" / "alerts").glob("*.yml"):
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            found |= {rule["alert"] for rule in group["rules"] if "alert" in rule}
    return found


@pytest.mark.parametrize("name", sorted(OURS | shipped()))
def test_every_alert_has_a_runbook_with_each_step(name: str) -> None:
    text = (FOLDER / f"{kebab(name)}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS and text.startswith(f"# {name}\n")
    assert all(len(part.strip()) > 15 for part in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:])


def test_both_engines_link_the_same_pages_and_the_page_on_alerts_says_where_that_is_set() -> None:
    base = AlertingSettings().runbook_url
    linked = {f"{base}/{kebab(name)}.md" for name in OURS}
    assert {runbook(name, AlertingSettings()) for name in OURS} == linked
    rules = [g["rules"] for f in (ROOT / "config" / "alerts").glob("*.yml") for g in yaml.safe_load(f.read_text())["groups"]]
    urls = {rule["annotations"]["runbook_url"] for group in rules for rule in group if "alert" in rule}
    assert {url.rpartition("/")[0] for url in urls} == {base} and linked <= urls
    elsewhere = AlertingSettings(runbook_url="https://wiki.example/runbooks/")
    assert runbook("FluidPDNoLeader", elsewhere) == "https://wiki.example/runbooks/no-leader.md"
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert "`alerting.runbook_url`" in page and base in page


def test_no_runbook_belongs_to_no_alert() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {kebab(name) for name in OURS | shipped()}


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_runbook_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [t for t in re.findall(r"\]\(([^)\s#]+)\)", text) if not t.startswith("http")]
    assert [t for t in links if not (page.parent / t).exists()] == []
    group = get_command(app)
    known = set(group.commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"`fluidpd ([a-z]+)", text)) <= known
    from controller.settings import ControllerSettings

    for section, key in re.findall(r"`(alerting|policy|database|slo)\.([a-z_]+)`", text):
        model = ControllerSettings.model_fields[section].annotation
        assert key in model.model_fields, f"{section}.{key}"  # type: ignore[union-attr]


def test_the_page_on_alerts_names_every_alert() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert [name for name in sorted(OURS | shipped()) if f"`{name}`" not in page] == []
