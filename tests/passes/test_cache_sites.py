"""Keys of earlier calls: when a site has a cache, and what is proved of its mask."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest

from masked_attention import DIM, HEADS, SCALE, only_reason, only_site, raised
from onnx_graphs import BOOL, FLOAT, INT64, Graph, Runner
from subquad.passes.methods import parse_method
from subquad.passes.plan import declined_by
from subquad.passes.recognise.site import SiteCache

CACHE = SiteCache("past_k", "past_v", "concat_0_0", "concat_1_0")


def cached_model(
    *,
    past_first: bool = True,
    returned: bool = True,
    offset: Literal["past", "none"] = "past",
    window: int | None = None,
    least: int = 0,
    new_dim: str = "length",
) -> ir.Model:
    """Causal attention over a past and new tokens, with padding.

    Args:
        past_first: or the new tokens before it.
        returned: whether keys and values are outputs.
        offset: which slot the first query has.
        window: tokens that a query sees, itself included.
        least: keys before this slot are hidden where a comparison with the past says so.
        new_dim: length of new keys.
    """
    g = Graph()
    q = g.input("q", FLOAT, ["batch", HEADS, "length", DIM])
    wholes = []
    for name in "kv":
        past = g.input(f"past_{name}", FLOAT, ["batch", HEADS, "past", DIM])
        new = g.input(name, FLOAT, ["batch", HEADS, new_dim, DIM])
        parts = (past, new) if past_first else (new, past)
        wholes.append(g("Concat", *parts, axis=2))
    padding = g.input("padding", INT64, ["batch", f"past + {new_dim}"])
    k, v = wholes
    start = g.dim("past_k", 2)
    keys = g("Unsqueeze", g.arange(g.dim(k, 2)), [0])
    queries = g("Unsqueeze", g.arange(g.dim(q, 2)), [1])
    if offset == "past":
        queries = g("Add", queries, start)
    seen = g("LessOrEqual", keys, queries)
    if window is not None:
        seen = g("And", seen, g("Less", queries, g("Add", keys, window)))
    if least:
        # True for every past of one token or more, hence for all dimensions but this one.
        seen = g("And", seen, g("GreaterOrEqual", start, least))
    real = g("Unsqueeze", g("Cast", padding, to=BOOL), [1, 2])
    y = g("Attention", q, k, v, g("And", seen, real), scale=SCALE)
    return g.model([g("Identity", y), *(wholes if returned else ())])


def test_a_cache_is_raised_as_self_attention() -> None:
    _, result = raised(cached_model())
    site = only_site(result)
    assert site.cache == CACHE and site.is_self
    assert site.mask.describe() == "causal, key padding" and site.mask.alignment == "end"
    assert site.describe() == "causal, key padding, cached"
    assert type(site).from_json(site.to_json()) == site


@pytest.mark.parametrize("past", [0, 1, 9])
@pytest.mark.parametrize("window", [None, 3])
def test_the_raised_node_computes_it(past: int, window: int | None) -> None:
    model = cached_model(window=window)
    copy, result = raised(model)
    site = only_site(result)
    assert site.mask.window_left == (-1 if window is None else window - 1)
    rng = np.random.default_rng(past)
    feeds = {
        name: rng.standard_normal((2, HEADS, length, DIM)).astype(np.float32)
        for name, length in (("q", 5), ("k", 5), ("v", 5), ("past_k", past), ("past_v", past))
    }
    feeds["padding"] = np.ones((2, past + 5), np.int64)
    feeds["padding"][1, :2] = 0
    want, got = Runner(model)(feeds), Runner(copy)(feeds)
    rows = slice(None) if past else slice(2, None)  # without a past, row 1 begins with padding
    np.testing.assert_allclose(got[0][:, :, rows], want[0][:, :, rows], atol=1e-5)
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize(
    "options",
    [{"returned": False}, {"past_first": False}, {"offset": "none"}, {"new_dim": "others"}],
    ids=str,
)
def test_near_misses_are_no_cache(options: dict[str, object]) -> None:
    _, result = raised(cached_model(**options))  # type: ignore[arg-type]
    assert all(site.cache is None for site in result.sites)


def test_an_empty_past_counts() -> None:
    _, result = raised(cached_model(least=1))
    assert "past" in only_reason(result)


def test_methods_that_cannot_step_decline() -> None:
    site = only_site(raised(cached_model())[1])
    method, params = parse_method("block_sparse")
    reason = declined_by(method, site, params)
    assert reason is not None and "step by step" in reason.reason
