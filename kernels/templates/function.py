"""The frame of a kernel: arguments as the contract in ``kernels/kernel.py`` orders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import INPUT_NAMES, Heads
from subquad.kernels.templates.rows import Buffers


def attention_function(
    symbol: str, heads: Heads, present: tuple[str, ...], body: Callable[[Buffers], None]
) -> Any:
    """A ``PrimFunc`` named ``symbol`` whose arguments are ``present`` and the output.

    Buffers are compact; nothing is assumed about their alignment.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(symbol)
            T.func_attr({"global_symbol": symbol, "tirx.noalias": True})
            handles = {name: T.arg(name, T.handle()) for name in (*present, "output")}
            batch, query_len, kv_len = T.int64(), T.int64(), T.int64()
            shapes = {
                "query": ((batch, heads.num_heads, query_len, heads.head_dim), "float32", 4),
                "key": ((batch, heads.num_kv_heads, kv_len, heads.head_dim), "float32", 4),
                "value": ((batch, heads.num_kv_heads, kv_len, heads.value_dim), "float32", 4),
                "key_mask": ((batch, kv_len), "bool", 1),
                "query_positions": ((batch, query_len), "int64", 8),
                "key_positions": ((batch, kv_len), "int64", 8),
                "output": ((batch, heads.num_heads, query_len, heads.value_dim), "float32", 4),
            }
            matched = {}
            for name, handle in handles.items():
                shape, dtype, align = shapes[name]
                matched[name] = T.match_buffer(handle, shape, dtype, align=align)
            body(Buffers(*(matched.get(name) for name in (*INPUT_NAMES, "output"))))
    return builder.get()
