"""Check claims against the graph: evaluate the mask, and the whole attention, on samples.

The mask is evaluated at sampled lengths and paddings and must equal the derived predicate
everywhere. The raised node is run beside the source subgraph on random queries, keys and values
whose scores are spread wide (standard deviation 4), so that an error of 1 % in the scale moves
the output a thousand times more than the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.candidates import Candidate
from subquad.passes.recognise.expressions import Affine, OpaqueError
from subquad.passes.recognise.mask import HIDDEN_BELOW
from subquad.passes.recognise.site import MaskPredicate
from subquad.passes.recognise.subgraph import Piece, nodes_between, reached_inputs

# Two float32 evaluations of one attention in different orders; measured 3e-7 at these sizes.
TOLERANCE = 1e-5
_SCORE_STD = 4.0
# Attention at longer lengths costs more than it can show; masks are probed beyond.
_MAX_NODE_LENGTH = 300
_MAX_MASK_LENGTH = 9000
_MAX_NODES = 600

ORT_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


@dataclass(frozen=True)
class ProbePoint:
    """One sample: batch, lengths, and which keys are real (``[batch, kv_len]`` bool)."""

    batch: int
    query_len: int
    kv_len: int
    real: NDArray[np.bool_]


@dataclass(frozen=True)
class Dimensions:
    """Symbolic sizes of one attention: fixed ints or dimension names."""

    batch: Affine
    query_len: Affine
    kv_len: Affine


def visible_pairs(predicate: MaskPredicate, point: ProbePoint) -> NDArray[np.bool_]:
    """``[batch, query_len, kv_len]``: the predicate by its definition."""
    offset = point.kv_len - point.query_len if predicate.alignment == "end" else 0
    distance = np.arange(point.query_len)[:, None] + offset - np.arange(point.kv_len)[None, :]
    seen = np.ones_like(distance, dtype=bool)
    if predicate.window_left != UNLIMITED:
        seen &= distance <= predicate.window_left
    if predicate.window_right != UNLIMITED:
        seen &= distance >= -predicate.window_right
    pairs = np.broadcast_to(seen, (point.batch, *seen.shape))
    return pairs & point.real[:, None, :] if predicate.key_padding else pairs


def sample_points(dims: Dimensions, predicate: MaskPredicate, limit: int) -> Iterator[ProbePoint]:
    """Lengths around every claimed limit, and paddings of every kind, that the sizes allow."""
    lengths = {1, 2, 7, 33}
    for window in (predicate.window_left, predicate.window_right):
        if window > 0:
            lengths |= {window, window + 1, window + 2, 2 * window + 5}
    rng = np.random.default_rng(0)
    for length in sorted(n for n in lengths if n <= limit):
        query_len = _size(dims.query_len, length)
        kv_len = query_len if dims.query_len == dims.kv_len else _size(dims.kv_len, length + 3)
        small = length <= _MAX_NODE_LENGTH
        batch = _size(dims.batch, 6 if small else 1)
        yield ProbePoint(batch, query_len, kv_len, paddings(rng, batch, kv_len))
        if dims.query_len.is_constant and dims.kv_len.is_constant:
            return


def _size(dim: Affine, default: int) -> int:
    return int(dim.constant) if dim.is_constant else default


def paddings(rng: np.random.Generator, batch: int, length: int) -> NDArray[np.bool_]:
    """Rows in turn: all real, right-padded, left-padded, holes, all padding, one real token."""
    real = np.ones((batch, length), dtype=bool)
    for row in range(batch):
        cut = int(rng.integers(0, length)) if length > 1 else 0
        if row % 6 == 1:
            real[row, length - cut :] = False
        elif row % 6 == 2:
            real[row, :cut] = False
        elif row % 6 == 3:
            real[row] = rng.random(length) < 0.6
        elif row % 6 == 4:
            real[row] = False
        elif row % 6 == 5:
            real[row] = np.arange(length) == cut
    return real


def input_feeds(
    inputs: Sequence[ir.Value], padding_input: str, point: ProbePoint, dims: Dimensions
) -> dict[str, NDArray[np.generic]]:
    """Arrays for graph inputs a mask reads: the padding pattern, zeros for the rest."""
    known = {dims.batch: point.batch, dims.query_len: point.query_len, dims.kv_len: point.kv_len}
    feeds: dict[str, NDArray[np.generic]] = {}
    for value in inputs:
        if value.dtype is None or value.shape is None or value.name is None:
            raise OpaqueError(f"the mask reads input {value.name!r} of unknown type")
        dtype = value.dtype.numpy()
        if value.name == padding_input:
            feeds[value.name] = point.real.astype(dtype)
            continue
        shape = []
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, int):
                shape.append(dim)
            else:
                fallback = point.batch if axis == 0 else point.query_len
                symbol = Affine.symbol(dim.value) if dim.value is not None else None
                shape.append(known.get(symbol, fallback) if symbol else fallback)
        feeds[value.name] = np.zeros(shape, dtype=dtype)
    return feeds


def probe_masks(
    model: ir.Model,
    candidate: Candidate,
    predicate: MaskPredicate,
    padding_input: str,
    dims: Dimensions,
) -> int:
    """Evaluate the masks of ``candidate`` and compare with ``predicate``; returns the points.

    Raises:
        OpaqueError: they differ, or the mask cannot be evaluated alone.
    """
    if not candidate.masks:
        return 0
    values = [mask for mask, _ in candidate.masks]
    piece, inputs = _piece(model, [], values)
    count = 0
    for point in sample_points(dims, predicate, _MAX_MASK_LENGTH):
        arrays = _run(piece, input_feeds(inputs, padding_input, point, dims))
        shape = (point.batch, 1, point.query_len, point.kv_len)
        seen = np.ones(shape, dtype=bool)
        if candidate.is_causal:
            seen &= np.tril(np.ones(shape[2:], dtype=bool))
        for array, (_, kind) in zip(arrays, candidate.masks, strict=True):
            if kind == "additive":
                part = array > HIDDEN_BELOW
            else:
                part = array.astype(bool) if kind == "visible" else ~array.astype(bool)
            seen = seen & part
        expected = visible_pairs(predicate, point)[:, None]
        if seen.shape[1] != 1 or not np.array_equal(seen, expected):
            raise OpaqueError(
                f"the mask of the graph differs from the derived one ({predicate.describe()}) "
                f"at query length {point.query_len}, key length {point.kv_len}"
            )
        count += 1
    return count


def probe_node(
    model: ir.Model,
    candidate: Candidate,
    raised: Piece,
    predicate: MaskPredicate,
    padding_input: str,
    dims: Dimensions,
) -> tuple[int, float]:
    """Run source subgraph and raised node on random inputs: (points, largest relative error).

    Raises:
        OpaqueError: they differ by more than ``TOLERANCE``.
    """
    operands = [candidate.query.value, candidate.key.value, candidate.value.value]
    source, inputs = _piece(model, operands, [candidate.output])
    rng = np.random.default_rng(1)
    worst, count = 0.0, 0
    for point in sample_points(dims, predicate, _MAX_NODE_LENGTH):
        feeds = input_feeds(inputs, padding_input, point, dims)
        if padding_input:
            padding = next(v for v in model.graph.inputs if v.name == padding_input)
            assert padding.dtype is not None
            feeds[padding_input] = point.real.astype(padding.dtype.numpy())
        feeds.update(_random_operands(rng, candidate, point))
        (want,), (got,) = _run(source, feeds), _run(raised, feeds)
        if want.shape != got.shape:
            raise OpaqueError(f"the raised node gives shape {got.shape}, the source {want.shape}")
        rows = visible_pairs(predicate, point).any(axis=2)
        if candidate.query.heads:
            want, got = want[rows], got[rows]
        else:
            want, got = want.swapaxes(1, 2)[rows], got.swapaxes(1, 2)[rows]
        norm = float(np.linalg.norm(want))
        error = float(np.linalg.norm(got - want)) / norm if norm else 0.0
        if not error <= TOLERANCE:
            raise OpaqueError(
                f"the raised node differs from the source by {error:.2g} (relative, allowed "
                f"{TOLERANCE:g}) at query length {point.query_len}, key length {point.kv_len}"
            )
        worst, count = max(worst, error), count + 1
    return count, worst


def _random_operands(
    rng: np.random.Generator, candidate: Candidate, point: ProbePoint
) -> dict[str, NDArray[np.float32]]:
    """Random operands in the layout of the source, scores of standard deviation 4."""
    feeds: dict[str, NDArray[np.float32]] = {}
    sizes = candidate.sizes
    std = (_SCORE_STD / (abs(candidate.scale) * sizes.head_dim**0.5)) ** 0.5
    layout = (
        (candidate.query, sizes.num_heads, point.query_len, sizes.head_dim, std),
        (candidate.key, sizes.num_kv_heads, point.kv_len, sizes.head_dim, std),
        (candidate.value, sizes.num_kv_heads, point.kv_len, sizes.value_dim, 1.0),
    )
    for operand, heads, length, dim, scale in layout:
        name = operand.value.name
        assert name is not None
        if name in feeds:
            continue  # one value in two roles
        array = (rng.standard_normal((point.batch, heads, length, dim)) * scale).astype(np.float32)
        if operand.heads:
            array = array.swapaxes(1, 2).reshape(point.batch, length, heads * dim)
        elif operand.perm is not None:
            array = array.transpose(np.argsort(operand.perm))
        feeds[name] = np.ascontiguousarray(array)
    return feeds


def _piece(
    model: ir.Model, cut: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> tuple[Piece, list[ir.Value]]:
    inputs = reached_inputs(outputs, cut)
    if len(nodes_between(outputs, cut)) > _MAX_NODES:
        raise OpaqueError(
            f"the subgraph of {outputs[0].name!r} has more than {_MAX_NODES} nodes: "
            "the mask depends on most of the model"
        )
    try:
        return Piece(model, [*dict.fromkeys(cut), *inputs], outputs), inputs
    except ORT_ERRORS as error:
        raise OpaqueError(f"ONNX Runtime cannot run the subgraph alone: {error}") from error


def _run(piece: Piece, feeds: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
    try:
        return piece.run(feeds)
    except ORT_ERRORS as error:
        raise OpaqueError(f"ONNX Runtime failed on the subgraph: {error}") from error
