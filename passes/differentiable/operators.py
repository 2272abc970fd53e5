"""Standard ONNX operators in torch, as the specification of opset 24 has them.

Each takes its tensors in order and its attributes by name; an attribute that is missing here is a
``TypeError``, never ignored. Shapes stay tensors of int64, as in ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from subquad.passes.differentiable.convolution import CONVOLUTION_OPERATORS
from subquad.passes.differentiable.rotary import rotary_embedding
from subquad.runtime.errors import UnsupportedModelError

_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


def _div(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _mod(a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def _pow(a: Tensor, b: Tensor) -> Tensor:
    return torch.pow(a, b.to(a.dtype))


def _fold(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A variadic operator from one of two tensors."""

    def folded(first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = call(first, other)
        return first

    return folded


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


def _cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(_DTYPES[to])


def _cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(like.dtype)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(x, approximate=approximate)


def _elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.elu(x, alpha)


def _leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return functional.leaky_relu(x, alpha)


def _softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


def _log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


def _swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return x * torch.sigmoid(alpha * x)


# Shapes and movement.


def _sizes(x: Tensor) -> list[int]:
    return [int(size) for size in x.tolist()]


def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


def _constant(**attributes: Any) -> Tensor:
    ((name, value),) = attributes.items()
    if name == "value":
        tensor: Tensor = value
        return tensor
    dtype = torch.float32 if name in ("value_float", "value_floats") else torch.int64
    return torch.tensor(value, dtype=dtype)


def _constant_of_shape(shape: Tensor, *, value: Tensor | None = None) -> Tensor:
    filling = torch.zeros(1) if value is None else value
    return filling.reshape(()).expand(_sizes(shape)).clone()


def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    sizes = _sizes(shape)
    if not allowzero:
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(list(perm) if perm is not None else list(range(x.dim()))[::-1])


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    places = _sizes(axes)
    rank = x.dim() + len(places)
    for axis in sorted(place % rank for place in places):
        x = x.unsqueeze(axis)
    return x


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(_sizes(axes)))


def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    # The untyped function takes and gives plain sizes.
    sizes = torch.broadcast_shapes(x.shape, tuple(_sizes(shape)))  # type: ignore[no-untyped-call]
    return x.expand(sizes)


def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(_sizes(repeats))


def _concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, axis)


def _split(
    x: Tensor, sizes: Tensor | None = None, *, axis: int = 0, num_outputs: int = 0
) -> Sequence[Tensor]:
    if sizes is not None:
        return torch.split(x, _sizes(sizes), axis)
    return torch.split(x, -(-x.shape[axis] // num_outputs), axis)


def _slice(
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    places = range(len(starts)) if axes is None else _sizes(axes)
    strides = [1] * len(starts) if steps is None else _sizes(steps)
    for start, end, axis, step in zip(_sizes(starts), _sizes(ends), places, strides, strict=True):
        size = x.shape[axis]
        low = min(max(start + size if start < 0 else start, 0), size - (step < 0))
        high = end + size if end < 0 else end
        high = min(max(high, -1 if step < 0 else 0), size)
        if step > 0:
            x = x.narrow(axis, low, max(high - low, 0))
            x = x if step == 1 else x.index_select(axis, torch.arange(0, x.shape[axis], step))
        else:
            x = x.index_select(axis, torch.arange(low, high, step))
    return x


def _gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis %= x.dim()
    wrapped = torch.where(indices < 0, indices + x.shape[axis], indices)
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return functional.embedding(wrapped, x)
    taken = x.index_select(axis, wrapped.reshape(-1))
    return taken.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    leading = [
        torch.arange(x.shape[axis]).reshape([-1] + [1] * (indices.dim() - 2 - axis))
        for axis in range(batch_dims)
    ]
    return x[(*leading, *indices.unbind(-1))]


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    if reduction != "none":
        raise UnsupportedModelError(f"training cannot run ScatterND with reduction {reduction!r}")
    return x.clone().index_put(indices.unbind(-1), updates)


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _cumsum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    place = int(axis)
    x = x.flip(place) if reverse else x
    if exclusive:  # shifted, not subtracted: sums stay exact
        first = torch.zeros_like(x.narrow(place, 0, min(1, x.shape[place])))
        x = torch.cat([first, x.narrow(place, 0, max(x.shape[place] - 1, 0))], place)
    total = x.cumsum(place, dtype=x.dtype)
    return total.flip(place) if reverse else total


def _pad(
    x: Tensor,
    pads: Tensor,
    value: Tensor | None = None,
    axes: Tensor | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    if mode != "constant":
        raise UnsupportedModelError(f"training cannot run Pad with mode {mode!r}")
    amounts = _sizes(pads)
    places = range(x.dim()) if axes is None else [axis % x.dim() for axis in _sizes(axes)]
    flat = [0] * (2 * x.dim())
    for number, axis in enumerate(places):
        flat[2 * (x.dim() - 1 - axis)] = amounts[number]
        flat[2 * (x.dim() - 1 - axis) + 1] = amounts[len(amounts) // 2 + number]
    return functional.pad(x, flat, value=0 if value is None else value.item())


def _trilu(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


# Reductions and products.


def _reduction(call: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    def reduce(
        x: Tensor, axes: Tensor | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        places = [] if axes is None else _sizes(axes)
        if not places and noop_with_empty_axes:
            return x
        return call(x, places or list(range(x.dim())), bool(keepdims))

    return reduce


def _arg_max(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    # torch does not say which of equal entries it takes; the first is what ONNX wants.
    best = x == x.amax(axis, keepdim=True)
    size = x.shape[axis]
    places = torch.arange(size).reshape([-1] + [1] * (x.dim() - 1 - axis % x.dim()))
    chosen = torch.where(best, places, -1 if select_last_index else size)
    return (
        chosen.amax(axis, keepdim=bool(keepdims))
        if select_last_index
        else chosen.amin(axis, keepdim=bool(keepdims))
    )


def _top_k(
    x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> Sequence[Tensor]:
    # Of equal entries ONNX takes the first.
    values, places = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, int(k)), places.narrow(axis, 0, int(k))


def _layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    shape = x.shape[axis % x.dim() :]
    return functional.layer_norm(x, shape, scale, bias, epsilon)


def _rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    axes = tuple(range(axis % x.dim(), x.dim()))
    return x * torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + epsilon) * scale


def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803 - the attribute's name
    transB: int = 0,  # noqa: N803
) -> Tensor:
    product = (a.T if transA else a) @ (b.T if transB else b) * alpha
    return product if c is None else product + beta * c


def _einsum(*tensors: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *tensors)


STANDARD_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "And": torch.logical_and,
    "ArgMax": _arg_max,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Ceil": torch.ceil,
    "Clip": _clip,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Cos": torch.cos,
    "CumSum": _cumsum,
    "Div": _div,
    "Einsum": _einsum,
    "Elu": _elu,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": torch.floor,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _leaky_relu,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "LogSoftmax": _log_softmax,
    "MatMul": torch.matmul,
    "Max": _fold(torch.maximum),
    "Min": _fold(torch.minimum),
    "Mod": _mod,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "Pad": _pad,
    "Pow": _pow,
    "RMSNormalization": _rms_norm,
    "RotaryEmbedding": rotary_embedding,
    "Range": _range,
    "Reciprocal": torch.reciprocal,
    "ReduceL2": _reduction(lambda x, axes, keep: x.pow(2).sum(axes, keep).sqrt()),
    "ReduceMax": _reduction(lambda x, axes, keep: x.amax(axes, keep)),
    "ReduceMean": _reduction(lambda x, axes, keep: x.mean(axes, keep)),
    "ReduceMin": _reduction(lambda x, axes, keep: x.amin(axes, keep)),
    "ReduceSum": _reduction(lambda x, axes, keep: x.sum(axes, keep)),
    "Relu": torch.relu,
    "Reshape": _reshape,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Slice": _slice,
    "Softmax": _softmax,
    "Softplus": functional.softplus,
    "Split": _split,
    "Sqrt": torch.sqrt,
    "Squeeze": _squeeze,
    "Sub": torch.sub,
    "Sum": _fold(torch.add),
    "Swish": _swish,
    "Tanh": torch.tanh,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
    "Xor": torch.logical_xor,
    **CONVOLUTION_OPERATORS,
}
