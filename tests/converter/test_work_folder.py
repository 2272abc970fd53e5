"""Keys of results on disk: another code, another key."""

from __future__ import annotations

from pathlib import Path

import pytest

from subquad.converter import work_folder
from subquad.converter.code_hash import ROOT, code_hash, hash_code
from subquad.converter.work_folder import key_of


def package(root: Path) -> Path:
    for name in ("converter/plan.py", "converter/html_report.py", "kernels/host/shim.cc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("a = 1\n", "utf-8")
    return root


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("converter/plan.py", True),
        ("kernels/host/shim.cc", True),
        ("passes/new.py", True),
        ("converter/html_report.py", False),
        ("converter/report.html.j2", False),
        ("commands/convert.py", False),
        ("passes/__pycache__/new.pyc", False),
    ],
)
def test_an_edit_changes_the_hash(tmp_path: Path, name: str, changes: bool) -> None:
    before = hash_code(package(tmp_path))
    assert hash_code(tmp_path) == before
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("a = 2\n", "utf-8")
    assert (hash_code(tmp_path) != before) == changes


def test_the_package_is_hashed() -> None:
    assert (ROOT / "passes" / "planner.py").is_file()
    assert code_hash() == hash_code(ROOT)


def test_keys_depend_on_facts_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"data": "x", "lengths": (1, 2)}
    key = key_of(facts)
    assert key_of({**facts}) == key != key_of({**facts, "data": "y"})
    monkeypatch.setattr(work_folder, "code_hash", lambda: "other")
    assert key_of(facts) != key
