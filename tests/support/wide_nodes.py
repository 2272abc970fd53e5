"""An operator with inputs and outputs that attention does not have, to test the host with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.body import Body
from subquad.kernels.inputs import Heads, declare_inputs, input_specs, output_spec
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import Blocks, OperatorVariant, TensorSpec
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class WeightedSumVariant:
    """``output_i = sum_j weight_j value_j`` for every query, and how many keys a block has.

    ``weights`` is ``[kv_len]`` int32, the first of the operator's own inputs; ``counts``, present
    if ``block`` is not 0, is ``[batch, ceil(kv_len / block)]`` int64.
    """

    num_heads: int
    head_dim: int
    block: int = 0

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.head_dim, self.head_dim)

    @property
    def op_type(self) -> str:
        return "WeightedSum"

    @property
    def overload(self) -> str:
        return f"{self.heads.label}_b{self.block}"

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        weights = TensorSpec("weights", "int32", ("kv_len",))
        return input_specs(self.heads, key_mask=False, positions=False, extra=(weights,))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        counts = TensorSpec("counts", "int64", ("batch", Blocks("kv_len", self.block)))
        return (output_spec(self.heads), counts) if self.block else (output_spec(self.heads),)

    def attributes(self) -> Mapping[str, ir.Attr]:
        return {"variant": ir.AttrString("variant", self.overload)}

    def build_function(self) -> ir.Function:
        """Only its signature is right: these tests run the kernel."""
        body = Body()
        formal, inputs = declare_inputs(self.inputs)
        outputs = [body("Identity", inputs.query)]
        if self.block:
            outputs.append(body("Cast", inputs.query, to=7))
        return body.function(self.op_type, self.overload, formal, outputs, self.attributes())

    def reference(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        value: NDArray[np.floating],
        weights: NDArray[np.int32],
    ) -> tuple[NDArray[Any], ...]:
        batch, _, query_len, _ = query.shape
        total = np.einsum("bhjd,j->bhd", value.astype(np.float64), weights)
        output = np.repeat(total[:, :, None], query_len, axis=2)
        if not self.block:
            return (output,)
        starts = np.arange(0, key.shape[2], self.block)
        counts = np.minimum(key.shape[2] - starts, self.block)
        return output, np.repeat(counts[None], batch, axis=0)


class WideTemplate:
    """Its kernel, in plain loops."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        return None

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        from tvm.script.ir_builder import tirx as T

        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.rows import Buffers

        assert isinstance(variant, WeightedSumVariant)

        def body(buffers: Buffers) -> None:
            output, weights = buffers.output, buffers.extra["weights"]
            batch, heads, queries, dims = output.shape
            kv_len = buffers.key.shape[2]
            with T.grid(batch, heads, queries, dims) as (b, h, i, d):
                T.buffer_store(output, T.float32(0), [b, h, i, d])
                with T.serial(kv_len) as j:
                    term = T.cast(weights[j], "float32") * buffers.value[b, h, j, d]
                    T.buffer_store(output, output[b, h, i, d] + term, [b, h, i, d])
            if variant.block:
                counts, block = buffers.extra["counts"], T.int64(variant.block)
                with T.grid(batch, counts.shape[1]) as (b, n):
                    T.buffer_store(counts, T.min(block, kv_len - n * block), [b, n])

        return attention_function(variant, body)


TEMPLATE = WideTemplate()
TEMPLATES = {"WeightedSum": "wide_nodes:TEMPLATE"}
