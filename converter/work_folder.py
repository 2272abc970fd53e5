"""Results of stages on disk, so that an interrupted plan goes on where it stopped.

Every result lies under a key made from all that it depends on, the code that computed it included.
What another source, other data, other options or other code need lies under other keys, so a folder
may be used again for anything.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from subquad.converter.atomic import output_errors
from subquad.converter.code_hash import code_hash
from subquad.runtime.errors import OutputError, UsageError
from subquad.runtime.jsonable import json_ready
from subquad.runtime.npz import read_npz
from subquad.runtime.whole_file import whole_file

_MARK = "subquad-work.json"

logger = logging.getLogger(__name__)


class WorkFolder:
    """A folder of results, JSON or arrays, each written at once or not at all.

    A result that cannot be read (a power cut, a full disk) counts as one that is not there, which a
    warning says.

    Raises:
        UsageError: the folder exists and holds something else.
        OutputError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise UsageError(f"Work folder {path} is a file; name a folder.")
        if not path.parent.is_dir():
            raise OutputError(f"Cannot write {path}: {path.parent} is no directory.")
        with output_errors(path):
            path.mkdir(exist_ok=True)
            if not (path / _MARK).is_file():
                if next(path.iterdir(), None) is not None:
                    raise UsageError(
                        f"Work folder {path} is not empty and was not made by subquad; name "
                        "another folder."
                    )
                self.save(_MARK, {"made_by": "subquad"})

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs out of the folder: the first to end would take it away from the others.

        Raises:
            UsageError: another run is in it.
        """
        with (self.path / _MARK).open("rb") as mark:
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"Work folder {self.path} is in use by another run. Wait until that ends, or "
                    "name another folder with --work."
                ) from error
            yield

    def load(self, name: str) -> dict[str, Any] | None:
        """A result; ``None`` if it is not there."""
        try:
            result = json.loads((self.path / name).read_text("utf-8"))
            if isinstance(result, dict):
                return result
            self._tell_damaged(name, "no object")
        except FileNotFoundError:
            pass
        # Undecodable text and malformed JSON are both ``ValueError``.
        except ValueError as error:
            self._tell_damaged(name, error)
        return None

    def _tell_damaged(self, name: str, why: object) -> None:
        logger.warning("%s is damaged and is computed again: %s", self.path / name, why)

    def save(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=1, sort_keys=True)
        self._write(name, lambda file: file.write(text.encode()))

    def load_arrays(self, name: str) -> dict[str, NDArray[Any]] | None:
        """What ``save_arrays`` wrote; ``None`` if it is not there."""
        if not (self.path / name).is_file():
            return None
        try:
            return read_npz(self.path / name)
        except UsageError as error:
            self._tell_damaged(name, error)
            return None

    def save_arrays(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._write(name, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        target = self.path / name
        with output_errors(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as stream:
            write(stream)


def require_apart(work: Path, output: Path) -> None:
    """Refuse a work folder that publishing the artifact would replace.

    Raises:
        UsageError: ``work`` is ``output`` or lies in it.
    """
    if work.resolve().is_relative_to(output.resolve()):
        raise UsageError(
            f"Work folder {work} is in the output {output}, which the artifact takes the place of. "
            "Name a folder beside it."
        )


def key_of(facts: Mapping[str, Any]) -> str:
    """A name for everything that a result depends on, this very code of the package included."""
    text = json.dumps(json_ready({"code": code_hash(), **facts}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
