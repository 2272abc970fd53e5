"""An output directory appears whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from subquad.converter.atomic import atomic_directory
from subquad.runtime.errors import OutputError, UsageError


def _artifact(folder: Path, text: str = "old") -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(text)
    return folder


def _left(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_success_puts_the_files_in_place(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    with atomic_directory(destination) as folder:
        assert folder.parent == tmp_path
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not destination.exists()
    assert (destination / "sub" / "file").read_text() == "x"
    assert _left(tmp_path) == ["out"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "out") as folder:
            (folder / "file").write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_empty_destination_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert (tmp_path / "out" / "file").exists()


@pytest.mark.parametrize("problem", [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("old", [False, True])
def test_failure_leaves_everything_as_it_was(
    tmp_path: Path, problem: BaseException, old: bool
) -> None:
    destination = tmp_path / "out"
    if old:
        _artifact(destination)
    with pytest.raises(type(problem)):
        with atomic_directory(destination, overwrite=True) as folder:
            (folder / "half").write_text("x")
            raise problem
    assert _left(tmp_path) == (["out"] if old else [])
    if old:
        assert _left(destination) == ["manifest.json"]


def test_non_empty_destination_is_refused(tmp_path: Path) -> None:
    _artifact(tmp_path / "out")
    with pytest.raises(UsageError, match="not empty"):
        with atomic_directory(tmp_path / "out"):
            pytest.fail("the block must not run")
    assert (tmp_path / "out" / "manifest.json").read_text() == "old"


def test_overwrite_replaces_at_the_end(tmp_path: Path) -> None:
    destination = _artifact(tmp_path / "out")
    with atomic_directory(destination, overwrite=True) as folder:
        (folder / "manifest.json").write_text("new")
        assert (destination / "manifest.json").read_text() == "old"
    assert (destination / "manifest.json").read_text() == "new"
    assert _left(tmp_path) == ["out"]


def test_overwrite_spares_folders_that_are_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="no artifact"):
        with atomic_directory(tmp_path / "home", overwrite=True):
            pytest.fail("the block must not run")
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_failed_swap_restores_the_old_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = _artifact(tmp_path / "out")
    rename, calls = os.rename, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OutputError):
        with atomic_directory(destination, overwrite=True) as folder:
            (folder / "manifest.json").write_text("new")
    assert (destination / "manifest.json").read_text() == "old"
    assert _left(tmp_path) == ["out"]


def test_destination_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        with atomic_directory(tmp_path / "out", overwrite=True):
            pytest.fail("the block must not run")


def test_symbolic_link_keeps_pointing_at_the_result(tmp_path: Path) -> None:
    _artifact(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_directory(tmp_path / "link", overwrite=True) as folder:
        (folder / "manifest.json").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "manifest.json").read_text() == "new"


# The suite may run as root, whom permissions do not stop: parents that nobody can write to.
@pytest.mark.parametrize("parent", ["missing", "file"])
def test_unusable_parent(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="Cannot write .*out"):
        with atomic_directory(tmp_path / parent / "out"):
            pytest.fail("the block must not run")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_unwritable_parent_is_found_before_the_work() -> None:
    with pytest.raises(OutputError, match="takes no new directory"):
        with atomic_directory(Path("/proc/self/out")):
            pytest.fail("the block must not run")


@pytest.mark.parametrize(
    ("code", "text"),
    [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only"), (errno.EDQUOT, "quota")],
)
def test_write_errors_become_one_line(tmp_path: Path, code: int, text: str) -> None:
    with pytest.raises(OutputError, match=text) as caught:
        with atomic_directory(tmp_path / "out") as folder:
            raise OSError(code, os.strerror(code), str(folder / "model.onnx.data"))
    assert str(tmp_path / "out") in str(caught.value) and "\n" not in str(caught.value)
    assert ".partial" not in str(caught.value)
    assert _left(tmp_path) == []


def test_permission_error_of_the_source_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    with pytest.raises(PermissionError):
        with atomic_directory(tmp_path / "out"):
            raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/weights")


def test_permission_error_inside_the_output(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Permission denied"):
        with atomic_directory(tmp_path / "out") as folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder / "x"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appears_meanwhile_is_not_deleted(tmp_path: Path, overwrite: bool) -> None:
    destination = tmp_path / "out"
    with pytest.raises(UsageError, match="not empty"):
        with atomic_directory(destination, overwrite=overwrite) as folder:
            (folder / "manifest.json").write_text("new")
            destination.mkdir()
            (destination / "thesis.txt").write_text("years of work")
    assert (destination / "thesis.txt").read_text() == "years of work"
    assert _left(tmp_path) == ["out"]


def test_of_two_runs_the_second_does_not_replace_the_first(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    with pytest.raises(UsageError, match="not empty"), atomic_directory(destination) as second:
        (second / "manifest.json").write_text("second")
        with atomic_directory(destination) as first:
            (first / "manifest.json").write_text("first")
    assert (destination / "manifest.json").read_text() == "first"
