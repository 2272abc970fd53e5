"""The CUDA kernels of an artifact as functions over tensors of any DLPack library.

They are not part of the ONNX graph, whose kernels are for CPUs: they serve hosts that call
attention themselves. They have compiled, and their schedules have run on a CPU, but **they have not
run on a GPU** (``docs/cuda.md``).

Needs an NVIDIA driver, ``apache-tvm-ffi``, and of ``apache-tvm`` the two runtime libraries; TVM is
not imported.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from subquad.runtime.artifact import check_files, open_manifest
from subquad.runtime.errors import IntegrityError, TargetUnavailableError, UsageError

DRIVER = "libcuda.so.1"
RUN_ON_A_GPU = False
"""Whether these kernels have ever run on a GPU; what documents and ``doctor`` say."""
CUDA_ARCHS = ("sm_80", "sm_90")
"""What ``convert --target`` compiles for."""
INDEX_NAME = "kernels.json"
"""In ``kernels/cuda-sm_XX/``: ``{"arch": "sm_90", "kernels": [...]}``."""

_MAJOR, _MINOR = 75, 76
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*`` of the driver's interface."""


@dataclass(frozen=True)
class GpuKernel:
    """One attention operator as a function.

    Attributes:
        operator: operator and overload, as in the manifest's sites.
        inputs, outputs: names in the order of the call.
        description: the entry of the index: shapes, launches, registers, shared memory.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    description: Mapping[str, Any]
    _function: Any

    def __call__(self, **tensors: Any) -> None:
        """Compute into the given outputs; torch tensors on torch's current stream.

        Args:
            tensors: every input and output by name: contiguous CUDA tensors of torch, CuPy, JAX or
                whatever else exports DLPack.

        Raises:
            UsageError: a tensor is missing or unknown.
            TargetUnavailableError: the kernel refused a tensor, or the launch failed.
        """
        names = (*self.inputs, *self.outputs)
        if set(tensors) != set(names):
            raise UsageError(f"{self.operator} takes {', '.join(names)}; got {', '.join(tensors)}.")
        try:
            self._function(*(tensors[name] for name in names))
        # TVM raises these for a refused argument and for an error of the driver.
        except (RuntimeError, TypeError, ValueError) as error:
            raise TargetUnavailableError(f"{self.operator}: {error}") from error


def gpu_targets(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Architectures that the artifact has CUDA kernels for, e.g. ``sm_90``."""
    folder, _ = open_manifest(path)
    return tuple(_index(item)["arch"] for item in _indices(folder))


def load_gpu_kernels(path: str | os.PathLike[str], *, device: int = 0) -> dict[str, GpuKernel]:
    """Load the kernels of an artifact for a GPU of this machine.

    Args:
        path: the artifact directory; its files are checked first.
        device: number of the GPU.

    Returns:
        Operator and overload -> kernel.

    Raises:
        IntegrityError: a file is missing or changed.
        TargetUnavailableError: no driver, no GPU, no kernels for it, or a missing package.
    """
    folder, manifest = open_manifest(path)
    check_files(folder, manifest)
    indices = {_index(item)["arch"]: item for item in _indices(folder)}
    if not indices:
        raise TargetUnavailableError(
            f"{folder} has no CUDA kernels. Convert with --target cuda:sm_90."
        )
    arch = _choose(tuple(indices), compute_capability(device))
    item = indices[arch]
    kernels = {}
    for entry in _index(item)["kernels"]:
        library = item.parent / entry["library"]
        if library.relative_to(folder).as_posix() not in manifest.files:
            raise IntegrityError(f"{library} is no file of the manifest. Convert again.")
        kernel = load_kernel(library, entry)
        kernels[kernel.operator] = kernel
    return kernels


def load_kernel(library: Path, description: Mapping[str, Any]) -> GpuKernel:
    """One kernel from its file and its entry of the index.

    Raises:
        TargetUnavailableError: no driver, or a missing package.
    """
    return GpuKernel(
        operator=f"{description['op_type']}:{description['overload']}",
        inputs=tuple(spec["name"] for spec in description["inputs"]),
        outputs=tuple(spec["name"] for spec in description["outputs"]),
        description=description,
        _function=load_function(library, description["symbol"]),
    )


def compute_capability(device: int = 0) -> tuple[int, int]:
    """Major and minor number of a GPU.

    Raises:
        TargetUnavailableError: no driver, or no such GPU.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        raise TargetUnavailableError(
            f"CUDA kernels need an NVIDIA driver, but {DRIVER} cannot be loaded: {error}."
        ) from error
    code = driver.cuInit(0)
    if code:
        raise TargetUnavailableError(
            f"The NVIDIA driver does not start (cuInit returns {code}): is there a GPU?"
        )
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if not 0 <= device < count.value:
        raise TargetUnavailableError(f"There is no GPU {device}; the driver sees {count.value}.")
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        numbers.append(number.value)
    return numbers[0], numbers[1]


def _choose(archs: Sequence[str], capability: tuple[int, int]) -> str:
    """The best architecture for a GPU: machine code runs on the same major number, minor or up."""
    major, minor = capability
    able = [arch for arch in archs if _number(arch)[0] == major and _number(arch)[1] <= minor]
    if not able:
        raise TargetUnavailableError(
            f"This GPU is sm_{major}{minor}; the artifact has kernels for {', '.join(archs)}. "
            f"Convert with --target cuda:sm_{major}{minor}."
        )
    return max(able, key=_number)


def _number(arch: str) -> tuple[int, int]:
    """``sm_90`` -> (9, 0)."""
    digits = arch.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


def _indices(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"kernels/cuda-*/{INDEX_NAME}"))


def _index(path: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return index


def load_function(library: Path, symbol: str) -> Any:
    """A function of a kernel library, through ``tvm_ffi`` with TVM's runtime behind it.

    Raises:
        TargetUnavailableError: no driver, or a missing package.
    """
    spec = find_spec("tvm")
    if spec is None or spec.origin is None or find_spec("tvm_ffi") is None:
        raise TargetUnavailableError(
            "CUDA kernels need apache-tvm and apache-tvm-ffi: pip install 'subquad[kernels]'."
        )
    import tvm_ffi

    folder = Path(spec.origin).parent / "lib"
    for name in ("libtvm_runtime.so", "libtvm_runtime_cuda.so"):
        try:
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise TargetUnavailableError(f"TVM's {name} cannot be loaded: {error}.") from error
    return tvm_ffi.load_module(str(library))[symbol]
