"""What an attention costs: seconds from a table of measurements, or counted operations.

FLOPs are those the formula needs: a multiplication and an addition each count as one, hidden keys
count nothing. Memory is the state that decoding keeps per sequence, in bytes of float32: keys and
values as far back as they are read, and the sums of a linear part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Literal, Protocol, get_args

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.hybrid.semantics import HeadPart, HybridVariant
from subquad.kernels.operator import UNLIMITED, OperatorVariant
from subquad.passes.costs import CostTable
from subquad.runtime.errors import Rejection, UsageError
from subquad.runtime.machine import usable_cores

Objective = Literal["latency", "memory", "flops"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

CHUNK = 64
"""Of a linear part: each query reads half a chunk of keys one by one, and the sums for the rest."""


@dataclass(frozen=True)
class Shape:
    """What an attention is run on.

    Attributes:
        batch, length: rows, and queries = keys in a row.
        density: share of the visible keys that a selector keeps.
    """

    batch: int
    length: int
    density: float = 1.0


class Prices(Protocol):
    """Prices in one unit."""

    @property
    def unit(self) -> str: ...

    @property
    def source(self) -> str:
        """Where they come from, and why not from something better."""

    def price(self, variants: Sequence[OperatorVariant], shape: Shape) -> float | Rejection:
        """Of all operators of one attention."""


@dataclass(frozen=True)
class Counted:
    """Prices by counting."""

    objective: Literal["memory", "flops"]
    source: str
    count: Callable[[OperatorVariant, Shape], float | Rejection]

    @property
    def unit(self) -> str:
        return "bytes" if self.objective == "memory" else "FLOPs"

    def price(self, variants: Sequence[OperatorVariant], shape: Shape) -> float | Rejection:
        total = 0.0
        for variant in variants:
            one = self.count(variant, shape)
            if isinstance(one, Rejection):
                return one
            total += one
        return total


def counted_flops(source: str = "FLOPs were asked for") -> Counted:
    return Counted("flops", source, flops)


def counted_memory() -> Counted:
    return Counted("memory", "memory was asked for", state_bytes)


@dataclass(frozen=True)
class Measured:
    """Prices by the cost table of this machine.

    Attributes:
        table: see there.
        threads: for one operator.
        kernels: whether what has a kernel runs as one; else everything runs as functions.
    """

    table: CostTable
    threads: int
    kernels: bool = True

    @property
    def unit(self) -> str:
        return "seconds"

    @property
    def source(self) -> str:
        runs_as = "kernels" if self.kernels else "functions"
        return (
            f"measured on this machine with {self.threads} threads and {runs_as}, table "
            f"{self.table.hash[:16]}"
        )

    def price(self, variants: Sequence[OperatorVariant], shape: Shape) -> float | Rejection:
        total = 0.0
        for variant in variants:
            sizes = shape.batch, shape.length, shape.length
            one = self.table.time(
                variant,
                *sizes,
                self.threads,
                density=shape.density,
                runs_as=None if self.kernels else "function",
            )
            if isinstance(one, Rejection):
                return one
            total += one
        return total


def choose_prices(
    objective: Objective,
    threads: int | None,
    exact: Sequence[OperatorVariant] = (),
    *,
    kernels: bool = False,
) -> Prices:
    """Prices of ``objective``; latency falls back to FLOPs where no table of times exists.

    Args:
        objective: see ``Objective``.
        threads: that the model will run with; default: all cores.
        exact: what the attentions are now: a table that does not know them is of no use.
        kernels: whether the artifact will have kernels.

    Raises:
        UsageError: unknown objective.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"Unknown objective {objective!r}; use {', '.join(OBJECTIVES)}.")
    if objective == "memory":
        return counted_memory()
    if objective == "flops":
        return counted_flops()
    table = CostTable.find()
    if isinstance(table, Rejection):
        return counted_flops(f"FLOPs instead of latency: {table.reason}")
    threads = threads or usable_cores()
    for variant in exact:
        if not table.covers(variant, threads):
            return counted_flops(
                f"FLOPs instead of latency: the cost table of this machine has no times of "
                f"{variant.op_type}:{variant.overload} with {threads} threads: "
                "subquad bench --costs ARTIFACT"
            )
    return Measured(table, threads, kernels)


@singledispatch
def flops(variant: OperatorVariant, shape: Shape) -> float | Rejection:
    """Floating-point operations of one operator."""
    return Rejection(f"the FLOPs of {variant.op_type} are not known")


@singledispatch
def state_bytes(variant: OperatorVariant, shape: Shape) -> float | Rejection:
    """Bytes that decoding keeps after ``shape.length`` tokens."""
    return Rejection(f"the memory of {variant.op_type} is not known")


@flops.register
def _(variant: AttentionVariant, shape: Shape) -> float | Rejection:
    keys = band_keys(shape.length, variant.window_left, variant.window_right)
    width = variant.num_heads * (variant.head_dim + variant.value_dim)
    return 2.0 * shape.batch * shape.length * keys * width


@state_bytes.register
def _(variant: AttentionVariant, shape: Shape) -> float | Rejection:
    return shape.batch * _cache(variant, shape.length, variant.window_left)


@flops.register
def _(variant: HybridVariant, shape: Shape) -> float | Rejection:
    keys = sum(_exact_keys(variant, part, shape.length) for part in variant.parts)
    exact = 2.0 * keys * (variant.head_dim + variant.value_dim)
    features, linear_heads = variant.feature_dim, sum(part.linear for part in variant.parts)
    near = CHUNK * linear_heads * (features + variant.value_dim)
    sums = 4.0 * features * variant.value_dim * linear_heads
    return shape.batch * shape.length * (exact + near + sums + _map_flops(variant))


@state_bytes.register
def _(variant: HybridVariant, shape: Shape) -> float | Rejection:
    total = 0.0
    group = variant.heads.group
    for kv_head in range(variant.num_kv_heads):
        # Query heads of one key/value head share its cache: the one that reaches furthest counts.
        parts = variant.parts[kv_head * group : (kv_head + 1) * group]
        total += max(_kept_keys(variant, part, shape.length) for part in parts) * (
            variant.head_dim + variant.value_dim
        )
        if any(part.linear for part in parts):
            total += variant.feature_dim * (variant.value_dim + 1)
    return shape.batch * 4.0 * total


@flops.register
def _(variant: BlockSparseVariant, shape: Shape) -> float | Rejection:
    keys = band_keys(shape.length, variant.window_left, variant.window_right)
    width = variant.num_heads * (variant.head_dim + variant.value_dim)
    return 2.0 * shape.batch * shape.length * keys * shape.density * width


@state_bytes.register
def _(variant: BlockSparseVariant, shape: Shape) -> float | Rejection:
    return shape.batch * _cache(variant, shape.length, variant.window_left)


@flops.register
def _(variant: BlockSelectVariant, shape: Shape) -> float | Rejection:
    """Means of queries and keys, and a product of each pair of blocks that see each other."""
    blocks = -(-shape.length // variant.block)
    left, right = (_blocks(n, variant.block) for n in (variant.window_left, variant.window_right))
    pairs = blocks * band_keys(blocks, left, right)
    means = shape.length * (variant.num_heads + variant.num_kv_heads)
    return float(shape.batch * variant.head_dim * (means + 2.0 * pairs * variant.num_heads))


@state_bytes.register
def _(variant: BlockSelectVariant, shape: Shape) -> float | Rejection:
    return 0.0


def _blocks(limit: int, block: int) -> int:
    """Blocks within ``limit`` positions of a block."""
    return limit if limit == UNLIMITED else -(-limit // block)


def band_keys(length: int, left: int, right: int) -> float:
    """Mean number of keys that a query of a whole sequence sees in a band."""

    def one_side(limit: int) -> float:
        reach = length - 1 if limit == UNLIMITED else min(limit, length - 1)
        # Mean over queries of min(reach, distance to the border).
        return reach - reach * (reach + 1) / 2 / length

    return 1.0 + one_side(left) + one_side(right)


def _exact_keys(variant: HybridVariant, part: HeadPart, length: int) -> float:
    """Mean number of keys that a query of this head meets by exact scores."""
    if part.is_dense:
        return band_keys(length, variant.allowed_left, variant.allowed_right)
    near = band_keys(length, part.window_left, part.window_right) if part.has_window else 0.0
    return near + _far_sinks(length, part.window_left, part.sinks)


def _kept_keys(variant: HybridVariant, part: HeadPart, length: int) -> int:
    """Keys that later queries of this head read."""
    if part.is_dense:
        left = variant.allowed_left
        return length if left == UNLIMITED else min(length, left + 1)
    window = part.window_left + 1 if part.has_window else 0
    return min(length, window + part.sinks)


def _far_sinks(length: int, left: int, sinks: int) -> float:
    """Mean number of sinks before a query's window; ``left`` = -1: there is no window."""
    beyond = max(0, length - 1 - left)  # queries whose window does not reach the first token
    rising = min(sinks, beyond)
    return (rising * (rising + 1) / 2 + sinks * (beyond - rising)) / length


def _cache(variant: AttentionVariant | BlockSparseVariant, length: int, left: int) -> float:
    """Bytes of keys and values that later queries read."""
    keys = length if left == UNLIMITED else min(length, left + 1)
    return 4.0 * keys * variant.num_kv_heads * (variant.head_dim + variant.value_dim)


def _map_flops(variant: HybridVariant) -> float:
    """Products of the feature map's weights with queries and keys."""
    linear = [head for head, part in enumerate(variant.parts) if part.linear]
    readers = len(linear) + len({head // variant.heads.group for head in linear})
    return 2.0 * variant.head_dim * variant.map_dim * readers


def cheapest_length(
    price: Callable[[int], float], exact: Callable[[int], float], lengths: Sequence[int]
) -> int | None:
    """The least of ``lengths`` from which on ``price`` stays below ``exact``; ``None``: never."""
    crossing = None
    for length in sorted(lengths, reverse=True):
        if price(length) >= exact(length):
            break
        crossing = length
    return crossing
