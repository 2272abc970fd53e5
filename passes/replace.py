"""Carry out a plan: turn raised nodes into the operators their methods lower to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from subquad.kernels.operator import DOMAIN, OperatorVariant
from subquad.passes.attention_nodes import (
    NodeBuilder,
    SharedInputs,
    needs_positions,
    register_variant,
)
from subquad.passes.carry_state import StateCarrier, Steps
from subquad.passes.plan import Assignment

SiteVariants = tuple[OperatorVariant, ...]
"""The operators that compute one site: those that prepare it, then the attention."""


def replace_sites(
    model: ir.Model, plan: Sequence[Assignment], carrier: StateCarrier | None = None
) -> list[SiteVariants]:
    """Replace every site's node by its method's operators; modifies ``model``.

    Args:
        carrier: of the model, to keep states instead of all keys where that can be.

    Returns:
        The operator variants of each assignment, in order.
    """
    nodes = {node.name: node for node in model.graph if node.domain == DOMAIN}
    positions: dict[object, SharedInputs] = {}
    variants: list[SiteVariants] = []
    for assignment in plan:
        site, params = assignment.site, assignment.params
        prepared = assignment.method.prepare(site, params)
        attention = assignment.method.lower(site, params)
        tensors = assignment.tensors()
        node = nodes[site.name]
        same = (node.op_type, node.overload) == (attention.op_type, attention.overload)
        steps = None if carrier is None else carrier.steps(node, site, attention)
        if not same or prepared or tensors or steps:
            _replace(
                model, node, assignment, (*prepared, attention), tensors, positions, carrier, steps
            )
        variants.append((*prepared, *(steps or ()), attention))
    if carrier is not None:
        model.graph.sort()
    common_passes.RemoveUnusedNodesPass()(model)
    # onnx_ir leaves this constructor untyped.
    common_passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    return variants


def _replace(
    model: ir.Model,
    node: ir.Node,
    assignment: Assignment,
    variants: SiteVariants,
    tensors: Mapping[str, NDArray[np.generic]],
    positions: dict[object, SharedInputs],
    carrier: StateCarrier | None,
    steps: Steps | None,
) -> None:
    query, key, value = node.inputs[:3]
    assert query is not None and key is not None and value is not None
    optional = (*node.inputs[3:6], None, None, None)
    shared = SharedInputs(*optional[:3])
    builder = NodeBuilder()
    if (
        steps is not None or any(map(needs_positions, variants))
    ) and shared.query_positions is None:
        shared = _with_positions(builder, query, key, shared, assignment, positions)
    name = assignment.site.name
    extra = {key: _initializer(model, f"{name}.{key}", array) for key, array in tensors.items()}
    *prepared, attention = variants
    for variant in prepared:
        outputs = builder.operator(
            variant, query, key, value, shared, extra, name=f"{name}.{variant.op_type}"
        )
        extra |= {spec.name: out for spec, out in zip(variant.outputs, outputs, strict=True)}
    model.graph.insert_before(node, builder.nodes)
    old = node.outputs[0]
    if steps is not None:
        assert carrier is not None and not prepared
        output = carrier.replace(node, assignment.site, steps, attention, shared, extra)
    else:
        last = NodeBuilder()
        output = last.operator(attention, query, key, value, shared, extra, name=name)[0]
        model.graph.insert_before(node, last.nodes)
    output.shape = old.shape
    old.name, output.name = f"{old.name}.exact", old.name
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    for variant in variants:
        register_variant(model, variant)


def _initializer(model: ir.Model, name: str, array: NDArray[np.generic]) -> ir.Value:
    """A constant of the model, under its name."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(array.shape),
        const_value=tensor,
    )
    model.graph.register_initializer(value)
    return value


def _with_positions(
    builder: NodeBuilder,
    query: ir.Value,
    key: ir.Value,
    shared: SharedInputs,
    assignment: Assignment,
    known: dict[object, SharedInputs],
) -> SharedInputs:
    """Positions for a site whose exact form needed none; shared where lengths surely agree."""
    mask = assignment.site.mask
    # With a key mask the key length is the mask's; without, only one node's own keys are certain.
    same_lengths = shared.key_mask if shared.key_mask and assignment.site.is_self else key
    cache_key = (same_lengths, mask.alignment)
    if cache_key not in known:
        pair = builder.positions(
            query,
            key,
            shared.key_mask,
            mask.alignment,
            counted_by_mask=assignment.site.cache is not None,
        )
        known[cache_key] = SharedInputs(shared.key_mask, *pair)
    return known[cache_key]
