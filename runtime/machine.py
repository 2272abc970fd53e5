"""Facts about this machine and process: memory, processor, versions."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def peak_rss_bytes() -> int | None:
    """Largest resident memory of this process so far, mapped files included.

    ``None`` where the system does not tell (Windows).
    """
    # getrusage also counts the parent's memory at the time of the fork; VmHWM does not.
    value = _proc_field(Path("/proc/self/status"), "VmHWM")
    if value is not None:
        return int(value.split()[0]) * 1024
    try:
        import resource
    except ModuleNotFoundError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_growth(call: Callable[[], object]) -> tuple[int, int] | None:
    """Bytes by which running ``call`` raises the peak above what is resident now, and the peak.

    ``call`` runs once in any case. ``None`` where the system does not tell (not Linux).
    """
    if sys.platform != "linux":
        call()
        return None
    # Free memory of the heap goes back to the system, so that using it again counts.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak starts anew
    before = _status_bytes("VmRSS")
    call()
    peak = _status_bytes("VmHWM")
    return max(0, peak - before), peak


def available_bytes() -> int | None:
    """Memory that can still be used; ``None`` where the system does not tell."""
    value = _proc_field(Path("/proc/meminfo"), "MemAvailable")
    return None if value is None else int(value.split()[0]) * 1024


def _status_bytes(name: str) -> int:
    value = _proc_field(Path("/proc/self/status"), name)
    assert value is not None, "every Linux has it"
    return int(value.split()[0]) * 1024


def memory_bytes() -> int | None:
    """Physical memory; ``None`` where unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def usable_cores() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def cpu_model() -> str:
    """Name of the processor, as far as the system tells."""
    name = _proc_field(Path("/proc/cpuinfo"), "model name")
    return name or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction set flags in Linux spelling; empty where unknown."""
    flags = _proc_field(Path("/proc/cpuinfo"), "flags")
    return frozenset((flags or "").split())


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Installed version of each distribution, ``None`` = not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def describe_machine() -> dict[str, Any]:
    """What a timing or a memory figure depends on."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _proc_field(path: Path, name: str) -> str | None:
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
