"""Hand sites to compiled kernels, and keep the others out of their reach.

A custom operator takes every node of its name, whatever the overload. So in an artifact with a
kernel library

1. a site whose variant has a kernel keeps its operator: the library runs it where it is loaded,
   the function of the same name where it is not;
2. any other site becomes ``<Operator>Reference``, which no library registers: always the function.

An artifact without a library keeps the plain names everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from subquad.kernels.operator import DOMAIN, OperatorVariant
from subquad.runtime.errors import Rejection

REFERENCE_SUFFIX = "Reference"

VariantKey = tuple[str, str]
"""Operator and overload."""


@dataclass(frozen=True)
class LoweredSite:
    """What executes one site.

    Attributes:
        operator: operator and overload of the attention now in the graph.
        kernel: template of its kernel; "" = none.
        reason: why none, for the attention and each node that prepares it.
        prepared: operators and overloads of the nodes that prepare it.
    """

    operator: str
    kernel: str = ""
    reason: str = ""
    prepared: tuple[str, ...] = ()


def lower_sites(
    model: ir.Model,
    variants: Sequence[Sequence[OperatorVariant]],
    served: Mapping[VariantKey, str],
    declined: Mapping[VariantKey, Rejection],
) -> list[LoweredSite]:
    """Rename what has no kernel, if anything has one; modifies ``model``.

    Args:
        model: after ``replace_sites``.
        variants: of each site, in order; the last of a site is its attention.
        served: variants with a kernel -> name of the kernel.
        declined: the others, each with its reason.

    Returns:
        What became of each site, in order.
    """
    keys = [[(v.op_type, v.overload) for v in of_site] for of_site in variants]
    every = {key for of_site in keys for key in of_site}
    renamed = {key for key in every if key not in served} if served else set()
    for key in sorted(renamed):
        _rename_function(model, key)
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN and (node.op_type, node.overload) in renamed:
            node.op_type += REFERENCE_SUFFIX

    def operator(key: VariantKey) -> str:
        return f"{key[0]}{REFERENCE_SUFFIX if key in renamed else ''}:{key[1]}"

    lowered = []
    for *prepared, attention in keys:
        reasons = [f"{key[0]}: {declined[key].reason}" for key in prepared if key in declined]
        if attention in declined:
            reasons.append(declined[attention].reason)
        lowered.append(
            LoweredSite(
                operator=operator(attention),
                kernel=served.get(attention, ""),
                reason="; ".join(reasons),
                prepared=tuple(map(operator, prepared)),
            )
        )
    return lowered


def _rename_function(model: ir.Model, key: VariantKey) -> None:
    function = model.functions.pop((DOMAIN, *key))
    function.name += REFERENCE_SUFFIX
    model.functions[function.identifier()] = function
