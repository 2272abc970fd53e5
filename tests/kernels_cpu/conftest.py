"""Kernels compiled and called through TVM directly, without the ONNX Runtime host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import Case
from subquad.kernels.kernel import (
    CPU_TEMPLATES,
    CpuTarget,
    KernelTemplate,
    kernel_symbol,
    load_template,
)
from subquad.kernels.operator import Blocks, present_inputs

TARGET = CpuTarget("x86-64-v3", "x86-64-v3")

RunKernel = Callable[..., NDArray[np.float32]]


def unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that starts one element past a 64-byte boundary."""
    store = np.empty(array.nbytes + 128, dtype=np.uint8)
    start = -store.ctypes.data % 64 + array.itemsize
    copy = store[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@cache
def _compile(variant: Any, params: tuple[tuple[str, int], ...]) -> Any:
    import tvm

    template: Any = load_template(variant.op_type, CPU_TEMPLATES)
    typed: KernelTemplate = template
    assert typed.supports(variant) is None
    function = typed.build(variant, TARGET, dict(params))
    executable = tvm.compile(function, target=TARGET.tvm_target())
    return executable, executable.mod[kernel_symbol(variant)]


def _outputs(variant: Any, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Buffers of the outputs' shapes, full of NaN."""
    sizes: dict[str, int] = {
        dim: size
        for spec in variant.inputs
        if spec is not None
        for dim, size in zip(spec.dims, inputs[spec.name].shape, strict=True)
        if isinstance(dim, str)
    }

    def size_of(dim: Any) -> int:
        if isinstance(dim, Blocks):
            return -(-int(sizes[dim.dim]) // dim.size)
        return dim if isinstance(dim, int) else int(sizes[dim])

    outputs = []
    for spec in variant.outputs:
        fill = np.nan if spec.dtype == "float32" else 77
        shape = tuple(size_of(dim) for dim in spec.dims)
        outputs.append(unaligned(np.full(shape, fill, dtype=spec.dtype)))
    return outputs


@pytest.fixture(scope="session")
def run_kernel_feeds() -> Callable[..., list[NDArray[Any]]]:
    """``run_kernel_feeds(variant, feeds, params={})``: all outputs, unaligned, NaN before."""
    pytest.importorskip("tvm", reason="apache-tvm is not installed: no kernels are built")
    import tvm_ffi

    def run(
        variant: Any, feeds: Mapping[str, NDArray[Any]], params: Mapping[str, int] | None = None
    ) -> list[NDArray[Any]]:
        _, kernel = _compile(variant, tuple(sorted((params or {}).items())))
        outputs = _outputs(variant, feeds)
        arrays = [*(unaligned(feeds[name]) for name in present_inputs(variant)), *outputs]
        kernel(*(tvm_ffi.from_dlpack(array) for array in arrays))
        return outputs

    return run


@pytest.fixture(scope="session")
def run_kernel_all(
    run_kernel_feeds: Callable[..., list[NDArray[Any]]],
) -> Callable[..., list[NDArray[Any]]]:
    """``run_kernel_all(variant, case, params={})``: all outputs."""

    def run(
        variant: Any, case: Case, params: Mapping[str, int] | None = None
    ) -> list[NDArray[Any]]:
        return run_kernel_feeds(variant, case.feeds(variant), params)

    return run


@pytest.fixture(scope="session")
def run_kernel(run_kernel_all: Callable[..., list[NDArray[Any]]]) -> RunKernel:
    """``run_kernel(variant, case, params={})``: the first output."""

    def run(
        variant: Any, case: Case, params: Mapping[str, int] | None = None
    ) -> NDArray[np.float32]:
        output: NDArray[np.float32] = run_kernel_all(variant, case, params)[0]
        return output

    return run
