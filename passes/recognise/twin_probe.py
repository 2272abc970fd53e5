"""Check that a twin in standard operators computes what its attention operator computes.

Both run in ONNX Runtime on the same random inputs, which are spread so that scores have a standard
deviation of 4, as in ``probe``.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.passes.recognise.affine import Affine, OpaqueError
from subquad.passes.recognise.probe import relative_distance
from subquad.passes.recognise.speller import Role, Twin
from subquad.passes.recognise.subgraph import Piece
from subquad.passes.recognise.symbolic import Interpreter

# Two float32 evaluations with projections before them; measured below 2e-6.
_TOLERANCE = 1e-5
_SCORE_STD = 4.0
_BATCH = 3
# Lengths of queries, and of the keys before them where the operator has a cache.
_LENGTHS = (1, 6, 19)
_PASTS = (0, 5, 16)
# Keys of another sequence than the queries: so many more.
_MORE_KEYS = 3


def check_twin(model: ir.Model, twin: Twin, interpreter: Interpreter) -> None:
    """Compare; the twin's nodes must be in the graph.

    Raises:
        OpaqueError: they differ, or ONNX Runtime cannot run one of them.
    """
    dynamic = list(twin.roles)
    outputs = list(twin.outputs)
    fused = Piece(model, dynamic, outputs)
    spelled = Piece(model, dynamic, [twin.scores, *twin.outputs.values()])
    rng = np.random.default_rng(2)
    has_past = "past" in twin.roles.values()
    for length, past in itertools.product(_LENGTHS, _PASTS if has_past else _PASTS[:1]):
        sizes = _Sizes(twin, interpreter, length, past)
        feeds = {
            value.name or "": sizes.random(rng, value, role) for value, role in twin.roles.items()
        }
        scores = spelled.run(feeds)[0]
        factor = (_SCORE_STD / max(float(np.std(scores)), 1e-6)) ** 0.5 if scores.size > 8 else 2.0
        for value, role in twin.roles.items():
            if role in ("activation", "past"):
                feeds[value.name or ""] *= np.float32(factor)
        wanted, (_, *found) = fused.run(feeds), spelled.run(feeds)
        for value, want, got in zip(outputs, wanted, found, strict=True):
            error = _error(twin, feeds, value, want, got)
            if not error <= _TOLERANCE:
                raise OpaqueError(
                    f"{twin.fused.op_type}, spelled out, gives another {value.name!r}: relative "
                    f"error {error:.2g} at length {length}, past {sizes.past}"
                )


def _error(
    twin: Twin,
    feeds: dict[str, NDArray[Any]],
    value: ir.Value,
    want: NDArray[Any],
    got: NDArray[Any],
) -> float:
    """Relative distance, over rows that have a meaning."""
    if want.shape != got.shape:
        raise OpaqueError(
            f"{twin.fused.op_type}, spelled out, gives shape {got.shape}, not {want.shape}"
        )
    if twin.real is not None:
        real = np.asarray(feeds[twin.real.name or ""]).astype(bool)
        # What a row has behind its last real token is in no known order.
        whole = real.all(axis=1)
        if value is not twin.fused.outputs[0]:
            want, got = want[whole], got[whole]
        else:
            rows = real[:, real.shape[1] - want.shape[1] :]
            want, got = want[rows], got[rows]
    last = None if twin.last is None else feeds.get(twin.last.name or "")
    if last is not None and value is twin.fused.outputs[0]:
        rows = np.arange(want.shape[1])[None, :] <= np.asarray(last).reshape(-1, 1)
        want, got = want[rows], got[rows]
    return relative_distance(want, got)


class _Sizes:
    """Shapes and values of the inputs of one operator at one length and past."""

    def __init__(self, twin: Twin, interpreter: Interpreter, length: int, past: int) -> None:
        self._interpreter = interpreter
        query, key = (
            next((v for v in twin.fused.inputs[place : place + 1] if v is not None), None)
            for place in (0, 1)
        )
        assert query is not None
        self._query = query
        dims = self._dims(query)
        count = self._tokens(query)
        # Several tokens behind a cache are served for one row only.
        free = 1 if twin.real is not None and length > 1 and past else _BATCH
        self.batch = int(dims[0].constant) if dims[0].is_constant else free
        self.length = int(count.constant) if count.is_constant else length
        self.keys = self.length
        if key is not None and twin.roles.get(key) == "activation":
            keys = self._tokens(key)
            if keys.is_constant:
                self.keys = int(keys.constant)
            elif keys != count:
                self.keys = length + _MORE_KEYS
        pasts = [self._dims(v)[-2] for v, role in twin.roles.items() if role == "past"]
        self.past = past if pasts else 0
        if pasts and pasts[0].is_constant:
            self.past = int(pasts[0].constant)
        self.kv_len = self.past + self.keys

    def _dims(self, value: ir.Value) -> tuple[Affine, ...]:
        return self._interpreter.tensor(value).shape

    def _tokens(self, value: ir.Value) -> Affine:
        """The number of tokens of an operand: ``[batch, heads, tokens, dim]`` or fewer axes."""
        dims = self._dims(value)
        return dims[2] if len(dims) == 4 else dims[1]

    def random(self, rng: np.random.Generator, value: ir.Value, role: Role) -> NDArray[Any]:
        assert value.dtype is not None
        dtype, shape = value.dtype.numpy(), self._shape(value, role)
        if role in ("mask", "seen"):
            real = rng.random(shape) < 0.7
            real[..., 0] = True
            return real.astype(dtype)
        if role == "real":
            return self._real(rng).astype(dtype)
        if role in ("lengths", "last"):
            least = 0 if role == "last" else 1
            return rng.integers(least, self.kv_len + least, shape).astype(dtype)
        if role == "nonpad":
            # Fewer keys than queries leave the first queries without any.
            least = min(self.length, self.kv_len)
            return rng.integers(least, self.kv_len + 1, shape).astype(dtype)
        if role == "total":
            return np.full(shape, self.kv_len, dtype)
        if role == "positions":
            places = np.arange(self.past, self.past + self.length)
            return np.broadcast_to(places, shape).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    def _real(self, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Row 0 is full; others are padded behind their prompt, if that may be."""
        real = np.ones((self.batch, self.kv_len), bool)
        prompt = self.past or self.length
        if self.past == 0 or self.length == 1:
            for row in range(1, self.batch):
                real[row, int(rng.integers(1, prompt + 1)) : prompt] = False
        return real

    def _shape(self, value: ir.Value, role: Role) -> tuple[int, ...]:
        dims = self._dims(value)
        known = [int(dim.constant) if dim.is_constant else -1 for dim in dims]
        names = [-1] * len(dims)
        if role == "activation":
            tokens = self.length if value is self._query else self.keys
            names[0], names[2 if len(dims) == 4 else 1] = self.batch, tokens
        elif role == "past":
            names[-4], names[-2] = self.batch, self.past
        elif role in ("mask", "real") and len(dims) == 2:
            names = [self.batch, self.kv_len]
        elif role in ("bias", "mask", "seen"):
            names = [self.batch, self.length, self.kv_len][-len(dims) :]
            names = [self.batch, -1, self.length, self.kv_len] if len(dims) == 4 else names
        else:
            names = [self.batch, self.length, -1, -1]
        shape = tuple(n if k < 0 else k for k, n in zip(known, names, strict=False))
        if min(shape, default=0) < 0:
            raise OpaqueError(f"input {value.name!r} has an unknown size")
        return shape
