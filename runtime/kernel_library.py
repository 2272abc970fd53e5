"""Which compiled kernel library of an artifact can run here."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from subquad.runtime.errors import IntegrityError, TargetUnavailableError, UsageError
from subquad.runtime.machine import cpu_flags
from subquad.runtime.manifest import KernelLibrary, Manifest

KernelMode = Literal["auto", "off", "require"]
"""``auto``: a library where one fits; ``off``: function bodies only; ``require``: kernels for
every attention, or an error."""

KERNEL_MODES: tuple[KernelMode, ...] = get_args(KernelMode)


@dataclass(frozen=True)
class KernelChoice:
    """The library to load.

    Attributes:
        library: ``None`` = none.
        paths: of the library file; empty = none.
        reason: why none.
    """

    library: KernelLibrary | None = None
    paths: tuple[Path, ...] = ()
    reason: str = ""


def choose_kernels(
    folder: Path, manifest: Manifest, kernels: KernelMode, *, provider: str = "cpu"
) -> KernelChoice:
    """The best library of the artifact for this machine.

    Args:
        folder: the artifact directory, its files checked already.
        manifest: its manifest.
        kernels: see ``KernelMode``.
        provider: of the session, as ``open_session`` takes it.

    Raises:
        UsageError: unknown mode.
        IntegrityError: the library is no file of the manifest.
        TargetUnavailableError: kernels are required, and some attention would have none.
    """
    if kernels not in KERNEL_MODES:
        raise UsageError(f"kernels must be one of {', '.join(KERNEL_MODES)}, got {kernels!r}.")
    if kernels == "off":
        return KernelChoice(reason="kernels are switched off")
    choice = _choose(folder, manifest, provider)
    if kernels == "require":
        _require(manifest, choice)
    return choice


def _choose(folder: Path, manifest: Manifest, provider: str) -> KernelChoice:
    if not manifest.kernels:
        return KernelChoice(reason="the artifact has no kernel library")
    if not provider.lower().startswith("cpu"):
        return KernelChoice(reason=f"the kernels of this artifact do not run on {provider}")
    system = this_platform()
    for_system = [library for library in manifest.kernels if library.platform == system]
    if not for_system:
        built = ", ".join(sorted({library.platform for library in manifest.kernels}))
        return KernelChoice(reason=f"kernels were built for {built}, this is {system}")
    flags = cpu_flags()
    able = [library for library in for_system if flags.issuperset(library.flags)]
    if not able:
        lacking = " ".join(sorted(set(for_system[0].flags) - flags))
        return KernelChoice(reason=f"this processor lacks {lacking}, which the kernels use")
    # Of what runs, that which asks for most.
    library = max(able, key=lambda item: len(item.flags))
    if library.path not in manifest.files:
        raise IntegrityError(
            f"{library.path} is a kernel library but no file of the manifest. Convert again."
        )
    return KernelChoice(library, ((folder / library.path).resolve(),))


def this_platform() -> str:
    """Operating system and processor family, e.g. ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


def _require(manifest: Manifest, choice: KernelChoice) -> None:
    if choice.library is None:
        hint = "" if manifest.kernels else " Convert with --kernels cpu."
        raise TargetUnavailableError(f"Kernels are required, but {choice.reason}.{hint}")
    without = [record for record in manifest.sites if not record.kernel]
    if without:
        raise TargetUnavailableError(
            f"Kernels are required, but {len(without)} of {len(manifest.sites)} attentions have "
            f"none; {without[0].site['name']}: {without[0].reason or 'not built'}."
        )
