"""Terms added to scores that are no mask: relative positions, ALiBi, data-dependent masks.

What softmax sees is ``scale * q k^T`` plus a sum of terms. Those that are proved to be masks become
the predicate of the site, and one that is proved to be ALiBi its slopes; all others are handed to
the node as they are, as its score bias. Nothing is claimed about their values, so nothing needs
proof but that they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from subquad.kernels.attention.semantics import SCALAR, ScoreFunction
from subquad.passes.recognise.affine import ONE, ZERO, Affine, OpaqueError, position
from subquad.passes.recognise.alibi import Alibi, read_alibi
from subquad.passes.recognise.mask import (
    HIDDEN_BELOW,
    DerivedMask,
    Mask,
    MaskKind,
    ScoreShape,
    derive_mask,
)
from subquad.passes.recognise.site import SiteBias
from subquad.passes.recognise.subgraph import region_between
from subquad.passes.recognise.symbolic import Interpreter, TableInterpreter
from subquad.passes.recognise.tensors import show

_AXES = "bhqk"
_MAX_TERMS = 8


@dataclass(frozen=True)
class Bias:
    """One term of the sum that is handed to the node.

    Attributes:
        value: a float tensor that is added, or a boolean one (``visible`` / ``hidden``).
        kind: how it acts.
        axes: of ``bhqk``, those along which it varies.
        claim: what the report says about it.
    """

    value: ir.Value
    kind: MaskKind
    axes: str
    claim: SiteBias


@dataclass(frozen=True)
class Separated:
    """All terms of one attention: proved masks, with what they mean, proved ALiBi, and biases."""

    masks: tuple[Mask, ...]
    derived: DerivedMask
    biases: tuple[Bias, ...]
    alibi: Alibi | None = None


def separate(
    interpreter: Interpreter,
    masks: Sequence[Mask],
    shape: ScoreShape,
    tables: TableInterpreter,
    *,
    is_causal: bool = False,
    beside_sinks: bool = False,
) -> Separated:
    """Prove what can be proved to be a mask or ALiBi, and keep the rest as biases.

    Args:
        interpreter, masks, shape, is_causal: as for ``derive_mask``.
        tables, beside_sinks: as for ``read_alibi``; the former reads the same graph.

    Raises:
        OpaqueError: a term does not fit the scores, or the operator's own causality no band.
    """
    try:
        derived = derive_mask(interpreter, masks, shape, is_causal=is_causal)
        return Separated(tuple(masks), derived, ())
    except OpaqueError as error:
        failure = error
    terms = [term for mask in masks for term in summands(mask, interpreter)]
    if len(terms) > _MAX_TERMS:
        raise failure
    proved: list[Mask] = []
    derived = derive_mask(interpreter, (), shape, is_causal=is_causal)
    biases: list[Bias] = []
    for term in terms:
        try:
            derived = derive_mask(interpreter, (*proved, term), shape, is_causal=is_causal)
            proved.append(term)
        except OpaqueError as error:
            biases.append(_bias(term, shape, interpreter, str(error)))
    for bias in biases:
        if bias.kind == "additive":
            try:
                alibi = read_alibi(
                    bias.value, shape, derived.predicate, tables, beside_sinks=beside_sinks
                )
            except OpaqueError:
                continue  # the bias keeps its own reason
            rest = tuple(other for other in biases if other is not bias)
            return Separated(tuple(proved), derived, rest, alibi)
    return Separated(tuple(proved), derived, tuple(biases))


def joint_axes(biases: Sequence[Bias], score_function: ScoreFunction) -> str:
    """Axes along which the sum of these varies, as ``AttentionVariant.score_bias``.

    One number for all scores does not show in a softmax: "".
    """
    if biases and score_function == "sigmoid" and not any(bias.axes for bias in biases):
        return SCALAR
    return "".join(axis for axis in _AXES if any(axis in bias.axes for bias in biases))


def summands(mask: Mask, interpreter: Interpreter) -> list[Mask]:
    """The summands of an additive term; selections with a large negative value are masks."""
    value, kind = mask
    node = value.producer()
    if node is None or kind != "additive" or value.const_value is not None:
        return [mask]
    inputs = [v for v in node.inputs if v is not None]
    if node.op_type == "Add" and len(inputs) == 2:
        return [term for v in inputs for term in summands((v, "additive"), interpreter)]
    if node.op_type == "Where" and len(inputs) == 3:
        condition, chosen, other = inputs
        choices: tuple[tuple[ir.Value, ir.Value, MaskKind], ...] = (
            (chosen, other, "visible"),
            (other, chosen, "hidden"),
        )
        for kept, fill, acts in choices:
            number = uniform(fill, interpreter)
            if number is not None and number <= HIDDEN_BELOW:
                return [(condition, acts), *summands((kept, "additive"), interpreter)]
    if node.op_type in ("Identity", "Expand"):
        # What is added is broadcast anyway.
        return summands((inputs[0], "additive"), interpreter)
    return [mask]


def uniform(value: ir.Value, interpreter: Interpreter) -> float | None:
    """The value of all elements, also when the graph computes it from fixed sizes."""
    try:
        dims = interpreter.tensor(value).shape
        index = tuple(position(f"x{axis}", dim) for axis, dim in enumerate(dims))
        term = interpreter.element(value, index)
    except OpaqueError:
        return None  # computed from activations: not a scale
    if not isinstance(term, Affine) or not term.is_constant:
        return None
    return float(term.constant)


def _bias(mask: Mask, shape: ScoreShape, interpreter: Interpreter, reason: str) -> Bias:
    value, kind = mask
    if kind in ("factor", "decay"):
        raise OpaqueError(f"what weights are multiplied by is no mask: {reason}")
    tensor = interpreter.tensor(value)
    names = _AXES if shape.heads is not None else _AXES.replace("h", "")
    sizes = [size for _, size in shape.axes]
    if len(tensor.shape) > len(sizes):
        raise OpaqueError(f"a bias of shape {show(tensor.shape)} on scores of {len(sizes)} axes")
    wanted = {ir.DataType.FLOAT} if kind == "additive" else {ir.DataType.BOOL}
    if tensor.dtype not in wanted:
        what = "unknown type" if tensor.dtype is None else tensor.dtype.name
        raise OpaqueError(f"a bias of {what}: {reason}")
    axes = ""
    offset = len(sizes) - len(tensor.shape)
    for axis, dim in enumerate(tensor.shape, start=offset):
        mismatch = dim - sizes[axis]
        if dim == ONE:
            continue
        if mismatch.is_constant and mismatch != ZERO:
            raise OpaqueError(f"a bias with {dim} entries where the scores have {sizes[axis]}")
        axes += names[axis]
    return Bias(value, kind, axes, SiteBias(_depends_on(mask), axes, reason))


def _depends_on(mask: Mask) -> str:
    """What the values of a bias come from."""
    value, kind = mask
    what = "bias" if kind == "additive" else "mask"
    try:
        region = region_between([value], [])
    except OpaqueError:
        return f"{what} computed from activations"
    readers = {node for node in region.nodes if node.op_type not in ("Shape", "Size")}
    read = [v for v in region.inputs if v is value or any(u.node in readers for u in v.uses())]
    if not read:
        return f"{what} of positions"
    names = ", ".join(str(v.name) for v in read)
    return f"{what} computed from {names}"
