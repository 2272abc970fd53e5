"""``docs/methods.md`` says what the method files say."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from subquad.cli import cli
from subquad.passes.methods import METHODS
from subquad.passes.methods.page import methods_page

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text("utf-8") == methods_page(), "make method-docs"


def test_every_method_has_its_section_with_a_formula_and_a_source() -> None:
    sections = methods_page().split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == [m.name for m in METHODS]
    for section in sections:
        assert "\n    out" in section and "https://arxiv.org/abs/" in section
        assert "causal to" in section


def test_command_lists_them() -> None:
    found = CliRunner().invoke(cli, ["methods"])
    assert found.exit_code == 0
    assert all(method.name in found.output for method in METHODS)
    page = CliRunner().invoke(cli, ["methods", "--markdown"])
    assert page.output == methods_page()
