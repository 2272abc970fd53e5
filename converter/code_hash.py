"""A hash of the code that computes results which are kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_FOLDERS = ("converter", "kernels", "passes", "runtime")
_SUFFIXES = frozenset({".py", ".cc", ".h"})
_PRESENTATION = frozenset({"converter/html_report.py", "converter/reports.py"})


@cache
def code_hash() -> str:
    """SHA-256 over names and contents; what only presents results is left out."""
    return hash_code(ROOT)


def hash_code(root: Path) -> str:
    """Of the package in ``root``."""
    digest = hashlib.sha256()
    for path in _sources(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in _SUFFIXES and name not in _PRESENTATION:
                yield path
