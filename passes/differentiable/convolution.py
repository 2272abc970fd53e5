"""Convolutions, their normalisations and resizing in torch, as ONNX defines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from subquad.runtime.errors import UnsupportedModelError


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    axes = weight.dim() - 2
    if auto_pad not in ("NOTSET", "VALID"):
        raise UnsupportedModelError(f"training cannot run Conv with auto_pad {auto_pad!r}")
    before, after = _pads(pads, axes)
    if before != after:
        flat = [size for axis in reversed(range(axes)) for size in (before[axis], after[axis])]
        x, before = functional.pad(x, flat), [0] * axes
    call = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
    steps, spread = list(strides or [1] * axes), list(dilations or [1] * axes)
    result: Tensor = call(x, weight, bias, steps, before, spread, group)
    return result


def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    axes = weight.dim() - 2
    before, after = _pads(pads, axes)
    if auto_pad not in ("NOTSET", "VALID") or before != after or output_shape is not None:
        raise UnsupportedModelError(
            "training cannot run ConvTranspose with unequal pads or a shape"
        )
    call = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
    ones = [1] * axes
    result: Tensor = call[axes - 1](
        x,
        weight,
        bias,
        list(strides or ones),
        before,
        list(output_padding or [0] * axes),
        group,
        list(dilations or ones),
    )
    return result


def _pads(pads: Sequence[int] | None, axes: int) -> tuple[list[int], list[int]]:
    sizes = list(pads or [0] * (2 * axes))
    return sizes[:axes], sizes[axes:]


def _batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    if training_mode:
        raise UnsupportedModelError("training cannot run BatchNormalization in training mode")
    return functional.batch_norm(x, mean, variance, scale, bias, eps=epsilon)


def _instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def _group_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


CONVOLUTION_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
}
