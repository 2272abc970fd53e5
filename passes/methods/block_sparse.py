"""Block-sparse attention: exact softmax over the key blocks that a cheap estimate says matter.

    out_i = sum_{j in S_r} softmax_{j in S_r}(cap(scale * q_i . k_j)) v_j    over the keys i may see
    S_r   = near blocks, sinks, and the smallest set of blocks with estimated mass >= tau

for all queries i of a block r, each head its own set. Mass is the softmax of ``q_r . mean(k)`` over
blocks, where q_r stands for the block of queries:

* ``pooled``: their mean. NABLA, 2025 (https://arxiv.org/abs/2507.13546), with the guards of
  SpargeAttn and XAttention (https://arxiv.org/abs/2502.18137, https://arxiv.org/abs/2503.16428). A
  query's set depends on later queries of its block: causal only between blocks.
* ``causal``: the mean of the block before, and only keys before the block are ranked: exactly
  causal.

What is dropped bounds the error: mass d that is left out moves an output by at most 2 d max|v|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.block_select.estimators import ESTIMATORS, get_estimator
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.operator import UNLIMITED, OperatorVariant
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.methods.base import (
    WHOLE,
    OneNode,
    Parameters,
    Wanted,
    choice,
    numbers,
    parameter,
)
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection

LARGEST_BLOCK = 1024

LEAST_BLOCKS = 8
TAUS = (0.6, 0.8, 0.9, 0.95, 0.98, 0.995)
"""What the planner tries."""


@dataclass(frozen=True)
class BlockSparseParameters(Parameters):
    """Of the selection; ``tau`` may be one for each query head."""

    tau: float | tuple[float, ...] = numbers(
        "estimated mass to keep, 1 = all", low=0.0, high=1.0, default=0.97
    )
    block: int = parameter("tokens per block", minimum=1, default=64)
    selector: str = choice(
        "what stands for a block of queries",
        *(estimator.name for estimator in ESTIMATORS),
        default="pooled",
    )
    sinks: int = parameter("leading blocks that are always kept", minimum=0, default=1)


@dataclass(frozen=True)
class BlockSparseMethod(OneNode):
    """Drops the key blocks with little estimated mass."""

    name: str = "block_sparse"
    paper: str = "NABLA, 2025, https://arxiv.org/abs/2507.13546"
    parameters: type[BlockSparseParameters] = BlockSparseParameters

    def causal_granularity(self, params: BlockSparseParameters) -> int:
        return params.block if get_estimator(params.selector).reads_later_queries else 1

    def piece_granularity(self, params: BlockSparseParameters) -> int:
        # A piece that starts inside a block has only the rest of its queries to select by, and the
        # causal selector misses the block before any piece.
        return params.block if get_estimator(params.selector).reads_later_queries else WHOLE

    def supports(self, site: AttentionSite, params: BlockSparseParameters) -> Rejection | None:
        if params.block > LARGEST_BLOCK:
            return Rejection(
                f"block {params.block}: blocks of more than {LARGEST_BLOCK} tokens are not built",
                where=site.name,
            )
        if isinstance(params.tau, tuple) and len(params.tau) != site.num_heads:
            return Rejection(
                f"tau has {len(params.tau)} values for {site.num_heads} query heads",
                where=site.name,
            )
        if not site.is_self:
            return Rejection(
                "cross-attention: which queries are padding is not known, and positions of "
                "queries and keys belong to different sequences, so no block is near another",
                where=site.name,
            )
        if not get_estimator(params.selector).reads_later_queries and not site.mask.is_causal:
            return Rejection(
                f"selector {params.selector!r} reads no later queries, which only a causal mask "
                f"needs; the site's is {site.mask.describe()}. Use selector=pooled",
                where=site.name,
            )
        reach = _reach(site)
        if reach != UNLIMITED and reach <= 3 * params.block:
            return Rejection(
                f"the mask is {site.mask.describe()}: blocks of {params.block} near the query "
                "hold all that it sees, and they are always kept",
                where=site.name,
            )
        return None

    def lower(self, site: AttentionSite, params: BlockSparseParameters) -> BlockSparseVariant:
        return BlockSparseVariant(
            num_heads=site.num_heads,
            num_kv_heads=site.num_kv_heads,
            head_dim=site.head_dim,
            value_dim=site.value_dim,
            scale=site.scale,
            block=params.block,
            softcap=site.softcap,
            window_left=site.mask.window_left,
            window_right=site.mask.window_right,
            has_key_mask=site.mask.key_padding,
        )

    def prepare(
        self, site: AttentionSite, params: BlockSparseParameters
    ) -> tuple[OperatorVariant, ...]:
        selector = BlockSelectVariant(
            num_heads=site.num_heads,
            num_kv_heads=site.num_kv_heads,
            head_dim=site.head_dim,
            scale=site.scale,
            block=params.block,
            sinks=params.sinks,
            estimator=params.selector,
            softcap=site.softcap,
            window_left=site.mask.window_left,
            window_right=site.mask.window_right,
            has_key_mask=site.mask.key_padding,
        )
        return (selector,)

    def tensors(
        self, site: AttentionSite, params: BlockSparseParameters
    ) -> Mapping[str, NDArray[np.generic]]:
        return {"thresholds": np.full(site.num_heads, params.tau, np.float32)}

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[BlockSparseParameters] | Rejection:
        """A ladder of ``tau`` for one selector; worth it only where blocks are many."""
        block = BlockSparseParameters().block
        if max(wanted.lengths) < LEAST_BLOCKS * block:
            return Rejection(
                f"fewer than {LEAST_BLOCKS} blocks of {block} tokens at these lengths, most of "
                "which are always kept",
                where=site.name,
            )
        selector = "causal" if wanted.strict_causal else "pooled"
        return [BlockSparseParameters(tau=tau, selector=selector) for tau in TAUS]

    def mixed(
        self, per_head: Sequence[BlockSparseParameters | None]
    ) -> BlockSparseParameters | None:
        kept = [params for params in per_head if params is not None]
        if len(kept) < len(per_head):
            return None
        taus = tuple(p.tau for p in kept if not isinstance(p.tau, tuple))
        alike = {replace(params, tau=0.0) for params in kept}
        if len(alike) > 1 or len(taus) < len(kept):
            return None
        return replace(kept[0], tau=taus)


def _reach(site: AttentionSite) -> int:
    """Keys that a query may see at most; -1: any number."""
    if UNLIMITED in (site.mask.window_left, site.mask.window_right):
        return UNLIMITED
    return site.mask.window_left + site.mask.window_right + 1


METHOD = BlockSparseMethod()
