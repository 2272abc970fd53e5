"""How methods are written, what they decline, and what they lower to."""

from __future__ import annotations

import pytest

from sites import SITES, make_site
from subquad.passes.methods import METHODS, get_method, method_text, parse_method
from subquad.passes.methods.window import WindowParameters
from subquad.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dense", "dense"),
        ("elu", "elu"),
        ("lolcats:32,mix=lse", "lolcats:size=32,sinks=0,dims=0,mix=lse"),
        ("window:128", "window:size=128,sinks=4"),
        ("block_sparse", "block_sparse:tau=0.97,block=64,selector=pooled,sinks=1"),
        (
            "block_sparse:0.9,selector=causal",
            "block_sparse:tau=0.9,block=64,selector=causal,sinks=1",
        ),
        ("window:size=128,sinks=0", "window:size=128,sinks=0"),
        ("window: 128, sinks = 2", "window:size=128,sinks=2"),
    ],
)
def test_parse_method(text: str, canonical: str) -> None:
    method, params = parse_method(text)
    assert method_text(method, params) == canonical
    assert parse_method(canonical) == (method, params)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown method ''; known: dense, window, elu, block_sparse, hedgehog, lolcats"),
        ("performer", "unknown method 'performer'; known: dense, window, elu"),
        ("window", "parameter 'size' is missing"),
        ("window:", "expected parameters after the colon"),
        ("window:sinks=4", "parameter 'size' is missing"),
        ("window:0", "'size' must be between 1 and 2147483647, got 0"),
        ("window:-5", "'size' must be between 1 and 2147483647, got -5"),
        ("window:5,sinks=-1", "'sinks' must be between 0 and 2147483647, got -1"),
        ("window:5000000000", "got 5000000000"),
        ("window:12.5", "'size' must be an integer, got '12.5'"),
        ("window:many", "'size' must be an integer, got 'many'"),
        ("window:5,7", "unknown parameter '7'"),
        ("window:5,size=6", "'size' is given twice"),
        ("window:5,width=6", "unknown parameter 'width=6'; known: size"),
        ("window:5,", "unknown parameter ''"),
        ("block_sparse:1.5", "'tau' must be between 0.0 and 1.0, got 1.5"),
        ("block_sparse:selector=last", "'selector' must be one of pooled, causal, got 'last'"),
        ("elu:size=3", "unknown parameter 'size=3'; this method takes none"),
    ],
)
def test_wrong_text_is_a_usage_error(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_method(text)
    assert says in str(caught.value)


def test_parameters_made_directly_are_checked_too() -> None:
    with pytest.raises(UsageError, match="must be an integer"):
        WindowParameters(size=True)
    with pytest.raises(UsageError, match="between 1"):
        WindowParameters(size=0)


def test_method_names_are_unique() -> None:
    assert [get_method(method.name) for method in METHODS] == list(METHODS)


@pytest.mark.parametrize(
    ("text", "site", "reason"),
    [
        ("window:8", make_site("x", is_self=False), "cross-attention"),
        ("window:8", make_site("x", right=0, softcap=30.0), "softcap 30"),
        ("window:8", make_site("x", left=7, right=0), "window 8 changes nothing"),
        ("window:7", make_site("x", left=7, right=7), "window 7 changes nothing"),
        ("elu", make_site("x", right=0, softcap=30.0), "softcap 30"),
        ("block_sparse", make_site("x", is_self=False), "cross-attention"),
        ("block_sparse:selector=causal", make_site("x"), "Use selector=pooled"),
        ("block_sparse:block=64", make_site("x", left=100, right=0), "always kept"),
        ("block_sparse:block=2000", make_site("x", right=0), "more than 1024"),
        ("elu", make_site("x", left=7, right=0), "causal, window 8"),
        ("elu", make_site("x", right=3), "cannot forget"),
    ],
)
def test_declined_with_a_reason(text: str, site, reason: str) -> None:  # type: ignore[no-untyped-def]
    method, params = parse_method(text)
    rejection = method.supports(site, params)
    assert rejection is not None
    assert reason in rejection.reason
    assert rejection.where == "x"


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("window:7", make_site("x", left=7, right=0)),
        ("window:6", make_site("x", left=7, right=7)),
        ("elu", make_site("x", is_self=False)),
        ("block_sparse:block=64", make_site("x", left=300, right=0)),
        ("block_sparse:selector=causal", make_site("x", right=0, softcap=30.0)),
    ],
)
def test_near_misses_are_accepted(text: str, site) -> None:  # type: ignore[no-untyped-def]
    method, params = parse_method(text)
    assert method.supports(site, params) is None


def test_window_stays_inside_the_site() -> None:
    method, params = parse_method("window:16,sinks=2")
    causal = method.lower(make_site("x", left=100, right=0), params)
    assert (causal.window_left, causal.window_right) == (15, 0)  # type: ignore[attr-defined]
    assert (causal.allowed_left, causal.allowed_right) == (100, 0)  # type: ignore[attr-defined]
    both = method.lower(make_site("x"), params)
    assert (both.window_left, both.window_right) == (16, 16)  # type: ignore[attr-defined]
    lopsided = method.lower(make_site("x", right=3), params)
    assert (lopsided.window_left, lopsided.window_right) == (16, 3)  # type: ignore[attr-defined]


def test_dense_accepts_every_site() -> None:
    method, params = parse_method("dense")
    assert all(method.supports(site, params) is None for site in SITES)
