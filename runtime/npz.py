"""Arrays by name in ``.npz`` files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.errors import UsageError
from subquad.runtime.whole_file import whole_file


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a ``.npz`` file; pickled objects are refused.

    Raises:
        UsageError: no such file, or not a readable ``.npz``.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UsageError(f"{path} holds one array; save with numpy.savez(file, name=...).")
        with archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise UsageError(f"No such file: {path}") from error
    # RuntimeError and NotImplementedError: archives that are encrypted or packed in another way.
    except (
        OSError,
        ValueError,
        EOFError,
        RuntimeError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise UsageError(f"{path} is not a readable .npz file: {error}") from error


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a ``.npz`` file; same arrays, same bytes.

    Raises:
        OutputError: as ``whole_file``.
    """
    # Not numpy.savez: an output called "file" would clash with its parameter.
    with whole_file(path) as stream, zipfile.ZipFile(stream, "w") as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
