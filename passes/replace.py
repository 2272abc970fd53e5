"""Carry out a plan: turn raised nodes into the operators their methods lower to."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from subquad.kernels.operator import DOMAIN, OperatorVariant
from subquad.passes.attention_nodes import (
    NodeBuilder,
    SharedInputs,
    needs_positions,
    register_variant,
)
from subquad.passes.plan import Assignment


def replace_sites(model: ir.Model, plan: Sequence[Assignment]) -> list[OperatorVariant]:
    """Replace every site's node by its method's operator; modifies ``model``.

    Returns:
        The operator variant of each assignment, in order.
    """
    nodes = {node.name: node for node in model.graph if node.domain == DOMAIN}
    positions: dict[object, SharedInputs] = {}
    variants: list[OperatorVariant] = []
    for assignment in plan:
        variant = assignment.method.lower(assignment.site, assignment.params)
        node = nodes[assignment.site.name]
        if (node.op_type, node.overload) != (variant.op_type, variant.overload):
            _replace(model, node, assignment, variant, positions)
        variants.append(variant)
    common_passes.RemoveUnusedNodesPass()(model)
    # onnx_ir leaves this constructor untyped.
    common_passes.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    return variants


def _replace(
    model: ir.Model,
    node: ir.Node,
    assignment: Assignment,
    variant: OperatorVariant,
    positions: dict[object, SharedInputs],
) -> None:
    query, key, value = node.inputs[:3]
    assert query is not None and key is not None and value is not None
    optional = (*node.inputs[3:6], None, None, None)
    shared = SharedInputs(*optional[:3])
    builder = NodeBuilder()
    if needs_positions(variant) and shared.query_positions is None:
        shared = _with_positions(builder, query, key, shared, assignment, positions)
    output = builder.attention(variant, query, key, value, shared, name=assignment.site.name)
    old = node.outputs[0]
    output.shape = old.shape
    model.graph.insert_before(node, builder.nodes)
    old.name, output.name = f"{old.name}.exact", old.name
    ir.convenience.replace_all_uses_with(old, output, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    register_variant(model, variant)


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
        pair = builder.positions(query, key, shared.key_mask, mask.alignment)
        known[cache_key] = SharedInputs(shared.key_mask, *pair)
    return known[cache_key]
