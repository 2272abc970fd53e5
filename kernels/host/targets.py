"""Instruction sets that kernels are compiled for."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from subquad.kernels.kernel import CpuTarget
from subquad.runtime.machine import cpu_flags

X86_64_V3 = CpuTarget(
    name="x86-64-v3",
    mcpu="x86-64-v3",
    flags=("avx", "avx2", "bmi1", "bmi2", "f16c", "fma"),
)
"""Intel since Haswell (2013), AMD since Zen (2017)."""

X86_64_V4 = CpuTarget(
    name="x86-64-v4",
    mcpu="x86-64-v4",
    # LLVM's own choice for this level is to use half of each register.
    features=("-prefer-256-bit",),
    flags=(*X86_64_V3.flags, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
)
"""AVX-512: Intel servers since Skylake (2017), AMD since Zen 4 (2022)."""

CPU_TARGETS: Mapping[str, tuple[CpuTarget, ...]] = {"x86_64": (X86_64_V3, X86_64_V4)}
"""Machine (``platform.machine()``) -> its targets, each needing more than the one before; the
first is portable and part of every artifact."""


def host_targets() -> tuple[CpuTarget, ...]:
    """What an artifact built here holds: the portable target, and the best this machine runs."""
    known = CPU_TARGETS[platform.machine()]
    flags = cpu_flags()
    able = [target for target in known if flags.issuperset(target.flags)]
    return tuple(dict.fromkeys((known[0], *able[-1:])))
