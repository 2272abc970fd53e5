"""Element by element operators, and those that make tensors from sizes: their symbolic reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from subquad.passes.recognise.affine import (
    ONE,
    ZERO,
    Affine,
    OpaqueError,
    constant,
    position,
    product,
)
from subquad.passes.recognise.expressions import (
    EXACT_POSITIONS,
    AtLeastZero,
    Term,
    apply,
    at_least_zero,
    where,
)
from subquad.passes.recognise.tensors import (
    Index,
    SymbolicTensor,
    aligned,
    as_affine,
    as_int,
    broadcast_shape,
    opaque,
    type_name,
)

Inputs: TypeAlias = Sequence[SymbolicTensor | None]
Handler: TypeAlias = Callable[[ir.Node, Inputs], SymbolicTensor]
ARITHMETIC: dict[str, Handler] = {}


def _handles(*op_types: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        for op_type in op_types:
            ARITHMETIC[op_type] = function
        return function

    return register


def need(inputs: Inputs, number: int) -> SymbolicTensor:
    """An input that must be there."""
    tensor = inputs[number] if number < len(inputs) else None
    if tensor is None:
        raise OpaqueError(f"input {number} is absent")
    return tensor


def optional(inputs: Inputs, number: int) -> SymbolicTensor | None:
    return inputs[number] if number < len(inputs) else None


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _elementwise(
    op: str, tensors: Sequence[SymbolicTensor], dtype: ir.DataType | None
) -> SymbolicTensor:
    # Shapes hold for operators outside the language too; their elements are asked for later.
    return SymbolicTensor(
        broadcast_shape([t.shape for t in tensors]),
        lambda index: apply(op, tuple(aligned(t, index) for t in tensors), type_name(dtype)),
        dtype,
    )


def _common_type(tensors: Sequence[SymbolicTensor]) -> ir.DataType | None:
    return next((t.dtype for t in tensors if t.dtype is not None), None)


@_handles("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Floor", "Ceil", "Round", "Reciprocal")
@_handles("Exp", "Log", "Sign")
def _arithmetic(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    tensors = [need(inputs, i) for i in range(len(inputs))]
    return _elementwise(node.op_type, tensors, _common_type(tensors))


@_handles("Pow")
def _power(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    base = need(inputs, 0)
    return _elementwise("Pow", [base, need(inputs, 1)], base.dtype)


@_handles("Mod")
def _modulo(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    tensors = [need(inputs, 0), need(inputs, 1)]
    op = "Fmod" if int_attribute(node, "fmod", 0) else "Mod"
    return _elementwise(op, tensors, _common_type(tensors))


@_handles("And", "Or", "Xor", "Not", "IsNaN")
@_handles("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
def _predicate(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    tensors = [need(inputs, i) for i in range(len(inputs))]
    return _elementwise(node.op_type, tensors, ir.DataType.BOOL)


@_handles("IsInf")
def _is_inf(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    if not (
        int_attribute(node, "detect_negative", 1) and int_attribute(node, "detect_positive", 1)
    ):
        return SymbolicTensor(data.shape, opaque("IsInf of one sign"), ir.DataType.BOOL)
    return _elementwise("IsInf", [data], ir.DataType.BOOL)


@_handles("Where")
def _where(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    condition, chosen, other = (need(inputs, i) for i in range(3))

    def at(index: Index) -> Term:
        return where(
            aligned(condition, index),
            lambda: aligned(chosen, index),
            lambda: aligned(other, index),
        )

    shape = broadcast_shape([chosen.shape, other.shape, condition.shape])
    return SymbolicTensor(shape, at, _common_type([chosen, other]))


@_handles("Min", "Max")
def _extremum(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    result = need(inputs, 0)
    for i in range(1, len(inputs)):
        pair = [result, need(inputs, i)]
        result = _elementwise(node.op_type, pair, _common_type(pair))
    return result


@_handles("Clip")
def _clip(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    result, low, high = need(inputs, 0), optional(inputs, 1), optional(inputs, 2)
    if low is not None:
        result = _elementwise("Max", [result, low], result.dtype)
    if high is not None:
        result = _elementwise("Min", [result, high], result.dtype)
    return result


@_handles("Identity")
def _identity(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    return need(inputs, 0)


@_handles("Dropout")
def _dropout(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data, training = need(inputs, 0), optional(inputs, 2)
    if training is not None and training.scalar() != ZERO:
        return SymbolicTensor(data.shape, opaque("Dropout in training mode"), data.dtype)
    return data


@_handles("Cast", "CastLike")
def _cast(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    if node.op_type == "Cast":
        to = ir.DataType(node.attributes["to"].as_int())
    else:
        target = need(inputs, 1).dtype
        if target is None:
            raise OpaqueError("CastLike a tensor of unknown type")
        to = target

    def at(index: Index) -> Term:
        term = data.at(index)
        if to == ir.DataType.BOOL:
            if isinstance(term, Affine) and not term.is_constant:
                raise OpaqueError(f"position {term} converted to bool")
            return apply("Bool", (term,), "bool")
        if isinstance(term, AtLeastZero):
            return term  # 0 and 1 are exact in every type
        return apply("Cast", (term,), type_name(to))

    return SymbolicTensor(data.shape, at, to)


# --- operators of which only the shape is followed ------------------------------------------


@_handles("Erf", "Tanh", "Sigmoid", "Relu", "Gelu", "Softplus", "Cos", "Sin", "Softmax", "Swish")
@_handles("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "Mish")
@_handles("BatchNormalization", "HardSwish", "Elu")
@_handles("RotaryEmbedding", "InstanceNormalization", "GroupNormalization")
def _same_shape(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    return SymbolicTensor(data.shape, opaque(f"operator {node.op_type}"), data.dtype)


@_handles("MatMul")
def _matmul(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    a, b = need(inputs, 0), need(inputs, 1)
    left, right = a.shape, b.shape
    if len(left) < 2 or len(right) < 2:
        raise OpaqueError("MatMul of vectors")
    shape = (*broadcast_shape([left[:-2], right[:-2]]), left[-2], right[-1])
    return SymbolicTensor(shape, opaque("operator MatMul"), _common_type([a, b]))


@_handles("MatMulInteger", "QLinearMatMul")
def _integer_matmul(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    a, b = need(inputs, 0), need(inputs, 3 if node.op_type == "QLinearMatMul" else 1)
    left, right = a.shape, b.shape
    shape = (*broadcast_shape([left[:-2], right[:-2]]), left[-2], right[-1])
    dtype = a.dtype if node.op_type == "QLinearMatMul" else ir.DataType.INT32
    return SymbolicTensor(shape, opaque(f"operator {node.op_type}"), dtype)


@_handles("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
def _quantised(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data = need(inputs, 0)
    if node.op_type == "DequantizeLinear":
        dtype = need(inputs, 1).dtype
    else:
        zero = optional(inputs, 2)
        dtype = ir.DataType.UINT8 if zero is None else zero.dtype
    return SymbolicTensor(data.shape, opaque(f"operator {node.op_type}"), dtype)


@_handles("Gemm")
def _gemm(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    a, b = need(inputs, 0), need(inputs, 1)
    rows = a.shape[1 if int_attribute(node, "transA", 0) else 0]
    columns = b.shape[0 if int_attribute(node, "transB", 0) else 1]
    return SymbolicTensor((rows, columns), opaque("operator Gemm"), _common_type([a, b]))


@_handles("CumSum")
def _running_sum(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    """Along an axis on which nothing changes it is a multiple of the position."""
    data, given = need(inputs, 0), need(inputs, 1)
    exclusive, reverse = (int_attribute(node, name, 0) for name in ("exclusive", "reverse"))

    def at(index: Index) -> Term:
        axis = as_int(given.scalar()) % len(data.shape)
        any_place = position("summed", data.shape[axis])
        term = data.at((*index[:axis], any_place, *index[axis + 1 :]))
        varies = not isinstance(term, Affine) or any(s in term.symbols for s in any_place.symbols)
        if varies or data.type_name not in EXACT_POSITIONS:
            raise OpaqueError(f"a running sum of {term}")
        assert isinstance(term, Affine)
        here = as_affine(index[axis])
        count = data.shape[axis] - here if reverse else here + ONE
        total = product(term, count - ONE if exclusive else count)
        if total is None:
            raise OpaqueError(f"a running sum of {term}")
        return total

    return SymbolicTensor(data.shape, at, data.dtype)


# --- from sizes ----------------------------------------------------------------------------


@_handles("Shape")
def _shape(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    dims = need(inputs, 0).shape
    end = node.attributes.get("end")
    dims = dims[int_attribute(node, "start", 0) : None if end is None else end.as_int()]
    return SymbolicTensor(
        (constant(len(dims)),), lambda index: dims[as_int(index[0])], ir.DataType.INT64
    )


@_handles("Size")
def _size(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    total: Term = ONE
    for dim in need(inputs, 0).shape:
        total = apply("Mul", (total, dim), "int64")
    return SymbolicTensor((), lambda index: total, ir.DataType.INT64)


@_handles("Range")
def _range(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    first = need(inputs, 0)
    start, limit, step = (as_affine(need(inputs, i).scalar()) for i in range(3))
    if not step.is_constant or step.constant == 0:
        raise OpaqueError(f"Range with step {step}")
    span = limit - start
    if span.is_constant:
        length = constant(max(0, math.ceil(span.constant / step.constant)))
    elif step.constant == 1 and at_least_zero(span) == ONE and float(span.constant).is_integer():
        length = span
    else:
        raise OpaqueError(f"Range of {span} by {step}")
    return SymbolicTensor(
        (length,), lambda i: as_affine(i[0]).scaled(step.constant) + start, first.dtype
    )


@_handles("ConstantOfShape")
def _constant_of_shape(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    shape = tuple(need(inputs, 0).vector())
    attribute = node.attributes.get("value")
    if attribute is None:
        return SymbolicTensor(shape, lambda index: ZERO, ir.DataType.FLOAT)
    tensor = attribute.as_tensor()
    value = constant(tensor.numpy().reshape(-1)[0].item())
    return SymbolicTensor(shape, lambda index: value, tensor.dtype)


@_handles("Trilu")
def _trilu(node: ir.Node, inputs: Inputs) -> SymbolicTensor:
    data, given = need(inputs, 0), optional(inputs, 1)
    offset = as_affine(given.scalar()) if given is not None else ZERO
    upper = bool(int_attribute(node, "upper", 1))

    def at(index: Index) -> Term:
        diagonal = as_affine(index[-1]) - as_affine(index[-2]) - offset
        keep = at_least_zero(diagonal if upper else diagonal.scaled(-1))
        return where(keep, lambda: data.at(index), lambda: ZERO)

    return SymbolicTensor(data.shape, at, data.dtype)
