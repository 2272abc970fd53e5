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
from subquad.kernels.operator import present_inputs

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


@pytest.fixture(scope="session")
def run_kernel() -> RunKernel:
    """``run_kernel(variant, case, params={})``: unaligned inputs, output full of NaN before."""
    pytest.importorskip("tvm", reason="apache-tvm is not installed: no kernels are built")
    import tvm_ffi

    def run(
        variant: Any, case: Case, params: Mapping[str, int] | None = None
    ) -> NDArray[np.float32]:
        _, kernel = _compile(variant, tuple(sorted((params or {}).items())))
        feeds = case.feeds(variant)
        inputs = [unaligned(feeds[name]) for name in present_inputs(variant)]
        shape = (*case.query.shape[:3], variant.value_dim)
        output: NDArray[np.float32] = unaligned(np.full(shape, np.nan, dtype=np.float32))
        kernel(*(tvm_ffi.from_dlpack(array) for array in (*inputs, output)))
        return output

    return run
