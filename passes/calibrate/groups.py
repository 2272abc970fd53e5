"""Kinds of documents: a limit that holds for a mixture may be missed on one part of it.

Every ``--data`` is a group of its own; of a folder, every subfolder is one, and the files directly
in it are one more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from subquad.runtime.errors import UsageError

MOST_GROUPS = 8
"""Each needs a row of every length in both halves; more kinds than this are judged as one."""


@dataclass(frozen=True)
class DocumentGroup:
    """Files of one kind.

    Attributes:
        name: of the file or folder; its path where names repeat.
        files: in the order of their names.
    """

    name: str
    files: tuple[Path, ...]


def document_groups(paths: Sequence[Path]) -> tuple[list[DocumentGroup], list[str]]:
    """The groups of ``paths``, and what a reader must know of them.

    Raises:
        UsageError: no such file or folder, a folder without files, or a file in two groups.
    """
    found = [group for path in dict.fromkeys(paths) for group in _groups(path)]
    _check_disjoint(found)
    if len(found) <= MOST_GROUPS:
        names = [path.name for path, _ in found]
        groups = [
            DocumentGroup(path.name if names.count(path.name) == 1 else str(path), files)
            for path, files in found
        ]
        return groups, []
    note = (
        f"{len(found)} kinds of documents (each --data, and each subfolder of one, is a kind) are "
        f"judged as one: at most {MOST_GROUPS} are told apart"
    )
    every = tuple(file for _, files in found for file in files)
    return [DocumentGroup("all", every)], [note]


def _check_disjoint(found: Sequence[tuple[Path, tuple[Path, ...]]]) -> None:
    """Groups are split each for itself: a file in two could be measured on and judged by."""
    seen: set[Path] = set()
    for _, files in found:
        for file in files:
            if file.resolve() in seen:
                raise UsageError(
                    f"Data {file} are given twice, alone or within a folder: documents that are "
                    "measured on must not be held out. Give every file once."
                )
            seen.add(file.resolve())


def _groups(path: Path) -> Iterator[tuple[Path, tuple[Path, ...]]]:
    if path.is_file():
        yield path, (path,)
        return
    if not path.is_dir():
        raise UsageError(f"No such file or folder: {path}")
    below = sorted(file for file in path.rglob("*") if file.is_file())
    # Neither hidden files nor what lies in hidden folders, such as .git.
    shown = [
        file
        for file in below
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not shown:
        raise UsageError(f"{path} holds no files.")
    by_folder: dict[Path, list[Path]] = {}
    for file in shown:
        inner = file.relative_to(path).parts[:-1]
        by_folder.setdefault(path / inner[0] if inner else path, []).append(file)
    for folder, files in sorted(by_folder.items()):
        yield folder, tuple(files)
