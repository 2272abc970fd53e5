"""GPUs to compile kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Of one multiprocessor of sm_80 and sm_90: CUDA C++ Programming Guide, "Technical Specifications
# per Compute Capability".
_REGISTERS, _THREADS = 65536, 2048
_SYSTEM_SHARED_MEMORY = 1024
"""Bytes of every block's, and not in the limit of one block."""


@dataclass(frozen=True)
class GpuTarget:
    """One kind of GPU.

    Attributes:
        name: part of the artifact's paths, e.g. ``cuda-sm_90``.
        kind: TVM's name of the interface. ``opencl`` serves to run the same schedules on a CPU, as
            a check; artifacts hold none of it.
        arch: e.g. ``sm_90``; "" for OpenCL.
        shared_memory: bytes of shared memory a block may have.
    """

    name: str
    kind: Literal["cuda", "opencl"]
    arch: str
    shared_memory: int

    @property
    def shared_scope(self) -> str:
        """TVM's name of shared memory.

        CUDA's static kind ends at 48 KiB; OpenCL has no dynamic one in TVM.
        """
        return "shared.dyn" if self.kind == "cuda" else "shared"

    def blocks_by_registers(self, threads: int, registers: int) -> int:
        """How many blocks of ``threads`` a multiprocessor holds at a time, by registers."""
        # Given out to warps by 256, that is, 8 for each thread.
        return _REGISTERS // (threads * (-(-registers // 8) * 8))

    def blocks_by_shared_memory(self, shared_memory: int) -> int:
        """The same, by the bytes of shared memory of a block."""
        whole = self.shared_memory + _SYSTEM_SHARED_MEMORY
        return whole // (shared_memory + _SYSTEM_SHARED_MEMORY)

    def blocks_by_threads(self, threads: int) -> int:
        """The same, by the threads of a block."""
        return _THREADS // threads

    def tvm_target(self) -> Any:
        """The ``tvm.target.Target``, with a host that any x86-64 processor runs."""
        from tvm.target import Target

        spec: dict[str, Any] = {
            "kind": self.kind,
            "max_shared_memory_per_block": self.shared_memory,
            "max_num_threads": 1024,
        }
        if self.arch:
            spec["arch"] = self.arch
        return Target(spec, host=Target({"kind": "llvm", "mcpu": "x86-64"}))


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory per
# block, with 1 KiB of each multiprocessor's reserved.
SM_80 = GpuTarget("cuda-sm_80", "cuda", "sm_80", 163 * 1024)
"""A100."""

SM_90 = GpuTarget("cuda-sm_90", "cuda", "sm_90", 227 * 1024)
"""H100, H200."""

CUDA_TARGETS: Mapping[str, GpuTarget] = {target.arch: target for target in (SM_80, SM_90)}

OPENCL = GpuTarget("opencl", "opencl", "", 227 * 1024)
