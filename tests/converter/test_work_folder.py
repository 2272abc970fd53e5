"""Keys of results on disk: another code, another key."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from subquad.converter import work_folder
from subquad.converter.code_hash import ROOT, code_hash, hash_code
from subquad.converter.work_folder import WorkFolder, key_of, require_apart
from subquad.runtime.errors import UsageError


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


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = WorkFolder(tmp_path / "work"), WorkFolder(tmp_path / "work")
    with first.alone(), pytest.raises(UsageError, match="in use by another run"):
        with second.alone():
            pass
    with second.alone():
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]"])
def test_a_damaged_result_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    work = WorkFolder(tmp_path / "work")
    work.save("runs/a.json", {"x": 1})
    work.save_arrays("b.npz", {"x": np.ones(100)})
    assert work.load("runs/a.json") == {"x": 1}
    (work.path / "runs/a.json").write_bytes(content)
    (work.path / "b.npz").write_bytes(content or (work.path / "b.npz").read_bytes()[:300])
    with caplog.at_level(logging.WARNING):
        assert work.load("runs/a.json") is None
        assert work.load_arrays("b.npz") is None
    assert caplog.text.count("is damaged and is computed again") == 2


def test_a_work_folder_must_outlive_the_old_artifact(tmp_path: Path) -> None:
    require_apart(tmp_path / "out.work", tmp_path / "out")
    require_apart(tmp_path, tmp_path / "out")
    for inside in ("out", "out/work", "other/../out/work"):
        with pytest.raises(UsageError, match="is in the output"):
            require_apart(tmp_path / inside, tmp_path / "out")
