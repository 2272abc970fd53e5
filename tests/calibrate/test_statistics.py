from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sites import make_site
from subquad.passes.calibrate.statistics import BLOCK, SINKS, StatisticsCollector
from subquad.passes.recognise.site import AttentionSite, LinearForm

SITES = [
    make_site("causal", heads=(4, 2), right=0),
    make_site("causal_softcap", heads=(2, 2), right=0, softcap=2.5),
    make_site("full", heads=(2, 1)),
    make_site("band", heads=(2, 2), left=30, right=30),
    replace(
        make_site("sigmoid", heads=(2, 1), right=0), score_function="sigmoid", score_offset=-2.0
    ),
    replace(make_site("linear", heads=(2, 1), right=0), linear=LinearForm("elu", "sum", 1e-6)),
]


def weights(
    site: AttentionSite,
    query: NDArray[Any],
    key: NDArray[Any],
    real: NDArray[np.bool_],
) -> list[NDArray[np.float64]]:
    """Per head ``[queries, keys]`` in float64, one row at a time."""
    heads, length, _ = query.shape
    group = heads // key.shape[0]
    result = []
    for head in range(heads):
        table = np.zeros((length, length))
        for i in range(length):
            visible = [
                j
                for j in range(length)
                if real[j]
                and (site.mask.window_left < 0 or i - j <= site.mask.window_left)
                and (site.mask.window_right < 0 or j - i <= site.mask.window_right)
            ]
            scores = np.array(
                [site.scale * float(query[head, i] @ key[head // group, j]) for j in visible]
            )
            if site.softcap:
                scores = site.softcap * np.tanh(scores / site.softcap)
            if len(visible):
                exp = np.exp(scores - scores.max())
                if site.score_function == "sigmoid":
                    exp = 1 / (1 + np.exp(-(scores + site.score_offset)))
                if site.linear is not None:
                    exp = np.array(
                        [_elu(query[head, i]) @ _elu(key[head // group, j]) for j in visible]
                    )
                table[i, visible] = exp / exp.sum()
        result.append(table)
    return result


def _elu(x: NDArray[Any]) -> NDArray[np.float64]:
    x = x.astype(np.float64)
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_against_the_definition(site: AttentionSite) -> None:
    rng = np.random.default_rng(3)
    length = 2 * BLOCK + 20  # few enough blocks that all queries are sampled
    query = 3 * rng.normal(size=(1, site.num_heads, length, 8)).astype(np.float32)
    key = rng.normal(size=(1, site.num_kv_heads, length, 8)).astype(np.float32)
    real = np.ones((1, length), np.bool_)
    real[0, :5] = False
    collector = StatisticsCollector(site)
    collector.add({"query": query, "key": key, "key_mask": real})
    found = collector.result()
    for head, table in enumerate(weights(site, query[0].astype(float), key[0], real[0])):
        rows = [i for i in range(5, length)]
        entropy, sinks, window = [], [], []
        for i in rows:
            p = table[i][table[i] > 0]
            entropy.append(-(p * np.log(p)).sum() / np.log(max(len(p), 2)))
            sinks.append(table[i, 5 : 5 + SINKS].sum())
            near = [
                j
                for j in range(length)
                if (i - j < 64 if site.mask.is_causal else abs(i - j) <= 64)
            ]
            window.append(table[i, near].sum())
        # Rounded to six digits, from float32 weights.
        assert found.entropy[head] == pytest.approx(np.mean(entropy), abs=2e-6)
        assert found.sink_mass[head] == pytest.approx(np.mean(sinks), abs=2e-6)
        assert found.window_mass[64][head] == pytest.approx(np.mean(window), abs=2e-6)
        shares = []
        for start in range(0, length, BLOCK):
            picked = [i for i in range(start, min(start + BLOCK, length)) if real[0, i]]
            mass = table[picked].mean(axis=0)
            cuts = range(5, length, BLOCK)
            visible = sum(1 for c in cuts if table[picked][:, c : c + BLOCK].any())
            blocks = sorted((mass[c : c + BLOCK].sum() for c in cuts), reverse=True)
            kept = next(n for n in range(1, len(blocks) + 1) if sum(blocks[:n]) >= 0.9 - 1e-6)
            shares.append((len(picked), min(1.0, kept / visible)))
        want = np.average([s for _, s in shares], weights=[n for n, _ in shares])
        assert found.density[0.9][head] == pytest.approx(want, abs=1e-5)


def test_survives_json() -> None:
    site = SITES[0]
    rng = np.random.default_rng(0)
    collector = StatisticsCollector(site)
    collector.add(
        {
            "query": rng.normal(size=(1, 4, 90, 8)).astype(np.float32),
            "key": rng.normal(size=(1, 2, 90, 8)).astype(np.float32),
        }
    )
    found = collector.result()
    assert type(found).from_json(found.to_json()) == found
