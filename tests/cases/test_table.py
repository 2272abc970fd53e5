"""The table of reported failures is whole, and names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {
    "spelling",
    "encoder-decoder",
    "exporter",
    "causality",
    "window cache",
    "left padding",
    "ALiBi",
    "relative bias",
    "cross padding",
    "dynamic shapes",
    "size",
    "versions",
    "shape",
    "untuned",
    "layout",
    "head dims",
    "half precision",
    "hidden tokens",
}


def rows() -> dict[str, list[str]]:
    """Kind -> tests, from the document."""
    lines = (ROOT / "docs" / "cases.md").read_text("utf-8").splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    return {
        kind.strip(): re.findall(r"`(tests/[^`]+)`", tests)
        for kind, _, tests in cells
        if kind.strip() != "kind"
    }


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_kind_has_its_row() -> None:
    assert set(rows()) == KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tests_exist(kind: str) -> None:
    tests = rows()[kind]
    assert tests
    for test in tests:
        path, name = test.split("::")
        assert name in functions(path), test
