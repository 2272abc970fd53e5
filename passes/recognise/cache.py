"""Whether an attention reads keys of earlier calls, and how they go on to the next.

Key and value must both be ``Concat(past, new)`` along the tokens, where ``past`` is an input of the
graph, ``new`` has one entry per query, and the whole is an output of the graph, or takes the place
of one. Then query ``i``
stands at key ``past length + i`` and the site is self-attention, of which this call sees a piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import onnx_ir as ir

from subquad.passes.recognise.affine import Affine
from subquad.passes.recognise.layout import Operand
from subquad.passes.recognise.site import SiteCache
from subquad.passes.recognise.symbolic import Interpreter

_TOKENS = 2


def cache_of(
    key: Operand,
    value: Operand,
    query_len: Affine,
    interpreter: Interpreter,
    stands_for: Mapping[ir.Value, ir.Value] = MappingProxyType({}),
) -> SiteCache | None:
    """The cache of a site with these operands; ``None``: it has none.

    Args:
        key, value: operands.
        query_len: number of new tokens.
        interpreter: knows the shapes.
        stands_for: values of a twin, and the outputs of its operator whose places they will take.
    """
    parts = [_extended(operand, query_len, interpreter, stands_for) for operand in (key, value)]
    if parts[0] is None or parts[1] is None:
        return None
    (past_key, present_key), (past_value, present_value) = parts[0], parts[1]
    return SiteCache(past_key, past_value, present_key, present_value)


def _extended(
    operand: Operand,
    query_len: Affine,
    interpreter: Interpreter,
    stands_for: Mapping[ir.Value, ir.Value],
) -> tuple[str, str] | None:
    """Names of the past and of what becomes of it."""
    node = operand.value.producer()
    if operand.perm is not None or operand.heads or node is None:
        return None
    if node.op_type != "Concat" or node.domain not in ("", "ai.onnx") or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    assert past is not None and new is not None
    axis = node.attributes["axis"].as_int()
    present = stands_for.get(operand.value, operand.value)
    if axis % 4 != _TOKENS or not present.is_graph_output() or not _is_input(past):
        return None
    if interpreter.tensor(new).shape[_TOKENS] != query_len:
        return None
    return str(past.name), str(present.name)


def _is_input(value: ir.Value) -> bool:
    # With a default it is a constant that callers may replace, no cache.
    return value.is_graph_input() and value.const_value is None
