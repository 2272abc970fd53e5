"""What is measured: one entry per workload, and what must be reached.

A workload is an attention and its contestants; the first contestant is ours, and ratios are
ours / theirs. To add an operator, add one entry to ``WORKLOADS``; for what it must reach, one row
to ``MUST``. FLOPs are what the formula needs at least: half of the square where causal, real keys
only; for a linear part half a chunk of near keys, the product with the state, its update, and the
products of a learned feature map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from contestants import ENGINES, needs_torch
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.example_inputs import Sizes
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.hybrid_decode.semantics import HybridDecodeVariant

CHUNK = 64
"""Of the linear part, in the count of FLOPs."""

KERNEL, BODY = "subquad kernel", "subquad function"


@dataclass(frozen=True)
class Entry:
    """One contestant of a workload.

    Attributes:
        label: unique in the workload.
        engine: key of ``ENGINES``.
        variant: what it computes.
        real, density, history: instead of those of the workload, if given.
        slow_start: compiles for many seconds; only in the full set.
    """

    label: str
    engine: str
    variant: Any
    real: float | None = None
    density: float | None = None
    history: int | None = None
    slow_start: bool = False

    @property
    def family(self) -> str:
        """Which process it lives in."""
        return "torch" if needs_torch(self.engine) else "ort"


@dataclass(frozen=True)
class Workload:
    """One attention, at several lengths.

    Attributes:
        entries: ours first.
        lengths: numbers of keys that the full set measures.
        flops: of our variant, for one batch row.
        batch: rows.
        real: share of the keys that are real.
        density: share of the key blocks that a list keeps.
        queries: number of queries; ``None``: as many as keys.
        compared: whether outputs are held to the reference. Not of a selector: where its float32
            sum meets the threshold, a list may be one block longer or shorter than in float64.
        slow: leave out of the default set.
    """

    name: str
    entries: tuple[Entry, ...]
    flops: Callable[[Sizes], float]
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    batch: int = 1
    real: float = 1.0
    density: float = 1.0
    queries: int | None = None
    compared: bool = True
    slow: bool = False

    def sizes(self, length: int, entry: Entry | None = None) -> Sizes:
        """Sizes of one contestant, by default ours."""
        entry = entry or self.entries[0]
        length = entry.history or length
        return Sizes(
            batch=self.batch,
            query_len=self.queries or length,
            kv_len=length,
            real=self.real if entry.real is None else entry.real,
            density=self.density if entry.density is None else entry.density,
        )

    def total_flops(self, length: int) -> float:
        return self.batch * self.flops(self.sizes(length))


def softmax_flops(variant: Any, span: int | None = None) -> Callable[[Sizes], float]:
    """Exact attention of every query over ``span`` keys, or all it may see."""
    causal = getattr(variant, "window_right", -1) == 0 or getattr(variant, "allowed_right", -1) == 0

    def flops(sizes: Sizes) -> float:
        pairs = float(sizes.query_len) * sizes.real_keys * sizes.density
        if causal and sizes.query_len == sizes.kv_len:
            pairs /= 2
        if span is not None:
            pairs = min(pairs, float(sizes.query_len) * span)
        return 2 * pairs * float(variant.num_heads * (variant.head_dim + variant.value_dim))

    return flops


def linear_flops(variant: Any, features: int, map_weights: int = 0) -> Callable[[Sizes], float]:
    """A causal linear part with ``features`` features per head."""

    def flops(sizes: Sizes) -> float:
        near = CHUNK * (features + variant.value_dim)
        far = 4 * features * variant.value_dim
        per_token = variant.num_heads * (near + far + 4 * map_weights)
        return float(sizes.query_len * per_token)

    return flops


def hybrid_flops(
    variant: Any, features: int, span: int, map_weights: int = 0
) -> Callable[[Sizes], float]:
    exact, linear = softmax_flops(variant, span), linear_flops(variant, features, map_weights)
    return lambda sizes: exact(sizes) + linear(sizes)


def step_flops(variant: Any) -> Callable[[Sizes], float]:
    """One token: window, sinks, the product with the state, and its update."""
    exact = 2 * (variant.window_len + 1 + variant.sinks) * (variant.head_dim + variant.value_dim)
    linear = 4 * variant.feature_dim * variant.value_dim
    return lambda sizes: float(sizes.query_len * variant.num_heads * (exact + linear))


def select_flops(variant: BlockSelectVariant) -> Callable[[Sizes], float]:
    """Means of the blocks of queries and keys, and the scores of those a query block may see."""

    def flops(sizes: Sizes) -> float:
        means = (variant.num_heads + variant.num_kv_heads) * sizes.kv_len
        pairs = variant.num_heads * (sizes.kv_len / variant.block) ** 2
        return float(variant.head_dim * (means + pairs))

    return flops


def ours(variant: Any) -> tuple[Entry, ...]:
    return Entry(KERNEL, "kernel", variant), Entry(BODY, "body", variant)


def rivals(variant: Any, *engines: str) -> tuple[Entry, ...]:
    """Others that compute ``variant``, each by the name of its engine."""
    assert all(engine in ENGINES for engine in engines), engines
    return tuple(
        Entry(engine, engine, variant, slow_start="compile" in engine) for engine in engines
    )


SIZES = (12, 12, 64, 64, 0.125)
CAUSAL = AttentionVariant(*SIZES, window_right=0)
FULL = AttentionVariant(*SIZES)
GROUPED = AttentionVariant(9, 3, 64, 64, 0.125, window_right=0)
PADDED = AttentionVariant(12, 12, 32, 32, 32**-0.5, has_key_mask=True)
WINDOW = HybridVariant(*SIZES, 255, 0, 4, allowed_right=0)
ELU = HybridVariant(*SIZES, allowed_right=0, feature_map="elu")
SPARSE = BlockSparseVariant(*SIZES, block=64, window_right=0)
SELECT = BlockSelectVariant(9, 3, 64, 0.125, block=64, window_right=0)
HYBRID_ELU = HybridVariant(*SIZES, 63, 0, 4, allowed_right=0, feature_map="elu")
HEDGEHOG_ONLY = HybridVariant(*SIZES, allowed_right=0, feature_map="hedgehog", map_dim=64)
HYBRID_HEDGEHOG = HybridVariant(*SIZES, 63, 0, allowed_right=0, feature_map="hedgehog", map_dim=64)

STEP = HybridDecodeVariant(*SIZES, window_left=63, sinks=4, feature_map="elu")

TORCH_DENSE = "torch SDPA, dense causal"

DENSE_KERNEL = "dense kernel"


def block_sparse(percent: int) -> Workload:
    """Lists are given; the selector is not timed."""
    return Workload(
        f"block_sparse_{percent}",
        (
            *ours(SPARSE),
            Entry(DENSE_KERNEL, "kernel", CAUSAL),
            Entry(TORCH_DENSE, "torch SDPA", CAUSAL),
        ),
        softmax_flops(SPARSE),
        lengths=(2048, 8192, 32768),
        density=percent / 100,
    )


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "dense_causal",
        ours(CAUSAL)
        + rivals(
            CAUSAL,
            "torch SDPA",
            "ORT GroupQueryAttention",
            "ORT Attention",
            "torch.compile SDPA",
        ),
        softmax_flops(CAUSAL),
    ),
    Workload(
        "dense_full",
        ours(FULL)
        + rivals(
            FULL,
            "torch SDPA",
            "ORT MultiHeadAttention",
            "ORT Attention",
            "torch.compile SDPA",
        ),
        softmax_flops(FULL),
        lengths=(512, 2048, 8192),
    ),
    Workload(
        "dense_causal_gqa",
        ours(GROUPED) + rivals(GROUPED, "torch SDPA", "ORT GroupQueryAttention", "ORT Attention"),
        softmax_flops(GROUPED),
        lengths=(512, 2048, 8192),
    ),
    Workload(
        "dense_padded",
        ours(PADDED) + rivals(PADDED, "torch SDPA", "ORT MultiHeadAttention", "ORT Attention"),
        softmax_flops(PADDED),
        lengths=(128, 512),
        batch=8,
        real=0.5,
    ),
    Workload(
        "window",
        ours(WINDOW)
        + rivals(WINDOW, "torch SDPA", "torch.compile flex_attention")
        + (Entry(TORCH_DENSE, "torch SDPA", CAUSAL),),
        softmax_flops(WINDOW, 260),
    ),
    Workload(
        "linear_elu",
        ours(ELU) + rivals(ELU, "ORT LinearAttention", "torch chunked", "torch.compile chunked"),
        linear_flops(ELU, 64),
    ),
    Workload(
        "hybrid_elu",
        (*ours(HYBRID_ELU), Entry(TORCH_DENSE, "torch SDPA", CAUSAL)),
        hybrid_flops(HYBRID_ELU, 64, 68),
    ),
    Workload(
        "block_select",
        (*ours(SELECT), Entry(DENSE_KERNEL, "kernel", GROUPED)),
        select_flops(SELECT),
        lengths=(4096, 8000),
        compared=False,
    ),
    block_sparse(10),
    block_sparse(30),
    Workload(
        "linear_hedgehog",
        (*ours(HEDGEHOG_ONLY), Entry(TORCH_DENSE, "torch SDPA", CAUSAL)),
        linear_flops(HEDGEHOG_ONLY, 128, 64 * 64),
    ),
    Workload(
        "hybrid_hedgehog",
        (*ours(HYBRID_HEDGEHOG), Entry(TORCH_DENSE, "torch SDPA", CAUSAL)),
        hybrid_flops(HYBRID_HEDGEHOG, 128, 64, 64 * 64),
    ),
    Workload(
        "decode_dense",
        ours(GROUPED) + rivals(GROUPED, "torch SDPA"),
        softmax_flops(GROUPED),
        lengths=(1024, 8192, 32768),
        queries=1,
    ),
    Workload(
        "decode_hybrid",
        (
            Entry(KERNEL, "kernel", STEP, history=32768),
            Entry("1k history", "kernel", STEP, history=1024),
            Entry(BODY, "body", STEP, history=32768),
            Entry("dense kernel, 1k history", "kernel", CAUSAL, history=1024),
            Entry("dense kernel", "kernel", CAUSAL, history=32768),
        ),
        step_flops(STEP),
        lengths=(32768,),
        queries=1,
    ),
)


SHORT_LENGTHS = (1, 7, 16, 32, 64, 128, 256, 512)
STEP_LENGTHS = (1, 16, 128, 512, 2048, 8192)


def short(kind: Literal["encoder", "causal", "step"], dim: int, batch: int) -> Workload:
    """Dense attention where a call takes microseconds, or a decode step (one query)."""
    sizes = (12, 12, dim, dim, dim**-0.5)
    # One query at the end sees every key, so a step needs no causal mask.
    variant = AttentionVariant(*sizes, window_right=0 if kind == "causal" else -1)
    fused = "ORT GroupQueryAttention" if kind == "causal" else "ORT MultiHeadAttention"
    return Workload(
        f"short_{kind}_d{dim}_b{batch}",
        ours(variant) + rivals(variant, fused, "ORT Attention"),
        softmax_flops(variant),
        lengths=STEP_LENGTHS if kind == "step" else SHORT_LENGTHS,
        batch=batch,
        queries=1 if kind == "step" else None,
    )


SHORT: tuple[Workload, ...] = tuple(
    short(kind, dim, batch)
    for kind in ("encoder", "causal", "step")
    for dim in (32, 64, 128)
    for batch in (1, 8)
)
"""What must not be slower than any operator of ONNX Runtime; a set of its own."""


@dataclass(frozen=True)
class Must:
    """One row of what must be reached.

    Attributes:
        work: as people say it.
        workload: by name, of ``WORKLOADS`` or ``MODELS``.
        length: number of keys or tokens.
        metric: ``ratio`` to ``rival``, or our ``share`` of the GEMM rate.
        limit, aim: a ratio must not be above, a share not below.
        threads: cores it is said for.
    """

    work: str
    workload: str
    length: int
    metric: Literal["ratio", "share"]
    limit: float
    aim: float
    rival: str = ""
    threads: int = 2

    @property
    def bound(self) -> str:
        if self.metric == "share":
            return f">= {self.limit:.0%} of the GEMM rate"
        return f"<= {self.limit:.2f}x {self.rival}"

    def met(self, value: float) -> bool:
        return value >= self.limit if self.metric == "share" else value <= self.limit


DENSE = "dense causal, B1 H12 N8192 D64"
BATCH = "dense, right-padded batch, B8 H12 N512 D32, half the keys real"
LINEAR = "linear causal, elu map fused, f = 64, N8192"
HEDGEHOG = "linear causal, Hedgehog f = 128 fused, N8192"
HYBRID = "hybrid, window 64 + Hedgehog f = 128"
SELECTOR = "block-sparse selector, pooled, blocks of 64, H9/3 D64, overhead"
PREFILL = "SmolLM2-135M prefill, 8000 tokens, exact kernels"

MUST: tuple[Must, ...] = (
    Must(DENSE, "dense_causal", 8192, "ratio", 1.25, 1.0, "torch SDPA"),
    Must(DENSE, "dense_causal", 8192, "ratio", 1.05, 1.0, "ORT GroupQueryAttention"),
    Must(BATCH, "dense_padded", 512, "ratio", 0.75, 0.6, "torch SDPA"),
    Must(BATCH, "dense_padded", 512, "ratio", 0.75, 0.6, "ORT MultiHeadAttention"),
    Must(LINEAR, "linear_elu", 8192, "ratio", 0.6, 0.45, "ORT LinearAttention"),
    Must(HEDGEHOG, "linear_hedgehog", 8192, "share", 0.5, 0.65),
    Must(f"{HYBRID}, N8192", "hybrid_hedgehog", 8192, "share", 0.45, 0.6),
    Must(f"{HYBRID}, N8192", "hybrid_hedgehog", 8192, "ratio", 0.2, 0.14, TORCH_DENSE),
    Must(f"{HYBRID}, N32768", "hybrid_hedgehog", 32768, "ratio", 0.05, 0.035, TORCH_DENSE),
    Must("block-sparse, density 0.1", "block_sparse_10", 8192, "ratio", 0.2, 0.15, DENSE_KERNEL),
    Must("block-sparse, density 0.3", "block_sparse_30", 8192, "ratio", 0.4, 0.35, DENSE_KERNEL),
    Must(SELECTOR, "block_select", 4096, "ratio", 0.12, 0.03, DENSE_KERNEL),
    Must(SELECTOR, "block_select", 8000, "ratio", 0.12, 0.03, DENSE_KERNEL),
    Must(
        "decode step, hybrid, history 32k",
        "decode_hybrid",
        32768,
        "ratio",
        1.05,
        1.02,
        "1k history",
    ),
    Must(PREFILL, "smollm2", 8000, "ratio", 0.65, 0.55, "plain export"),
    Must(PREFILL, "smollm2", 8000, "ratio", 1.15, 0.95, "torch"),
)


def by_name() -> Mapping[str, Workload]:
    return {workload.name: workload for workload in (*WORKLOADS, *SHORT)}


def with_parameters(workload: Workload, labels: tuple[str, ...]) -> Workload:
    """The workload with one more entry of ours per set of tuning parameters."""
    kernel = workload.entries[0]
    extra = tuple(replace(kernel, label=f"{KERNEL} {label}") for label in labels)
    return replace(workload, entries=workload.entries + extra)
