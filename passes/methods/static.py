"""Heads whose weights hardly depend on the query: one weight per key, a running mean of values.

    out_i = sum_j w(k_j) v_j / sum_j w(k_j)    over the keys i may see
    w(k)  = e^x / (1 + sum of e^x over the query heads that read k),    x = scale * qbar . k - c

qbar is the mean of the head's queries, so this is softmax attention if every query is that one:
with c large, w = e^x. Before calibration qbar is 0, and the output is the plain mean of the values
seen (the running mean on causal sites), the limit of softmax for logits that do not differ.

``heads`` says which heads do this; the others keep exact softmax, in the same node. It is the
feature map of Hedgehog with one output for each query head of a group and one that fills up the
normaliser; the query's map is constant and picks its head's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.feature_maps import HEDGEHOG
from subquad.kernels.hybrid.semantics import HeadPart, HybridVariant
from subquad.passes.calibrate.fitted import Fitted, Sample
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.methods.base import OneNode, Parameters, Wanted, integers
from subquad.passes.methods.hybrid_site import hybrid_variant, linear_rejection
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection

PICKED = 40.0
"""Bias of an output that a map picks: e^-40 of the others is below float32's rounding."""

LARGEST = -3.0
"""x of the heaviest key seen in calibration: there e^x and w differ by 5 %, elsewhere by less."""


@dataclass(frozen=True)
class StaticParameters(Parameters):
    """One number, or one for each query head."""

    heads: int | tuple[int, ...] = integers(
        "1: the head ignores its query, 0: it stays exact", low=0, high=1, default=1
    )


@dataclass(frozen=True)
class StaticMethod(OneNode):
    """Gives every key one weight for all queries."""

    name: str = "static"
    paper: str = "linear attention of constant queries, https://arxiv.org/abs/2006.16236"
    parameters: type[StaticParameters] = StaticParameters
    learns: bool = True

    def supports(self, site: AttentionSite, params: StaticParameters) -> Rejection | None:
        if isinstance(params.heads, tuple) and len(params.heads) != site.num_heads:
            return Rejection(
                f"heads has {len(params.heads)} values for {site.num_heads} query heads",
                where=site.name,
            )
        if not any(_chosen(site, params)):
            return Rejection("no head is chosen: the attention stays as it is", where=site.name)
        return linear_rejection(site)

    def lower(self, site: AttentionSite, params: StaticParameters) -> HybridVariant:
        chosen = _chosen(site, params)
        parts = () if all(chosen) else tuple(HeadPart(linear=one) for one in chosen)
        outputs = site.num_heads // site.num_kv_heads + 1
        return hybrid_variant(site, feature_map=HEDGEHOG.name, map_dim=outputs, head_parts=parts)

    def tensors(
        self, site: AttentionSite, params: StaticParameters
    ) -> Mapping[str, NDArray[np.generic]]:
        return _maps(site, np.zeros((site.num_heads, site.head_dim)), np.zeros(site.num_heads))

    def calibrate(
        self, site: AttentionSite, params: StaticParameters, samples: Sequence[Sample]
    ) -> Fitted:
        """The mean query of every head, in closed form."""
        group = site.num_heads // site.num_kv_heads
        total, count = np.zeros((site.num_heads, site.head_dim)), 0
        for sample in samples:
            real = _real(sample, sample["query"].shape[2]) if site.is_self else slice(None)
            for row, queries in enumerate(sample["query"]):
                kept = queries[:, real[row] if isinstance(real, np.ndarray) else real]
                total += kept.sum(axis=1, dtype=np.float64)
                count += kept.shape[1]
        mean = site.scale * total / max(count, 1)
        largest = np.full(site.num_heads, -np.inf)
        for sample in samples:
            key_real = _real(sample, sample["key"].shape[2])
            for row, keys in enumerate(sample["key"]):
                grouped = np.repeat(keys[:, key_real[row]], group, axis=0)
                scores = np.einsum("hd,hkd->hk", mean, grouped)
                largest = np.maximum(largest, scores.max(axis=1, initial=-np.inf))
        shift = np.where(np.isfinite(largest), largest, 0.0)
        maps = _maps(site, mean, shift)
        return Fitted({name: np.asarray(array, np.float32) for name, array in maps.items()})

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[StaticParameters] | Rejection:
        return [StaticParameters()]

    def mixed(self, per_head: Sequence[StaticParameters | None]) -> StaticParameters | None:
        return StaticParameters(tuple(0 if params is None else 1 for params in per_head))


def _chosen(site: AttentionSite, params: StaticParameters) -> tuple[int, ...]:
    heads = params.heads
    return heads if isinstance(heads, tuple) else (heads,) * site.num_heads


def _real(sample: Sample, length: int) -> NDArray[np.bool_]:
    """Which slots hold tokens, ``[batch, length]``; the last ones where keys are more."""
    mask = sample.get("key_mask")
    if mask is None:
        return np.ones((len(sample["query"]), length), np.bool_)
    return np.asarray(mask, np.bool_)[:, -length:]


def _maps(
    site: AttentionSite, query: NDArray[np.float64], shift: NDArray[np.float64]
) -> dict[str, NDArray[np.generic]]:
    """``query``: scaled, ``[num_heads, head_dim]``; ``shift``: what is taken off its scores."""
    group = site.num_heads // site.num_kv_heads
    rows = site.head_dim + 1
    query_map = np.zeros((site.num_heads, rows, group + 1), np.float32)
    key_map = np.zeros((site.num_kv_heads, rows, group + 1), np.float32)
    key_map[:, -1, 0] = PICKED
    for head in range(site.num_heads):
        output = head % group + 1
        query_map[head, -1, output] = PICKED
        column = key_map[head // group, :, output]
        column[:-1] = query[head]
        column[-1] = PICKED + LARGEST - shift[head]
    return {"query_map": query_map, "key_map": key_map}


METHOD = StaticMethod()
