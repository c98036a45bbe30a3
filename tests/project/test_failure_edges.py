"""Every row of the failure matrix is shown by a test, and every test that names a row names one that there is."""

import ast
import json
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = TESTS / "data" / "cases" / "failure-edges.jsonl"

WAITING: dict[str, str] = {}
"""Rows about what is not built yet, and what that is. Nothing else may wait."""


def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def shown_rows() -> Counter[str]:
    """How many tests bear the marker of each row."""
    return Counter(
        row
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        for row in rows_of(decorator)
    )


def rows_of(decorator: ast.expr) -> list[str]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("failure_edge"):
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


def test_every_row_is_shown_or_waits_for_what_is_not_built() -> None:
    shown = shown_rows()
    assert {row["row"]: row["waits_for"] for row in rows() if "waits_for" in row} == WAITING
    missing = [row["row"] for row in rows() if "waits_for" not in row and not shown[row["row"]]]
    assert missing == []


def test_what_waits_is_shown_by_nobody() -> None:
    """A row whose test has come waits no longer."""
    assert [row for row in WAITING if shown_rows()[row]] == []


def test_every_marker_names_a_row() -> None:
    names = [row["row"] for row in rows()]
    assert len(names) == len(set(names))
    assert sorted(set(shown_rows()) - set(names)) == []
