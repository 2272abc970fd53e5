"""Kernel templates for tests of the host: attention in plain loops, and some that go wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.kernel import CpuTarget, kernel_symbol
from subquad.kernels.operator import UNLIMITED, OperatorVariant, present_inputs
from subquad.runtime.errors import Rejection

ABORTS, FAILS, SKIPS, NAMELESS, REFUSES = 3, 5, 7, 9, 11
"""Head counts for which something goes wrong; see ``SlowTemplate.build``."""


class SlowTemplate:
    """Exact attention, head by head and key by key."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, AttentionVariant):
            return Rejection(f"slow kernels know no {variant.op_type}")
        if variant.softcap:
            return Rejection(f"slow kernels know no softcap, got {variant.softcap}")
        return None

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        """A right kernel, unless the head count says otherwise.

        ``ABORTS``: the compiler process dies, as of a crash inside LLVM. ``FAILS``: the kernel
        fails at run time when a query starts with a number above 1e6. ``SKIPS``: it leaves the
        last query unwritten. ``NAMELESS``: the function has a name that the host cannot find.
        ``REFUSES``: the template raises.
        """
        assert isinstance(variant, AttentionVariant)
        heads = variant.num_heads
        if heads == ABORTS:
            os.abort()
        if heads == REFUSES or params:
            raise ValueError(f"no kernel for {heads} heads and parameters {sorted(params)}")
        function = _attention(variant, skip=int(heads == SKIPS), fails=heads == FAILS)
        return function.with_attr("global_symbol", "other") if heads == NAMELESS else function


TEMPLATE = SlowTemplate()


def _attention(variant: AttentionVariant, skip: int, fails: bool) -> Any:
    """Two passes over the keys of each query: maximum, then sums; -1e30 where nothing is seen."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    heads = variant.heads
    symbol = kernel_symbol(variant)

    def int64(number: int) -> Any:
        return T.int64(number)

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(symbol)
        T.func_attr({"global_symbol": symbol, "tirx.noalias": True})
        handles = [T.arg(name, T.handle()) for name in (*present_inputs(variant), "output")]
        batch, queries, keys = T.int64(), T.int64(), T.int64()
        shapes: dict[str, tuple[Any, str, int]] = {
            "query": ((batch, heads.num_heads, queries, heads.head_dim), "float32", 4),
            "key": ((batch, heads.num_kv_heads, keys, heads.head_dim), "float32", 4),
            "value": ((batch, heads.num_kv_heads, keys, heads.value_dim), "float32", 4),
            "key_mask": ((batch, keys), "bool", 1),
            "query_positions": ((batch, queries), "int64", 8),
            "key_positions": ((batch, keys), "int64", 8),
            "output": ((batch, heads.num_heads, queries, heads.value_dim), "float32", 4),
        }
        buffers: dict[str, Any] = {}
        for name, handle in zip((*present_inputs(variant), "output"), handles, strict=True):
            shape, dtype, align = shapes[name]
            buffers[name] = T.match_buffer(handle, shape, dtype, align=align)

        def sees(b: Any, i: Any, j: Any) -> Any:
            visible = j >= int64(0)
            if variant.has_key_mask:
                visible = T.And(visible, buffers["key_mask"][b, j])
            if variant.has_positions:
                distance = buffers["query_positions"][b, i] - buffers["key_positions"][b, j]
                if variant.window_left != UNLIMITED:
                    visible = T.And(visible, distance <= int64(variant.window_left))
                if variant.window_right != UNLIMITED:
                    visible = T.And(visible, distance >= int64(-variant.window_right))
            return visible

        with T.parallel(batch * int64(heads.num_heads)) as bh:
            b, h = bh // int64(heads.num_heads), bh % int64(heads.num_heads)
            g = h // int64(heads.group)
            # From the host's allocator; its size is known at run time only.
            scores = T.alloc_buffer((keys,), "float32")
            state = T.alloc_buffer((2,), "float32")
            with T.serial(queries - int64(skip)) as i:
                if fails:
                    first = buffers["query"][b, h, i, int64(0)]
                    with T.Assert(first <= T.float32(1e6), "query out of range", "ValueError"):
                        pass
                T.buffer_store(state, T.float32(-1e30), [int64(0)])
                T.buffer_store(state, T.float32(0), [int64(1)])
                with T.serial(keys) as j:
                    T.buffer_store(scores, T.float32(0), [j])
                    with T.serial(int64(heads.head_dim)) as d:
                        product = buffers["query"][b, h, i, d] * buffers["key"][b, g, j, d]
                        T.buffer_store(scores, scores[j] + product, [j])
                    score = scores[j] * T.float32(variant.scale)
                    shown = T.if_then_else(sees(b, i, j), score, T.float32(-1e30))
                    T.buffer_store(scores, shown, [j])
                    T.buffer_store(state, T.max(state[int64(0)], scores[j]), [int64(0)])
                with T.serial(keys) as j:
                    weight = T.if_then_else(
                        sees(b, i, j), T.exp(scores[j] - state[int64(0)]), T.float32(0)
                    )
                    T.buffer_store(scores, weight, [j])
                    T.buffer_store(state, state[int64(1)] + scores[j], [int64(1)])
                with T.serial(int64(heads.value_dim)) as e:
                    at = [b, h, i, e]
                    T.buffer_store(buffers["output"], T.float32(0), at)
                    with T.serial(keys) as j:
                        term = scores[j] * buffers["value"][b, g, j, e]
                        T.buffer_store(buffers["output"], buffers["output"][b, h, i, e] + term, at)
                    total = T.max(state[int64(1)], T.float32(1e-30))
                    T.buffer_store(buffers["output"], buffers["output"][b, h, i, e] / total, at)
    return builder.get()
