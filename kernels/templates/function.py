"""The frame of a kernel: its arguments as the variant's specs declare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import INPUT_NAMES
from subquad.kernels.kernel import kernel_symbol
from subquad.kernels.operator import Dim, OperatorVariant
from subquad.kernels.templates.rows import Buffers

ALIGNMENTS = {"float32": 4, "int32": 4, "int64": 8, "bool": 1}
"""What is known of where a buffer lies, in bytes: its element size."""


def attention_function(variant: OperatorVariant, body: Callable[[Buffers], None]) -> Any:
    """The ``PrimFunc`` of ``variant``: its inputs, then its outputs, around ``body``.

    Buffers are compact; nothing is assumed about their alignment. A shape must hold bare symbols,
    so a number of blocks is a symbol of its own.
    """
    symbol = kernel_symbol(variant)
    specs = [spec for spec in (*variant.inputs, *variant.outputs) if spec is not None]
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(symbol)
            T.func_attr({"global_symbol": symbol, "tirx.noalias": True})
            handles = [T.arg(spec.name, T.handle()) for spec in specs]
            sizes: dict[Dim, Any] = {}

            def size(dim: Dim) -> Any:
                if isinstance(dim, int):
                    return dim
                if dim not in sizes:
                    sizes[dim] = IRBuilder.name(str(dim), T.int64())
                return sizes[dim]

            matched = {}
            for spec, handle in zip(specs, handles, strict=True):
                shape = tuple(size(dim) for dim in spec.dims)
                align = ALIGNMENTS[spec.dtype]
                matched[spec.name] = T.match_buffer(handle, shape, spec.dtype, align=align)
            shared = {name: matched.pop(name, None) for name in (*INPUT_NAMES, "output")}
            body(Buffers(**shared, extra=matched))
    return builder.get()
