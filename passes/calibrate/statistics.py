"""Where the heads of an attention look, from sampled queries.

For chosen blocks of queries the exact weights are computed against all keys. From them, per head:

* entropy, as a share of the largest possible one: 1 = uniform, 0 = one key;
* mass on the first tokens (sinks; Xiao et al., 2023, https://arxiv.org/abs/2309.17453);
* mass within windows around the query;
* density: the share of visible key blocks that a block of queries needs to keep 90, 95 or 99 % of
  its mass, blocks taken in the order of their mass (what an ideal selector could reach).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.feature_maps import get_feature_map
from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.site import AttentionSite, LinearForm

BLOCK = 64
SINKS = 4
WINDOWS = (16, 64, 128, 256, 512, 1024, 2048)
SHARES = (0.90, 0.95, 0.99)
_QUERY_BLOCKS = 6


@dataclass(frozen=True)
class SiteStatistics:
    """Means over sampled queries, one entry per query head.

    Attributes:
        kv_len: keys, the largest seen.
        entropy: relative to uniform weights over the visible keys.
        sink_mass: on the first ``SINKS`` real tokens.
        window_mass: width -> mass within it; on causal sites the query and the tokens before it,
            else the tokens to each side. Sinks count where they lie inside.
        density: share of the mass -> share of the visible blocks of ``BLOCK`` keys.
    """

    kv_len: int
    entropy: tuple[float, ...]
    sink_mass: tuple[float, ...]
    window_mass: Mapping[int, tuple[float, ...]]
    density: Mapping[float, tuple[float, ...]]

    def to_json(self) -> dict[str, Any]:
        return {
            "kv_len": self.kv_len,
            "entropy": list(self.entropy),
            "sink_mass": list(self.sink_mass),
            "window_mass": {str(size): list(mass) for size, mass in self.window_mass.items()},
            "density": {str(share): list(value) for share, value in self.density.items()},
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> SiteStatistics:
        return SiteStatistics(
            kv_len=raw["kv_len"],
            entropy=tuple(raw["entropy"]),
            sink_mass=tuple(raw["sink_mass"]),
            window_mass={int(size): tuple(mass) for size, mass in raw["window_mass"].items()},
            density={float(share): tuple(value) for share, value in raw["density"].items()},
        )


class StatisticsCollector:
    """Sums over batches for one site."""

    def __init__(self, site: AttentionSite) -> None:
        self._site = site
        self._weight = 0.0
        self._kv_len = 0
        self._sums: dict[str, NDArray[np.float64]] = {}

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Take in one batch: the inputs of the site's node by role."""
        query, key = values["query"], values["key"]
        batch, heads, query_len, _ = query.shape
        kv_len = key.shape[2]
        key_mask = values.get("key_mask")
        for row in range(batch):
            real = np.ones(kv_len, np.bool_) if key_mask is None else np.asarray(key_mask[row])
            if not real.any():
                continue
            first = int(real.argmax())
            for block in _sampled_blocks(query_len):
                self._add_block(query[row], key[row], real, first, block, heads)
        self._kv_len = max(self._kv_len, kv_len)

    def result(self) -> SiteStatistics:
        assert self._weight, "no batch with a real token"
        mean = {name: total / self._weight for name, total in self._sums.items()}

        def per_head(name: str) -> tuple[float, ...]:
            return tuple(float(round(x, 6)) for x in mean[name])

        return SiteStatistics(
            kv_len=self._kv_len,
            entropy=per_head("entropy"),
            sink_mass=per_head("sinks"),
            window_mass={size: per_head(f"window {size}") for size in WINDOWS},
            density={share: per_head(f"density {share}") for share in SHARES},
        )

    def _add_block(
        self,
        query: NDArray[np.float32],
        key: NDArray[np.float32],
        real: NDArray[np.bool_],
        first: int,
        block: range,
        heads: int,
    ) -> None:
        site, kv_len = self._site, key.shape[1]
        offset = kv_len - query.shape[1] if site.mask.alignment == "end" else 0
        queries = np.arange(block.start, block.stop) + offset
        distance = queries[:, None] - np.arange(kv_len)[None]
        visible = np.broadcast_to(real, distance.shape).copy()
        if site.mask.window_left != UNLIMITED:
            visible &= distance <= site.mask.window_left
        if site.mask.window_right != UNLIMITED:
            visible &= -distance <= site.mask.window_right
        rows = visible.any(axis=1)
        if queries.max() < kv_len and site.is_self:
            rows &= real[np.minimum(queries, kv_len - 1)]
        if not rows.any():
            return
        grouped = np.repeat(key, heads // key.shape[0], axis=0)
        queries_here = query[:, block.start : block.stop][:, rows]
        if site.linear is not None:
            queries_here, grouped = (_features(site.linear, x) for x in (queries_here, grouped))
        scores = site.scale * (queries_here @ grouped.swapaxes(1, 2))
        if site.linear is not None and site.linear.log_decay:
            rates = np.repeat(site.linear.log_decay, heads // key.shape[0])[:, None, None]
            scores = scores * np.exp(rates * np.abs(distance[rows])).astype(np.float32)
        if site.softcap:
            scores = site.softcap * np.tanh(scores / site.softcap)
        visible, distance = visible[rows], distance[rows]
        weights = _shares(site, np.where(visible, scores, -np.inf))
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(weights > 0, np.log(weights), 0)
        entropy = -(weights * logs).sum(axis=-1)
        largest = np.log(np.maximum(visible.sum(axis=1), 2))
        count = len(distance)
        self._sum("entropy", (entropy / largest).mean(axis=1), count)
        self._sum("sinks", weights[:, :, first : first + SINKS].sum(axis=-1).mean(axis=1), count)
        reach = distance if site.mask.is_causal else np.abs(distance)
        for size in WINDOWS:
            inside = reach < size if site.mask.is_causal else reach <= size
            self._sum(f"window {size}", (weights * inside).sum(axis=-1).mean(axis=1), count)
        self._density(weights.mean(axis=1), np.atleast_1d(visible.any(axis=0)), first, count)
        self._weight += count

    def _density(
        self, mass: NDArray[np.float32], visible: NDArray[np.bool_], first: int, count: int
    ) -> None:
        """``mass``: [heads, keys], mean over the block of queries."""
        starts = np.arange(first, mass.shape[1], BLOCK)
        blocks = np.add.reduceat(mass, starts, axis=1)
        possible = int(np.logical_or.reduceat(visible, starts).sum())
        ordered = np.cumsum(-np.sort(-blocks, axis=1), axis=1)
        for share in SHARES:
            kept = (ordered < share - 1e-6).sum(axis=1) + 1
            self._sum(f"density {share}", np.minimum(kept / max(1, possible), 1.0), count)

    def _sum(self, name: str, values: NDArray[Any], count: int) -> None:
        total = self._sums.get(name, np.zeros(len(values)))
        self._sums[name] = total + count * np.asarray(values, np.float64)


def _features(form: LinearForm, x: NDArray[np.float32]) -> NDArray[np.float32]:
    feature_map = get_feature_map(form.feature_map)
    assert feature_map is not None
    return feature_map.apply(x).astype(np.float32)


def _shares(site: AttentionSite, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Weights of each row that sum up to one; sigmoids and products of features, too, are told as
    shares, the latter by their size."""
    if site.linear is not None:
        hidden = np.isneginf(scores)
        scores = np.where(hidden, -np.inf, np.log(np.maximum(np.abs(scores), 1e-30)))
    if site.score_function == "sigmoid":
        # From the logarithm of a sigmoid: a row of tiny weights has shares like any other.
        scores = -np.logaddexp(0, -(scores + np.float32(site.score_offset)))
    scores = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, dtype=np.float32)
    shares: NDArray[np.float32] = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def _sampled_blocks(query_len: int) -> Sequence[range]:
    """Blocks of queries, spread evenly; the last block is among them."""
    blocks = -(-query_len // BLOCK)
    picked = np.unique(np.linspace(0, blocks - 1, min(blocks, _QUERY_BLOCKS)).round().astype(int))
    return [range(i * BLOCK, min((i + 1) * BLOCK, query_len)) for i in picked]
