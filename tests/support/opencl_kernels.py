"""GPU kernels run on a CPU: the same templates and TVM host code, OpenCL through PoCL.

TVM compiles a kernel to OpenCL source and to a host object, which checks the arguments, sizes the
grids and allocates workspace, as it does for CUDA. Here the object's hooks are Python functions:
workspace is NumPy memory full of NaN, and a launch goes to PoCL, which works on that memory in
place. Behind every output and workspace lies a border that must stay as it was.

PoCL runs the threads of a block up to each barrier, one after another or as vectors. A wrong index,
bound or mask and an unwritten number show as wrong results; barriers are TVM's to add where one is
missing, and what depends on warps does not show.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.gpu import OPENCL
from subquad.kernels.host.gpu_child import Lowered, lower
from subquad.kernels.kernel import GPU_TEMPLATES, kernel_symbol, load_template
from subquad.runtime.kernel_tools import compiler

DEVICE_TYPE = 4
"""DLPack's number of OpenCL."""
_ALIGNMENT = 128
_BORDER = 256
_TENSOR = 7
"""Type index of a ``DLTensor*`` argument."""
_SET_DEVICE = "__tvm_set_device"
"""What TVM's host code calls before it launches; there is one device here."""


class _Any(ctypes.Structure):
    _fields_ = [
        ("type_index", ctypes.c_int32),
        ("zero", ctypes.c_uint32),
        ("value", ctypes.c_int64),
    ]


class _Tensor(ctypes.Structure):
    """``DLTensor`` of DLPack."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_CODES = {"i": 0, "f": 2, "b": 6}
_ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, ctypes.c_int
)
_FREE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_LOOK_UP = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
)
_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(_Any),
    ctypes.c_int32,
    ctypes.POINTER(_Any),
)


class Memory:
    """An array that a kernel sees, with a border behind it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, content: NDArray[Any] | None = None):
        self.nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        store = np.full(self.nbytes + _ALIGNMENT + _BORDER, 0xFF, dtype=np.uint8)
        start = -store.ctypes.data % _ALIGNMENT
        self.bytes = store[start : start + self.nbytes + _BORDER]
        self.array = self.bytes[: self.nbytes].view(dtype).reshape(shape)
        if content is not None:
            self.array[...] = content

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def check(self) -> None:
        assert (self.bytes[self.nbytes :] == 0xFF).all(), "written past the end of a buffer"


@lru_cache
def queue() -> Any:
    """A command queue on PoCL.

    Raises:
        RuntimeError: pyopencl or PoCL is missing; says what to install.
    """
    try:
        import pyopencl
    except ImportError as error:
        raise RuntimeError("the GPU schedules run through OpenCL: pip install pyopencl") from error
    try:
        platforms = pyopencl.get_platforms()
    except pyopencl.Error as error:
        platforms = []
        reason = f" ({error})"
    else:
        reason = ""
    for platform in platforms:
        if platform.name == "Portable Computing Language":
            return pyopencl.CommandQueue(pyopencl.Context(platform.get_devices()[:1]))
    raise RuntimeError(f"no PoCL: apt-get install pocl-opencl-icd{reason}")


class OpenClKernel:
    """One kernel, compiled for OpenCL."""

    def __init__(self, variant: Any, params: Mapping[str, int]) -> None:
        import pyopencl

        template: Any = load_template(variant.op_type, GPU_TEMPLATES)
        refusal = template.supports(variant)
        assert refusal is None, refusal
        self.variant = variant
        lowered: Lowered = lower(template.build(variant, OPENCL, params), OPENCL)
        source = lowered.executable.mod.imports[0].inspect_source()
        self._queue = queue()
        self._program = pyopencl.Program(self._queue.context, source).build()
        self._kernels = [pyopencl.Kernel(self._program, name) for name in lowered.launches]
        self._names = list(lowered.launches)
        self._tags = [launch.parameters for launch in lowered.launches.values()]
        self._types = [_parameter_types(source, name) for name in self._names]
        self._memory: dict[int, Memory] = {}
        self._errors: list[Exception] = []
        self._load(lowered.executable.mod)

    def _load(self, module: Any) -> None:
        import tvm_ffi

        with tempfile.TemporaryDirectory(prefix="subquad-opencl-") as name:
            object_file, library = Path(name, "host.o"), Path(name, "host.so")
            module.write_to_file(str(object_file), "o")
            program = compiler()
            assert program is not None
            command = [program, "-shared", "-o", str(library), str(object_file)]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(library))
        hooks: dict[str, Any] = {
            "__TVMBackendAllocWorkspace": _ALLOCATE(self._allocate),
            "__TVMBackendFreeWorkspace": _FREE(self._free),
            "__TVMFFIEnvModLookupFromImports": _LOOK_UP(self._look_up),
            "__TVMFFIFunctionCall": _CALL(self._launch),
        }
        self._hooks = hooks
        hooks["__TVMFFIHandleInitOnce"] = tvm_ffi.LIB.TVMFFIHandleInitOnce
        for symbol, hook in hooks.items():
            # A kernel without workspace has no variable for it.
            if hasattr(self._library, symbol):
                variable = ctypes.c_void_p.in_dll(self._library, symbol)
                variable.value = ctypes.cast(hook, ctypes.c_void_p).value
        self._entry = getattr(self._library, f"__tvm_ffi_{kernel_symbol(self.variant)}")

    def _allocate(self, kind: int, number: int, nbytes: int, code: int, bits: int) -> int:
        memory = Memory((nbytes,), np.uint8)
        self._memory[memory.address] = memory
        return memory.address

    def _free(self, kind: int, number: int, address: int) -> int:
        self._memory.pop(address).check()
        return 0

    def _look_up(self, library: Any, name: bytes, result: Any) -> int:
        # Handles count from 1: 0 would be none.
        names = [*self._names, _SET_DEVICE]
        result[0] = names.index(name.decode()) + 1
        return 0

    def _launch(self, handle: int, args: Any, count: int, result: Any) -> int:
        if handle > len(self._names):
            return 0
        # An exception must not cross the C code in between.
        try:
            self._enqueue(handle - 1, [args[i] for i in range(count)])
        except Exception as error:  # noqa: BLE001
            self._errors.append(error)
            return -1
        return 0

    def _enqueue(self, number: int, args: list[_Any]) -> None:
        import pyopencl

        flags = pyopencl.mem_flags.READ_WRITE | pyopencl.mem_flags.USE_HOST_PTR
        types = self._types[number]
        values: list[Any] = []
        for kind, argument in zip(types, args[: len(types)], strict=True):
            if kind == "pointer":
                memory = self._memory[argument.value]
                values.append(pyopencl.Buffer(self._queue.context, flags, hostbuf=memory.bytes))
            else:
                values.append({"int": np.int32, "long": np.int64}[kind](argument.value))
        extents = {
            tag: argument.value
            for tag, argument in zip(self._tags[number], args[len(types) :], strict=True)
        }
        local = tuple(extents.get(f"threadIdx.{axis}", 1) for axis in "xyz")
        groups = tuple(extents.get(f"blockIdx.{axis}", 1) for axis in "xyz")
        whole = tuple(a * b for a, b in zip(local, groups, strict=True))
        kernel = self._kernels[number]
        kernel.set_args(*values)
        pyopencl.enqueue_nd_range_kernel(self._queue, kernel, whole, local)
        for value in values:
            if isinstance(value, pyopencl.Buffer):
                # Mapping makes the device's writes visible in the host's memory.
                mapped, _ = pyopencl.enqueue_map_buffer(
                    self._queue, value, pyopencl.map_flags.READ, 0, (value.size,), np.uint8
                )
                mapped.base.release(self._queue)
        self._queue.finish()

    def __call__(self, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """All outputs; their elements were NaN before."""
        specs = [spec for spec in self.variant.inputs if spec is not None]
        sizes: dict[Any, int] = {}
        inputs = []
        for spec in specs:
            array = feeds[spec.name]
            sizes |= {
                d: n for d, n in zip(spec.dims, array.shape, strict=True) if isinstance(d, str)
            }
            inputs.append(Memory(array.shape, array.dtype, array))
        outputs = [
            Memory(tuple(sizes.get(dim, dim) for dim in spec.dims), spec.dtype)
            for spec in self.variant.outputs
        ]
        memories = [*inputs, *outputs]
        self._memory = {memory.address: memory for memory in memories}
        tensors = [_tensor(memory) for memory in memories]
        args = (_Any * len(tensors))(
            *(_Any(_TENSOR, 0, ctypes.addressof(tensor)) for tensor, _ in tensors)
        )
        result = _Any()
        code = self._entry(None, args, ctypes.c_int32(len(args)), ctypes.byref(result))
        if self._errors:
            raise self._errors.pop()
        assert code == 0, "the kernel refused its arguments"
        assert set(self._memory) == {memory.address for memory in memories}, "workspace not freed"
        for memory in memories:
            memory.check()
        return [memory.array for memory in outputs]


def _tensor(memory: Memory) -> tuple[_Tensor, Any]:
    array = memory.array
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    kind = array.dtype.kind
    tensor = _Tensor(
        memory.address,
        DEVICE_TYPE,
        0,
        array.ndim,
        _CODES[kind],
        array.dtype.itemsize * 8,
        1,
        shape,
        None,
        0,
    )
    return tensor, shape


def _parameter_types(source: str, name: str) -> list[str]:
    """``pointer``, ``int`` or ``long`` for each parameter of a kernel."""
    found = re.search(rf"__kernel void (?:__attribute__\S+ )?{name}\(([^)]*)\)", source)
    assert found is not None, name
    types = []
    for parameter in found[1].split(","):
        types.append("pointer" if "*" in parameter else parameter.split()[0])
    return types
