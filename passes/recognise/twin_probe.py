"""Check that a twin in standard operators computes what its com.microsoft operator computes.

Both run in ONNX Runtime on the same random inputs, which are spread so that scores have a standard
deviation of 4, as in ``probe``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.spelled_out import Role, Twin
from subquad.passes.recognise.subgraph import Piece
from subquad.passes.recognise.symbolic import Interpreter

# Two float32 evaluations with projections before them; measured below 2e-6.
_TOLERANCE = 1e-5
_SCORE_STD = 4.0
_BATCH = 3
_LENGTHS = (1, 6, 19)
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
    for length in _LENGTHS:
        sizes = _Sizes(twin, interpreter, length)
        feeds = {
            value.name or "": sizes.random(rng, value, role) for value, role in twin.roles.items()
        }
        scores = spelled.run(feeds)[0]
        factor = (_SCORE_STD / max(float(np.std(scores)), 1e-6)) ** 0.5 if scores.size > 8 else 2.0
        for value, role in twin.roles.items():
            if role == "activation":
                feeds[value.name or ""] *= np.float32(factor)
        wanted, (_, *found) = fused.run(feeds), spelled.run(feeds)
        for value, want, got in zip(outputs, wanted, found, strict=True):
            error = _error(twin, feeds, value, want, got)
            if not error <= _TOLERANCE:
                raise OpaqueError(
                    f"{twin.fused.op_type}, spelled out, gives another {value.name!r}: relative "
                    f"error {error:.2g} at length {length}"
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
    last = None if twin.last is None else feeds.get(twin.last.name or "")
    if last is not None and value is twin.fused.outputs[0]:
        rows = np.arange(want.shape[1])[None, :] <= np.asarray(last).reshape(-1, 1)
        want, got = want[rows], got[rows]
    norm = float(np.linalg.norm(want))
    return float(np.linalg.norm(want - got)) / norm if norm else 0.0


class _Sizes:
    """Shapes and values of the inputs of one operator at one length."""

    def __init__(self, twin: Twin, interpreter: Interpreter, length: int) -> None:
        self._interpreter = interpreter
        query, key = (
            next((v for v in twin.fused.inputs[place : place + 1] if v is not None), None)
            for place in (0, 1)
        )
        assert query is not None
        self._query = query
        dims = interpreter.tensor(query).shape
        self.batch = int(dims[0].constant) if dims[0].is_constant else _BATCH
        self.length = int(dims[1].constant) if dims[1].is_constant else length
        self.kv_len = self.length
        if twin.fused.op_type == "MultiHeadAttention" and key is not None:
            keys = interpreter.tensor(key).shape
            count = keys[2] if len(keys) == 4 else keys[1]
            if count.is_constant:
                self.kv_len = int(count.constant)
            elif count != dims[1]:
                self.kv_len = length + _MORE_KEYS

    def random(self, rng: np.random.Generator, value: ir.Value, role: Role) -> NDArray[Any]:
        assert value.dtype is not None
        dtype, shape = value.dtype.numpy(), self._shape(value, role)
        if role == "mask":
            real = rng.random(shape) < 0.7
            real[..., 0] = True
            return real.astype(dtype)
        if role in ("lengths", "last"):
            lengths = rng.integers(1, self.kv_len + 1, shape)
            return (lengths - (role == "last")).astype(dtype)
        if role == "total":
            return np.full(shape, self.kv_len, dtype)
        if role == "positions":
            return np.broadcast_to(np.arange(self.length), shape).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    def _shape(self, value: ir.Value, role: Role) -> tuple[int, ...]:
        dims = self._interpreter.tensor(value).shape
        known = [int(dim.constant) if dim.is_constant else 0 for dim in dims]
        if role == "activation" and len(dims) == 4:
            names = [self.batch, 0, self.kv_len, 0]
        elif role == "activation":
            names = [self.batch, self.length if value is self._query else self.kv_len, 0, 0, 0]
        elif role == "mask" and len(dims) == 2:
            names = [self.batch, self.kv_len]
        elif role in ("bias", "mask"):
            names = [self.batch, self.length, self.kv_len][-len(dims) :]
            names = [self.batch, 0, self.length, self.kv_len] if len(dims) == 4 else names
        else:
            names = [self.batch, self.length, 0, 0]
        shape = tuple(k or n for k, n in zip(known, names, strict=False))
        if 0 in shape:
            raise OpaqueError(f"input {value.name!r} has an unknown size")
        return shape
