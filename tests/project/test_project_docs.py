"""The documentation tells the truth about the tree, the command line and the settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from cli import reference
from cli.main import app
from fluidpd.names import Reason, Rule, WorkerState
from fluidpd.transition import MOVES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def commands(group=None, prefix: str = "") -> dict[str, str]:
    """Every command with its help, by the words a person types."""
    found = {}
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix}{name} ")
        else:
            found[f"{prefix}{name}"] = command.help or ""
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.split("#")[0] for target in targets if not target.startswith(("http://", "https://", "#", "mailto:"))]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_command_is_documented_and_every_documented_command_exists():
    documented = set(re.findall(r"^\| `fluidpd ([a-z0-9 ]+)`", (ROOT / "docs/cli.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert documented == set(commands())


@pytest.mark.parametrize("name", commands())
def test_every_command_has_examples_in_its_help(name):
    assert f"fluidpd {name}" in commands()[name]


def test_commands_used_in_the_documentation_exist():
    known = set(commands())
    for page in PAGES:
        for used in re.findall(
            r"(?:^    |`)(?:\S*/bin/)?fluidpd ([a-z]+(?: [a-z0-9]+)?)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert used in known or used.split()[0] in known, f"{page.name}: fluidpd {used}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_repeats_the_code_is_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert reference.rewritten(text) == text, "run `.venv/bin/python -m cli.reference`"


def test_every_setting_says_what_it_means():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([^`]+)` \|.*\|\s+\|$", page, re.MULTILINE) == []


def test_the_state_diagram_has_a_line_for_every_row():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert page.count("-->") >= len(MOVES)


def test_the_map_names_exactly_the_folders_there_are():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    parts = page.split("## The parts")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `([a-z]+)/` \|", parts, re.MULTILINE))
    there = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert named == there - {"build", "dist", "var"} - {path.name for path in ROOT.glob("*.egg-info")}


def test_the_import_order_in_the_documentation_is_the_enforced_one():
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    by_id = {contract["id"]: contract for contract in contracts}
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    order = "  <  ".join(layer.replace("(", "").replace(")", "") for layer in reversed(by_id["core-order"]["layers"]))
    assert order in page
    assert "  >  ".join(by_id["layers"]["layers"]) in page


def test_the_night_page_knows_every_state_and_only_real_reasons():
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    states = re.findall(r"^\| `([a-z]+)` \|", page.split("## 2.")[1].split("## 3.")[0], re.MULTILINE)
    assert states == [state.value for state in WorkerState]
    reasons = re.findall(
        r"`([a-z_]+)`", "\n".join(re.findall(r"^\|([^|]+)\|", page.split("## 3.")[1].split("## 4.")[0], re.MULTILINE))
    )
    assert set(reasons) <= {reason.value for reason in Reason} | {rule.value for rule in Rule}


def test_every_variable_the_code_reads_is_documented():
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    used: set[str] = set()
    for package in ("cli", "controller", "dashboard", "sidecar", "fluidpd", "migrations"):
        for file in (ROOT / package).rglob("*.py"):
            used |= set(re.findall(r"""["'](FLUIDPD_[A-Z_]*[A-Z])["']""", file.read_text(encoding="utf-8")))
    single = {name for name in used if "__" not in name}
    assert sorted(name for name in single if f"`{name}`" not in page) == []


def test_the_changelog_has_a_place_for_what_comes_next():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
