"""Check claims against the graph: evaluate the mask, and the whole attention, on samples.

The mask is evaluated at sampled lengths and paddings and must equal the derived predicate
everywhere. The raised node is run beside the source subgraph on random queries, keys and values
whose scores are spread wide (standard deviation 4; with a softcap also as wide as the cap), so
that an error of 1 % in the scale moves the output a thousand times more than the tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.operator import HIDING_BIAS, UNLIMITED
from subquad.passes.recognise.affine import ONE, Affine, OpaqueError, Symbol
from subquad.passes.recognise.bias import Bias
from subquad.passes.recognise.candidates import Candidate
from subquad.passes.recognise.layout import Operand
from subquad.passes.recognise.mask import HIDDEN_BELOW, DerivedMask, ScoreShape
from subquad.passes.recognise.site import LinearForm, MaskPredicate
from subquad.passes.recognise.subgraph import Piece, region_between
from subquad.passes.recognise.symbolic import Interpreter

# Two float32 evaluations of one attention in different orders; measured 3e-7 at these sizes.
TOLERANCE = 1e-5
_SCORE_STD = 4.0
# Attention at longer lengths costs more than it can show; masks are probed beyond.
_MAX_NODE_LENGTH = 300
_MAX_MASK_LENGTH = 4200
# The least float32: exporters hide keys by adding it.
_HIDING = float(np.finfo(np.float32).min)
# Names under which the raised node is fed.
ROLES = ("query", "key", "value")
PADDING_ROLE = "padding"
SINK_ROLE = "sinks"


def bias_role(number: int) -> str:
    """Name under which the raised node is fed its biases."""
    return f"bias{number}"


@dataclass(frozen=True)
class Question:
    """What is claimed about one candidate, and with what to read its graph.

    Attributes:
        model: the source graph.
        interpreter: has read it.
        candidate: the attention.
        shape: of its scores.
        derived: the claim about its masks.
    """

    model: ir.Model
    interpreter: Interpreter
    candidate: Candidate
    shape: ScoreShape
    derived: DerivedMask


@dataclass(frozen=True)
class ProbePoint:
    """One sample: sizes of all dimensions, and which keys are real (``[batch, kv_len]`` bool)."""

    sizes: Mapping[Symbol, int]
    batch: int
    query_len: int
    kv_len: int
    real: NDArray[np.bool_]


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


# --- samples -------------------------------------------------------------------------------


def sample_points(shape: ScoreShape, predicate: MaskPredicate, limit: int) -> Iterator[ProbePoint]:
    """Lengths around every claimed limit, and paddings of every kind, that the sizes allow."""
    lengths = {1, 2, 7, 33}
    edges: set[int] = set()
    for window in (predicate.window_left, predicate.window_right):
        if window > 0:
            edges |= {window, window + 1, window + 2, 2 * window + 5}
    rng = np.random.default_rng(0)
    count = 0
    for length, past in _lengths(lengths, edges, _past_symbol(shape)):
        batch = 6 if length + past <= _MAX_NODE_LENGTH else 1
        sizes = _sizes(shape, batch, length, past)
        rows, query_len, kv_len = (
            int(d.value(sizes)) for d in (shape.batch, shape.query_len, shape.kv_len)
        )
        # A fixed size may be longer than any sample: then it is the only sample.
        if min(rows, query_len, kv_len) < 1 or (max(query_len, kv_len) > limit and length > 1):
            continue
        real = paddings(rng, rows, kv_len)
        yield ProbePoint(sizes, rows, query_len, kv_len, real)
        count += 1
        if shape.query_len.is_constant and shape.kv_len.is_constant:
            return
    if not count:
        raise OpaqueError(f"no sample fits lengths {shape.query_len} and {shape.kv_len}")


def _past_symbol(shape: ScoreShape) -> Symbol | None:
    """The number of keys before the first query, where it is a dimension of its own."""
    before = shape.kv_len - shape.query_len
    alone = len(before.terms) == 1 and not before.constant and before.terms[0][1] == 1
    symbol = before.terms[0][0] if alone else None
    return symbol if symbol is not None and symbol not in shape.query_len.symbols else None


def _lengths(lengths: set[int], edges: set[int], past: Symbol | None) -> Iterator[tuple[int, int]]:
    """Lengths of queries and numbers of keys before them; the latter 0 where there is no past."""
    if past is None:
        yield from ((length, 0) for length in sorted(lengths | edges))
        return
    pasts = sorted({past.least * 3, 1, 7, 19})
    yield from itertools.product(sorted(lengths), pasts)
    for edge in sorted(edges):
        yield from ((edge, pasts[0]), (1, edge), (5, edge - 1), (7, edge))


def _sizes(shape: ScoreShape, batch: int, length: int, past: int) -> dict[Symbol, int]:
    """Sizes for the symbols of the scores: the first of the queries is ``length``."""
    sizes = dict.fromkeys(shape.batch.symbols, batch)
    free = [s for s in (*shape.query_len.symbols, *shape.kv_len.symbols) if s not in sizes]
    for number, symbol in enumerate(dict.fromkeys(free)):
        sizes[symbol] = length if number == 0 else 3 + (number + length) % 4
    counted = _past_symbol(shape)
    if counted is not None:
        sizes[counted] = past
        return sizes
    # Unrelated lengths of queries and keys: keys a few more, so that alignments differ.
    if len(shape.kv_len.terms) == 1 and shape.kv_len.symbols[0] not in shape.query_len.symbols:
        wanted = length + 3 - shape.kv_len.constant
        sizes[shape.kv_len.symbols[0]] = max(1, int(wanted / shape.kv_len.terms[0][1]))
    return sizes


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


# --- feeding -------------------------------------------------------------------------------


class _Source:
    """A part of the source graph that runs alone on a probe point."""

    def __init__(
        self, question: Question, cut: Sequence[ir.Value], outputs: Sequence[ir.Value]
    ) -> None:
        self._question = question
        region = region_between(outputs, cut)
        self._inputs = region.inputs
        self._measured = region.measured
        given = dict.fromkeys([*cut, *region.inputs, *region.measured])
        self._piece = Piece(question.model, list(given), outputs)

    def run(self, point: ProbePoint, given: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        feeds = {value.name or "": self._input(value, point) for value in self._inputs}
        feeds |= {value.name or "": self._zeros(value, point) for value in self._measured}
        return self._piece.run({**feeds, **given})

    def _input(self, value: ir.Value, point: ProbePoint) -> NDArray[Any]:
        """The padding pattern; zeros for inputs that claims do not depend on."""
        assert value.dtype is not None
        if value.name == self._question.derived.padding_input:
            return point.real.astype(value.dtype.numpy())
        return self._zeros(value, point)

    def _zeros(self, value: ir.Value, point: ProbePoint) -> NDArray[Any]:
        assert value.dtype is not None
        dims = self._question.interpreter.tensor(value).shape
        # Dimensions the scores do not know: of other inputs, where names were not unified.
        shape = [
            _size(dim, point, point.batch if axis == 0 else point.query_len)
            for axis, dim in enumerate(dims)
        ]
        return np.zeros(shape, dtype=value.dtype.numpy())


def _size(dim: Affine, point: ProbePoint, otherwise: int) -> int:
    known = all(symbol in point.sizes for symbol in dim.symbols)
    return int(dim.value(point.sizes)) if known else otherwise


# --- masks ---------------------------------------------------------------------------------


def probe_masks(question: Question) -> int:
    """Evaluate the masks and compare with the derived predicate; returns the number of points.

    Raises:
        OpaqueError: they differ, or the mask cannot be evaluated alone.
    """
    candidate, predicate = question.candidate, question.derived.predicate
    if not candidate.masks:
        return 0
    fixed = {v: v.const_value.numpy() for v, _ in candidate.masks if v.const_value is not None}
    computed = [v for v in dict.fromkeys(v for v, _ in candidate.masks) if v not in fixed]
    source = _Source(question, [], computed) if computed else None
    count = 0
    for point in sample_points(question.shape, predicate, _MAX_MASK_LENGTH):
        arrays = dict(fixed)
        if source is not None:
            arrays |= dict(zip(computed, source.run(point, {}), strict=True))
        seen = np.ones((point.batch, 1, point.query_len, point.kv_len), dtype=bool)
        if candidate.is_causal:
            seen &= np.tril(np.ones(seen.shape[2:], dtype=bool))
        for value, kind in candidate.masks:
            array = arrays[value]
            if candidate.mask_axes == 3 and array.ndim == 3:
                array = array[:, None]
            if kind == "additive":
                part = array > HIDDEN_BELOW
            elif kind == "factor":
                part = _truth(array)
            elif kind == "decay":
                part = array != 0
            else:
                part = array.astype(bool) if kind == "visible" else ~array.astype(bool)
            seen = _both(seen, part)
        expected = visible_pairs(predicate, point)[:, None]
        if not bool(np.all(seen == expected)):
            raise OpaqueError(
                f"the mask of the graph differs from the derived one ({predicate.describe()}) "
                f"at query length {point.query_len}, key length {point.kv_len}"
            )
        count += 1
    return count


def _truth(factor: NDArray[Any]) -> NDArray[np.bool_]:
    """What a mask that multiplies weights lets through."""
    if not bool(np.all((factor == 0) | (factor == 1))):
        raise OpaqueError("what multiplies the weights has values besides 0 and 1")
    return np.asarray(factor == 1)


def _both(seen: NDArray[np.bool_], part: NDArray[np.bool_]) -> NDArray[np.bool_]:
    try:
        return np.logical_and(seen, part)
    except ValueError:
        raise OpaqueError(
            f"a mask of shape {list(part.shape)} on scores of shape {list(seen.shape)}"
        ) from None


# --- the whole attention -------------------------------------------------------------------


@dataclass
class NodeProbes:
    """What the probes of one node saw.

    Attributes:
        count: inputs on which source and raised node agreed.
        max_error: the largest relative error.
        empty_rows: as in ``Proof``.
    """

    count: int = 0
    max_error: float = 0.0
    empty_rows: Literal["", "zeros", "other"] = ""

    def add(self, error: float, empty: NDArray[Any]) -> None:
        """One input: its error, and what the source has in rows that see no key."""
        self.count += 1
        self.max_error = max(self.max_error, error)
        if empty.size and self.empty_rows != "other":
            self.empty_rows = "other" if empty.any() else "zeros"


def probe_node(question: Question, raised: Piece) -> NodeProbes:
    """Run source subgraph and raised node on random inputs.

    Args:
        question: the claims.
        raised: the raised node alone, fed by role.

    Raises:
        OpaqueError: they differ by more than ``TOLERANCE``.
    """
    candidate, predicate = question.candidate, question.derived.predicate
    operands = candidate.operands
    # A bias may be anything: any values do, as long as both sides get the same ones.
    free = [bias.value for bias in candidate.biases if not _is_constant(bias.value)]
    sinks = None if candidate.sinks is None else candidate.sinks.value
    cut = [operand.value for operand in operands] + free + ([] if sinks is None else [sinks])
    source = _Source(question, cut, [candidate.output])
    rng = np.random.default_rng(1)
    probes = NodeProbes()
    for point in sample_points(question.shape, predicate, _MAX_NODE_LENGTH):
        for spread in _spreads(candidate):
            arrays = _random_operands(rng, question, point, spread)
            biases = [_random_bias(rng, question, bias, point) for bias in candidate.biases]
            given = {o.value.name or "": a for o, a in zip(operands, arrays, strict=True)}
            given |= {b.value.name or "": a for b, a in zip(candidate.biases, biases, strict=True)}
            feeds = dict(zip(ROLES, arrays, strict=True)) | {PADDING_ROLE: point.real}
            feeds |= {bias_role(number): array for number, array in enumerate(biases)}
            if sinks is not None:
                logits = _random_sinks(rng, question, sinks)
                given[sinks.name or ""] = feeds[SINK_ROLE] = logits
            (want,) = source.run(point, given)
            (got,) = raised.run(feeds)
            seen = _seen(question, point, biases)
            error = _error(question, point, seen, want, got)
            if not error <= TOLERANCE:
                raise OpaqueError(
                    f"the raised node differs from the source by {error:.2g} (relative, allowed "
                    f"{TOLERANCE:g}) at query length {point.query_len}, key length {point.kv_len}"
                )
            probes.add(error, _of_rows(question, point, ~seen, want))
    return probes


@dataclass(frozen=True)
class _Spread:
    """How queries and keys are drawn: normal, around ``mean``."""

    std: float
    mean: float = 0.0


def _spreads(candidate: Candidate) -> tuple[_Spread, ...]:
    """By the standard deviation of scores; a softcap shows only on scores of its own size.

    An offset would leave sigmoids of smaller scores near 0, where ONNX Runtime rounds them to 1e-7.
    """
    if candidate.linear is not None:
        return _spreads_of_features(candidate.linear, candidate.sizes.head_dim)
    std = max(_SCORE_STD, abs(candidate.score_offset))
    wanted = (std, candidate.softcap) if candidate.softcap else (std,)
    root = math.sqrt(candidate.sizes.head_dim)
    return tuple(_Spread((each / (abs(candidate.scale) * root)) ** 0.5) for each in wanted)


def _spreads_of_features(form: LinearForm, dims: int) -> tuple[_Spread, ...]:
    """Of size one; and so small that an epsilon, read or not, shows in their sums.

    A source that computes ``Elu(x) + 1`` rounds its features to 6e-8, so they cannot be smaller.
    """
    if form.normaliser == "none":
        return (_Spread(1.0),)
    limit = math.sqrt((form.least or form.epsilon or 1e-6) / dims)
    if form.feature_map == "elu":
        return _Spread(1.0), _Spread(0.3, math.log(min(max(0.02, form.least and limit), 1.0)))
    return _Spread(1.0), _Spread(limit)


def _seen(
    question: Question, point: ProbePoint, biases: Sequence[NDArray[Any]]
) -> NDArray[np.bool_]:
    """Rows whose results count: those that see a key, or a sink; ``[batch, heads or 1, q]``.

    Where nothing is divided by what hidden keys leave, the source has zeros, too: all rows count.
    """
    pairs = visible_pairs(question.derived.predicate, point)[:, None]
    candidate = question.candidate
    form = candidate.linear
    divided = form is None or (form.normaliser == "sum" and not (form.epsilon or form.least))
    if candidate.sinks is not None or candidate.score_function == "sigmoid" or not divided:
        return np.ones(pairs.shape[:3], dtype=bool)
    for bias, array in zip(question.candidate.biases, biases, strict=True):
        if question.candidate.mask_axes == 3 and array.ndim == 3:
            array = array[:, None]
        if bias.kind == "additive":
            pairs = _both(pairs, array > HIDING_BIAS)
        else:
            pairs = _both(pairs, array if bias.kind == "visible" else ~array)
    return np.asarray(pairs.any(axis=3))


def _error(
    question: Question,
    point: ProbePoint,
    seen: NDArray[np.bool_],
    want: NDArray[Any],
    got: NDArray[Any],
) -> float:
    """Relative distance over the rows that see a key."""
    if want.shape != got.shape:
        raise OpaqueError(f"the raised node gives shape {got.shape}, the source {want.shape}")
    want, got = (_of_rows(question, point, seen, array) for array in (want, got))
    return relative_distance(want, got)


def relative_distance(want: NDArray[Any], got: NDArray[Any]) -> float:
    """``|got - want| / |want|``; infinite where only ``want`` is all zeros."""
    norm = float(np.linalg.norm(want))
    difference = float(np.linalg.norm(got - want))
    if not norm:
        return math.inf if difference else 0.0
    return difference / norm


def _of_rows(
    question: Question, point: ProbePoint, rows: NDArray[np.bool_], output: NDArray[Any]
) -> NDArray[Any]:
    """Some rows of an output of either layout."""
    sizes, perm = question.candidate.sizes, question.candidate.output_perm
    if perm is not None:
        output = output.transpose(perm)
    if question.candidate.query.heads:
        packed = (point.batch, point.query_len, sizes.num_heads, sizes.value_dim)
        output = output.reshape(packed).swapaxes(1, 2)
    selected: NDArray[Any] = output[np.broadcast_to(rows, output.shape[:3])]
    return selected


def _is_constant(value: ir.Value) -> bool:
    """An initializer that is also an input is only a default."""
    return value.const_value is not None and not value.is_graph_input()


def _random_bias(
    rng: np.random.Generator, question: Question, bias: Bias, point: ProbePoint
) -> NDArray[Any]:
    """Any values of its shape: also some that hide a key; those of the graph if it is constant."""
    if _is_constant(bias.value):
        assert bias.value.const_value is not None
        return bias.value.const_value.numpy()
    dims = question.interpreter.tensor(bias.value).shape
    axes = question.shape.axes[len(question.shape.axes) - len(dims) :]
    shape = [
        1 if dim == ONE else int(size.value(point.sizes))
        for dim, (_, size) in zip(dims, axes, strict=True)
    ]
    visible = rng.random(shape) < 0.8
    if bias.kind != "additive":
        return visible
    return np.where(visible, rng.standard_normal(shape) * 2, _HIDING).astype(np.float32)


def _random_sinks(
    rng: np.random.Generator, question: Question, sinks: ir.Value
) -> NDArray[np.float32]:
    """Logits of the size of scores: a sink that nobody sees proves nothing."""
    dims = [int(size.constant) for size in question.interpreter.tensor(sinks).shape]
    return (rng.standard_normal(dims) * _SCORE_STD + _SCORE_STD).astype(np.float32)


def _random_operands(
    rng: np.random.Generator, question: Question, point: ProbePoint, spread: _Spread
) -> list[NDArray[np.float32]]:
    """Random query, key and value in the layout of the source."""
    candidate = question.candidate
    spreads = (spread, spread, _Spread(1.0))
    known: dict[ir.Value, NDArray[np.float32]] = {}
    operands = candidate.operands
    for operand, drawn in zip(operands, spreads, strict=True):
        if operand.value in known:
            continue  # one value in two roles
        dims = operand.shape(question.interpreter)
        batch, length = point.batch, point.query_len if operand is candidate.query else point.kv_len
        shape = (
            batch if dims[0] != ONE else 1,
            int(dims[1].constant),
            length,
            int(dims[3].constant),
        )
        array = (rng.standard_normal(shape) * drawn.std + drawn.mean).astype(np.float32)
        if candidate.features_of_source:
            array = np.abs(array)
        known[operand.value] = _as_stored(array, operand)
    return [known[operand.value] for operand in operands]


def _as_stored(array: NDArray[np.float32], operand: Operand) -> NDArray[np.float32]:
    """``[batch, heads, length, dim]`` brought to the layout of the source."""
    if operand.heads:
        batch, heads, length, dim = array.shape
        array = array.swapaxes(1, 2).reshape(batch, length, heads * dim)
    elif operand.perm is not None:
        array = array.transpose(np.argsort(operand.perm))
    return np.ascontiguousarray(array)
