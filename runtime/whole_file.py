"""Files that appear under their name when they are complete, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from subquad.runtime.errors import OutputError


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes ``path``, or what that links to, when the block succeeds.

    It is on the disk before the name is: a power cut leaves the old file or the new one.

    Raises:
        OutputError: the directory cannot be written, the disk is full, or ``path`` is something
            else than a file, such as a folder or ``/dev/null``, which a rename would replace.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise OutputError(f"{path} cannot be written: it is no regular file. Name a new file.")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files private; give what a plain open would have.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)
