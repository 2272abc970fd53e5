"""Guards between softmax and value product: what keeps rows that see no key from being NaN.

    where(isnan(w), 0, w)      where(max(mask) == -inf, 0, w)      where(hidden, 0, w)      w * mask

A guard is skipped if it is proved to leave the weights of every row that sees a key as they are
(see ``facts``). A row that sees no key becomes zeros by a guard; raised nodes give zeros there.
"""

from __future__ import annotations

import onnx_ir as ir

from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.bias import uniform
from subquad.passes.recognise.facts import Facts
from subquad.passes.recognise.symbolic import Interpreter

_MAX_STEPS = 16
_BESIDE_GUARDS = ("Where", "Mul", "Cast", "Identity", "Slice", "Split")


def after_guard(
    weights: ir.Value, users: list[ir.Node], facts: Facts, interpreter: Interpreter
) -> ir.Value | None:
    """The weights after a guard that ``users`` are; None where they are none.

    Raises:
        OpaqueError: it is no guard but changes weights, or is not proved to be one.
    """
    for node in users:
        if node.op_type not in ("Where", "Mul") or node.domain not in ("", "ai.onnx"):
            continue
        if weights not in node.inputs or node.inputs[0] is node.inputs[1]:
            continue
        if not all(user is node or _leads_only_to(user, node) for user in users):
            continue
        spared = _spares(node, weights, facts, interpreter)
        if spared:
            facts.weights(node.outputs[0])
            return node.outputs[0]
    return None


def leads_only_to_guards(node: ir.Node, softmax: ir.Node) -> bool:
    """Whether all that ``node`` computes is read by guards of this softmax's weights."""
    weights, guards = softmax.outputs[0], set[ir.Node]()
    for _ in range(_MAX_STEPS):
        found = [u.node for u in weights.uses() if u.node.op_type in _BESIDE_GUARDS]
        if len(found) != 1:
            break
        guards.add(found[0])
        weights = found[0].outputs[0]
    return any(_leads_only_to(node, guard, avoid=softmax) for guard in guards)


def _leads_only_to(
    node: ir.Node, guard: ir.Node, steps: int = _MAX_STEPS, *, avoid: ir.Node | None = None
) -> bool:
    """Whether all uses of ``node`` end at ``guard``, none of them by way of ``avoid``."""
    if node is avoid:
        return False
    uses = [use.node for output in node.outputs for use in output.uses()]
    if not steps or not uses or any(output.is_graph_output() for output in node.outputs):
        return False
    return all(
        user is guard
        or user.op_type == "Shape"
        or _leads_only_to(user, guard, steps - 1, avoid=avoid)
        for user in uses
    )


def _spares(node: ir.Node, weights: ir.Value, facts: Facts, interpreter: Interpreter) -> bool:
    first, second = node.inputs[:2]
    if node.op_type == "Mul":
        factor = second if first is weights else first
        assert factor is not None
        fact = facts.of(factor)
        return fact.seen.is_exactly(1) and fact.every.is_finite
    condition, chosen, other = node.inputs
    if condition is None or chosen is None or other is None or condition is weights:
        return False
    fill = uniform(other if chosen is weights else chosen, interpreter)
    if fill != 0.0:
        what = "values that vary" if fill is None else f"{fill}"
        raise OpaqueError(f"some weights are set to {what}, not to zero")
    if not facts.of(condition).seen.is_exactly(1 if chosen is weights else 0):
        raise OpaqueError(
            f"weights are set to zero where {condition.name!r} says so, which may hold for keys "
            "that a query sees"
        )
    return True
