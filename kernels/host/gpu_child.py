"""Compile a GPU kernel with TVM and nvcc: the part of the child process that knows CUDA.

TVM writes CUDA source and host code. ``nvcc`` makes a cubin of the source, without a GPU, and says
what each kernel uses; the host code, which checks arguments, sizes grids and takes workspace, is
linked with the cubin into a library for ``tvm_ffi.load_module``.

ptxas does not know of dynamic shared memory and saves registers for blocks of threads that have no
room in it. A kernel that spills for that is compiled again, with the number of blocks that have.

TVM packs a cubin only where its CUDA runtime is loaded, which needs the driver's library. Where
there is none, a stub stands in that knows the nine functions by name and fails all of them.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subquad.kernels.gpu import GpuTarget

DRIVER = "libcuda.so.1"
_DRIVER_FUNCTIONS = (
    "cuDeviceGetName",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeTiled",
)
_NO_DEVICE = 100

# -fmad is on by default, as in every other kernel; no fast math: its tanh has 11 bits.
_NVCC_FLAGS = ("-cubin", "-O3", "-std=c++17", "-Xptxas", "-v")
_LINK_FLAGS = ("-shared", "-s", "-Wl,--build-id=none")


DYNAMIC_SHARED_MEMORY = "tirx.use_dyn_shared_memory"


@dataclass(frozen=True)
class Launch:
    """One kernel launch inside a function.

    Attributes:
        arguments: how many the device code takes.
        parameters: TVM's tags of what follows them at the call: ``blockIdx.x``, ...
        values: of these, as TVM prints them, in the sizes of the arguments.
        dynamic_shared_memory: bytes.
    """

    arguments: int
    parameters: tuple[str, ...]
    values: tuple[str, ...]
    dynamic_shared_memory: int

    @property
    def threads(self) -> int:
        """Of a block."""
        pairs = zip(self.parameters, self.values, strict=True)
        return math.prod(int(value) for tag, value in pairs if tag.startswith("threadIdx"))


@dataclass(frozen=True)
class Lowered:
    """A compiled function.

    Attributes:
        executable: TVM's, whose host module imports the device module.
        launches: kernel name -> its launch, in order.
    """

    executable: Any
    launches: Mapping[str, Launch]


def lower(function: Any, target: GpuTarget) -> Lowered:
    """Compile ``function``.

    Without TVM's elimination of common expressions: it binds numbers read from shared memory to
    names, which its own merging of shared memory then refuses. Device compilers do the same later.
    """
    import tvm
    from tvm.ir.instrument import pass_instrument

    split: list[Any] = []

    @pass_instrument
    class _AfterSplit:
        def run_after_pass(self, module: Any, info: Any) -> None:
            if info.name == "tirx.SplitHostDevice":
                split.append(module)

    config = {"tirx.disable_cse_tir": True}
    context = tvm.transform.PassContext(config=config, instruments=[_AfterSplit()])
    tvm_target = target.tvm_target()
    with tvm_target, context:
        executable = tvm.compile(function, target=tvm_target)
    return Lowered(executable, _launches(split[-1]))


def _launches(module: Any) -> dict[str, Launch]:
    """The launches in the host functions of a module whose device functions are split off."""
    import tvm
    from tvm_ffi import structural_walk

    parameters = {}
    hosts = []
    for function in module.functions.values():
        if "tirx.kernel_launch_params" in function.attrs:
            name = str(function.attrs["global_symbol"])
            parameters[name] = (
                len(function.params),
                tuple(str(tag) for tag in function.attrs["tirx.kernel_launch_params"]),
            )
        else:
            hosts.append(function)
    launches: dict[str, Launch] = {}

    def visit(call: Any) -> None:
        # A launch is a call whose first argument is the kernel's name.
        name = getattr(call.args[0], "value", None) if call.args else None
        if name not in parameters:
            return
        count, tags = parameters[name]
        given = call.args[1 + count :]
        dynamic = [
            int(value)
            for tag, value in zip(tags, given, strict=True)
            if tag == DYNAMIC_SHARED_MEMORY
        ]
        launches[name] = Launch(count, tags, tuple(str(value) for value in given), sum(dynamic))

    for host in hosts:
        structural_walk(host.body, (tvm.ir.Call, visit))
    if set(launches) != set(parameters):
        raise RuntimeError(f"kernels {set(parameters)}, but launches of {set(launches)}")
    return launches


def load_driver(compiler: str) -> None:
    """Load the driver's library, or the stub; before ``import tvm``.

    Raises:
        OSError, subprocess.CalledProcessError: the stub cannot be made.
    """
    try:
        ctypes.CDLL(DRIVER, mode=ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass
    with tempfile.TemporaryDirectory(prefix="subquad-driver-") as name:
        source, library = Path(name, "stub.cc"), Path(name, DRIVER)
        lines = [f'extern "C" int {f}() {{ return {_NO_DEVICE}; }}' for f in _DRIVER_FUNCTIONS]
        source.write_text("\n".join(lines) + "\n", "utf-8")
        # What is loaded under a soname serves whoever asks for that name later.
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", "-o", str(library)]
        subprocess.run([*command, str(source)], check=True, capture_output=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def compile_library(function: Any, target: GpuTarget, library: Path, compiler: str) -> None:
    """Write ``library``, and beside it, with the suffix ``.json``, what its kernels use.

    Args:
        function: the ``PrimFunc``.
        compiler: the C++ compiler.

    Raises:
        ValueError: a kernel needs more shared memory than the GPU has.
        RuntimeError: nvcc or the linker failed; or TVM did.
    """
    import tvm_ffi

    reports: list[str] = []
    blocks: dict[str, int] = {}

    def compile_cuda(source: Any) -> bytes:
        binary, report = _nvcc(bound_launches(str(source), blocks), target)
        reports.append(report)
        return binary

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cuda, override=True)
    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        raise RuntimeError(
            "TVM's CUDA runtime did not load (libtvm_runtime_cuda.so and the CUDA runtime library "
            "it is linked with), so no cubin can be packed"
        )
    lowered = lower(function, target)
    usage = parse_usage(reports[-1])
    blocks = blocks_in_vain(lowered.launches, usage, target)
    if blocks:
        lowered = lower(function, target)
        usage = parse_usage(reports[-1])
    kernels = {}
    for name, launch in lowered.launches.items():
        kernel = asdict(launch) | usage[name]
        shared = kernel["static_shared_memory"] + kernel["dynamic_shared_memory"]
        if shared > target.shared_memory:
            raise ValueError(
                f"{name} needs {shared} bytes of shared memory, a block of {target.arch} has "
                f"{target.shared_memory}"
            )
        kernels[name] = kernel
    final = library.with_suffix(".json")
    with tempfile.TemporaryDirectory(prefix="subquad-cuda-") as name:

        def link(output: str, objects: list[str], **_: Any) -> None:
            done = subprocess.run(
                [compiler, *_LINK_FLAGS, "-o", output, *objects], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"the linker failed: {done.stderr.strip()[:300]}")

        temporary = Path(name, "library.so")
        lowered.executable.export_library(str(temporary), fcompile=link, workspace_dir=name)
        part = library.with_name(f"{library.stem}.{os.getpid()}.part")
        shutil.copyfile(temporary, part)
        os.replace(part, library)
    # Last: where it is, the library is whole.
    part = final.with_name(f"{final.stem}.{os.getpid()}.part.json")
    part.write_text(json.dumps({"kernels": kernels}, indent=1, sort_keys=True) + "\n", "utf-8")
    os.replace(part, final)


def blocks_in_vain(
    launches: Mapping[str, Launch], usage: Mapping[str, Mapping[str, int]], target: GpuTarget
) -> dict[str, int]:
    """Kernels that spill although their registers let more blocks onto a multiprocessor than shared
    memory does -> the number that shared memory does."""
    found = {}
    for name, launch in launches.items():
        used = usage[name]
        shared = launch.dynamic_shared_memory + used["static_shared_memory"]
        blocks = target.blocks_by_shared_memory(shared)
        spilled = used["spill_stores"] + used["spill_loads"] > 0
        # None at all: refused later.
        if spilled and 0 < blocks < target.blocks_by_registers(launch.threads, used["registers"]):
            found[name] = blocks
    return found


def bound_launches(source: str, blocks: Mapping[str, int]) -> str:
    """CUDA source that asks for so many blocks at a time, of these kernels.

    CUDA C++ Programming Guide, "Launch Bounds": registers may then be as many as let them fit.

    Raises:
        RuntimeError: a kernel is not declared in the form that TVM writes.
    """
    for name, number in blocks.items():
        declared = re.compile(rf"(__launch_bounds__\(\d+)(?=\) {re.escape(name)}\()")
        source, count = declared.subn(rf"\g<1>, {number}", source)
        if not count:
            raise RuntimeError(f"TVM declared {name} in a form that is not known")
    return source


def _nvcc(source: str, target: GpuTarget) -> tuple[bytes, str]:
    """Cubin, and what ptxas says of it."""
    with tempfile.TemporaryDirectory(prefix="subquad-nvcc-") as name:
        # Relative names, so that no path of this machine gets into the cubin.
        Path(name, "kernels.cu").write_text(source, "utf-8")
        command = ["nvcc", *_NVCC_FLAGS, f"-arch={target.arch}", "-o", "kernels.cubin"]
        done = subprocess.run(
            [*command, "kernels.cu"],
            cwd=name,
            capture_output=True,
            text=True,
            env=os.environ | {"LC_ALL": "C"},
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            raise RuntimeError(f"nvcc failed: {'; '.join(lines[:3]) or done.stderr.strip()[:300]}")
        return Path(name, "kernels.cubin").read_bytes(), done.stderr


def parse_usage(report: str) -> dict[str, dict[str, int]]:
    """Kernel -> registers, spilled bytes and static shared memory, from ``ptxas -v``."""
    usage = {}
    for part in report.split("Compiling entry function ")[1:]:
        name = re.match(r"'([^']+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if name is None or spills is None or registers is None:
            raise RuntimeError(f"ptxas reported in a form that is not known: {part[:200]!r}")
        usage[name[1]] = {
            "registers": int(registers[1]),
            "spill_stores": int(spills[1]),
            "spill_loads": int(spills[2]),
            "static_shared_memory": int(shared[1]) if shared else 0,
        }
    return usage
