"""All-or-nothing output directories."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from subquad.runtime.errors import OutputError, UsageError
from subquad.runtime.manifest import MANIFEST_NAME
from subquad.runtime.pair import is_pair

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def output_errors(folder: Path, shown_as: Path | None = None) -> Iterator[None]:
    """Turn "disk full", "read-only" and "permission denied" into one clear line.

    Permission errors on files outside ``folder`` (say, of the source) pass unchanged.

    Args:
        folder: where the block writes.
        shown_as: what the user calls it, when ``folder`` is a temporary stand-in.

    Raises:
        OutputError: the block failed to write into ``folder``.
    """
    shown = shown_as or folder
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutputError(
                f"Cannot write {shown}: {error.strerror}. "
                "Nothing was written; free space or choose another output directory."
            ) from error
        concerned = Path(os.fsdecode(error.filename)) if error.filename else folder
        inside = concerned == folder.parent or concerned.is_relative_to(folder)
        if error.errno == errno.EROFS or (error.errno in _FORBIDDEN and inside):
            raise OutputError(
                f"Cannot write {shown}: {error.strerror}. Choose a writable output directory."
            ) from error
        raise


@contextmanager
def atomic_directory(destination: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``destination`` when the block succeeds.

    The temporary directory lies next to the destination, hence on the same filesystem. On any
    exit but success, ``KeyboardInterrupt`` included, it is removed and the destination is as
    before. With ``overwrite``, an older artifact is moved aside and deleted only after the new one
    stands in its place. What others put into the destination in the meantime is treated as if it
    had been there from the start.

    Raises:
        UsageError: destination is a file, or not empty and ``overwrite`` is unset, or not empty
            and no artifact (overwriting deletes everything in it).
        OutputError: the parent is missing or not writable; disk full while writing.
    """
    destination = Path(os.path.abspath(destination))
    if destination.is_symlink():
        destination = destination.resolve()
    parent = destination.parent
    _check_destination(destination, overwrite=overwrite)
    try:
        temporary = Path(
            tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=".partial", dir=parent)
        )
    except OSError as error:
        # Any reason counts here: special filesystems answer "no such file" to a mkdir.
        raise OutputError(
            f"Cannot write {destination}: {parent} takes no new directory ({error.strerror}). "
            "Choose a writable output directory."
        ) from error
    try:
        with output_errors(temporary, shown_as=destination):
            yield temporary
            os.chmod(temporary, 0o777 & ~_umask())
            _sync_tree(temporary)
        # Once more: others may have written there in the meantime, which can be hours.
        _check_destination(destination, overwrite=overwrite)
        with output_errors(destination):
            _put_in_place(temporary, destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_destination(destination: Path, *, overwrite: bool) -> None:
    parent = destination.parent
    if not parent.is_dir():
        problem = "is not a directory" if parent.exists() else "does not exist"
        raise OutputError(f"Cannot write {destination}: {parent} {problem}. Create it first.")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise UsageError(
            f"{destination} exists and is a file, but the output is a directory. "
            "Choose another name."
        )
    with output_errors(destination):
        empty = next(destination.iterdir(), None) is None
    if empty:
        return
    if not overwrite:
        raise UsageError(
            f"{destination} exists and is not empty. Choose another directory, or overwrite it."
        )
    if not (destination / MANIFEST_NAME).is_file() and not is_pair(destination):
        raise UsageError(
            f"{destination} is not empty and holds no {MANIFEST_NAME}, so it is no artifact. "
            "Overwriting would delete files that are not ours; choose another directory."
        )


def _put_in_place(temporary: Path, destination: Path) -> None:
    if not destination.exists():
        os.rename(temporary, destination)
    elif next(destination.iterdir(), None) is None:
        os.rmdir(destination)
        os.rename(temporary, destination)
    else:
        # A directory cannot be renamed over a non-empty one: move the old one aside first.
        aside = Path(
            tempfile.mkdtemp(
                prefix=f".{destination.name}.", suffix=".replaced", dir=destination.parent
            )
        )
        os.rename(destination, aside / "old")
        try:
            os.rename(temporary, destination)
        except BaseException:
            os.rename(aside / "old", destination)
            os.rmdir(aside)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    _sync(destination.parent)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some filesystems cannot sync directories; the rename is still atomic.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
