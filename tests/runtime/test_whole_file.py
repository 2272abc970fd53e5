"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from subquad.runtime.errors import OutputError
from subquad.runtime.whole_file import whole_file


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "plan.json"
    link.symlink_to(tmp_path / "elsewhere" / "real.json")
    with whole_file(link) as stream:
        stream.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "real.json").read_text() == "new"


def test_only_files_are_replaced(tmp_path: Path) -> None:
    """As root, a rename would put a file in the place of ``/dev/null``."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="no regular file"), whole_file(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()
