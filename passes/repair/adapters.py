"""Which weights a repair may change: the projections around attentions, and their own tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from subquad.kernels.operator import DOMAIN

SHARED_INPUTS = 6
"""Inputs of every attention operator; those after them may be learned tensors of its own."""

_FEATURES = ("MatMul", "Gemm")


@dataclass(frozen=True)
class RepairWeights:
    """Names of initializers.

    Attributes:
        projections: matrices of the query, key, value and output projections.
        own: float tensors that only replaced attentions read, such as learned feature maps.
    """

    projections: tuple[str, ...]
    own: tuple[str, ...]


def repair_weights(model: ir.Model, sites: Iterable[str]) -> RepairWeights:
    """The weights around the attentions called ``sites``.

    A matrix that something else reads as well (tied embeddings) is left alone.
    """
    wanted = set(sites)
    projections: dict[str, None] = {}
    own: dict[str, None] = {}
    for node in model.graph:
        if node.domain != DOMAIN or node.name not in wanted:
            continue
        found = [_nearest_products(value, backwards=True) for value in node.inputs[:3] if value]
        found.append(_nearest_products(node.outputs[0], backwards=False))
        for product in (product for products in found for product in products):
            matrix = product.inputs[1]
            if matrix is not None and _is_free(matrix, rank=2):
                projections[matrix.name or ""] = None
        for value in node.inputs[SHARED_INPUTS:]:
            if value is not None and _is_free(value):
                own[value.name or ""] = None
    return RepairWeights(tuple(projections), tuple(own))


def _is_free(value: ir.Value, rank: int | None = None) -> bool:
    tensor = value.const_value
    return (
        value.is_initializer()
        and tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and (rank is None or len(tensor.shape) == rank)
        and len(value.uses()) == 1
        and not value.is_graph_output()
    )


def _nearest_products(start: ir.Value, *, backwards: bool) -> list[ir.Node]:
    """The first products with a constant matrix on every path from ``start``."""
    found: dict[ir.Node, None] = {}
    seen: set[ir.Node] = set()
    front = [start]
    while front:
        value = front.pop()
        if backwards:
            producer = value.producer()
            nodes = [] if producer is None else [producer]
        else:
            nodes = [use.node for use in value.uses()]
        for node in nodes:
            if node in seen or node.domain == DOMAIN:
                continue
            seen.add(node)
            if node.op_type in _FEATURES and node.inputs[1] is not None:
                if node.inputs[1].is_initializer():
                    found[node] = None
                    continue
            front += [v for v in (node.inputs if backwards else node.outputs) if v is not None]
    return list(found)
