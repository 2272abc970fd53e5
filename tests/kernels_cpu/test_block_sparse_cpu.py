"""The block-sparse and block-select CPU kernels against their float64 references."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from block_lists import every_block, with_lists
from oracles import Case, mask_of, random_case, reference, relative_error
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_select.cpu import TEMPLATE as SELECT_TEMPLATE
from subquad.kernels.block_select.reference import kept_blocks
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.block_sparse.cpu import TEMPLATE
from subquad.kernels.block_sparse.semantics import BlockSparseVariant

RunKernel = Callable[..., Any]

PLAIN = BlockSparseVariant(2, 2, 64, 64, 0.125, block=64)
CAUSAL = BlockSparseVariant(4, 2, 40, 24, 0.2, block=16, window_right=0, has_key_mask=True)
WINDOW = BlockSparseVariant(
    6, 2, 5, 7, 0.4, block=20, softcap=2.5, window_left=50, window_right=9, has_key_mask=True
)
VARIANTS = [PLAIN, CAUSAL, WINDOW]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)
LENGTHS = [1, 7, 63, 64, 65, 200, 1000]

# float32 sums of <= 1000 terms, softmax weights to 2e-7 each
TOLERANCE = 1e-6


def make_case(
    rng: np.random.Generator, variant: Any, kind: str, query_len: int, kv_len: int, **kwargs: Any
) -> Case:
    kind = kind if variant.has_key_mask else "none"
    mask = mask_of(kind, 2, kv_len, rng)
    return random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask, **kwargs)


@every_variant
def test_kernel_equals_reference(run_kernel: RunKernel, variant: BlockSparseVariant) -> None:
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        kinds = ("none", "left", "right", "holes", "empty_row")
        for kind in kinds if length < 300 else ("holes",):
            for query_len in {length, -(-length // 3)}:
                case = make_case(rng, variant, kind, query_len, length)
                case = with_lists(rng, variant, case, slack=int(rng.integers(3)))
                got, want = run_kernel(variant, case), reference(variant, case)
                assert relative_error(got, want) < TOLERANCE, (query_len, length, kind)
                assert not got[want == 0.0].any(), "queries that see nothing must be exact zeros"


def test_one_loop_with_dense(run_kernel: RunKernel) -> None:
    """All blocks listed, in one task's order: the numbers of the dense kernel."""
    rng = np.random.default_rng(1)
    dense = AttentionVariant(2, 2, 64, 64, 0.125)
    case = random_case(rng, PLAIN, query_len=300)
    want = run_kernel(dense, case, {"keys": 64})
    got = run_kernel(PLAIN, every_block(PLAIN, case), {"keys": 64})
    assert np.array_equal(got, want)


@pytest.mark.parametrize("variant", [PLAIN, CAUSAL], ids=lambda v: v.overload)
def test_large_scores(run_kernel: RunKernel, variant: BlockSparseVariant) -> None:
    """Scores up to about +-100; the error is that of float32 scores, 100 * 2^-24."""
    rng = np.random.default_rng(2)
    gain = math.sqrt(30.0 / (variant.scale * math.sqrt(variant.head_dim)))
    case = with_lists(rng, variant, make_case(rng, variant, "holes", 150, 150, gain=gain))
    assert relative_error(run_kernel(variant, case), reference(variant, case)) < 2e-5


def test_what_is_not_listed_or_hidden_is_never_read(run_kernel: RunKernel) -> None:
    """Poison in unlisted blocks and in padding does not reach any output, not even as 0 * NaN."""
    rng = np.random.default_rng(3)
    case = make_case(rng, CAUSAL, "holes", 90, 90)
    case = with_lists(rng, CAUSAL, case, empty=0.0)
    indices = np.where(case.extra["block_indices"] == 2, 0, case.extra["block_indices"])
    case = case.with_(extra={**case.extra, "block_indices": indices})

    def poison(array: NDArray[Any]) -> None:
        array[~np.broadcast_to(case.key_mask[:, None], array.shape[:3])] = np.nan
        blocks = np.broadcast_to((case.key_positions // 16 == 2)[:, None], array.shape[:3])
        array[blocks] = np.nan

    poisoned = case.edited("key", poison).edited("value", poison)
    assert np.array_equal(run_kernel(CAUSAL, case), run_kernel(CAUSAL, poisoned))


def test_batch_rows_are_independent(run_kernel: RunKernel) -> None:
    rng = np.random.default_rng(5)
    case = with_lists(rng, CAUSAL, random_case(rng, CAUSAL, batch=3, query_len=70))
    whole = run_kernel(CAUSAL, case)
    names = ("query", "key", "value", "key_mask", "query_positions", "key_positions")
    extra = {name: array[1:2] for name, array in case.extra.items()}
    alone = case.with_(extra=extra, **{name: getattr(case, name)[1:2] for name in names})
    assert np.array_equal(run_kernel(CAUSAL, alone)[0], whole[1])


def test_any_parameters_give_the_same(run_kernel: RunKernel) -> None:
    # Panels that do not fill a block, blocks of several runs of keys.
    params = {"vectors": 3, "rows": 4, "keys": 7}
    rng = np.random.default_rng(6)
    case = with_lists(rng, WINDOW, make_case(rng, WINDOW, "left", 150, 150))
    assert relative_error(run_kernel(WINDOW, case, params), reference(WINDOW, case)) < TOLERANCE


SELECTORS = [
    BlockSelectVariant(4, 2, 7, 0.8, block=8, window_right=0, has_key_mask=True),
    BlockSelectVariant(
        3, 1, 40, 0.3, block=16, estimator="causal", window_right=0, has_key_mask=True
    ),
    BlockSelectVariant(
        4,
        4,
        5,
        0.9,
        16,
        2,
        "causal",
        softcap=3.0,
        window_left=70,
        window_right=0,
        has_key_mask=True,
    ),
    BlockSelectVariant(2, 2, 64, 0.125, block=64, window_left=150, window_right=90),
]


@pytest.mark.parametrize("variant", SELECTORS, ids=lambda v: v.overload)
def test_select_kernel_equals_reference(
    run_kernel_all: RunKernel, variant: BlockSelectVariant
) -> None:
    rng = np.random.default_rng(7)
    for length in LENGTHS:
        kinds = ("none", "left", "right", "holes", "empty_row")
        for kind in kinds if length < 300 else ("holes",):
            for query_len in {length, -(-length // 3)}:
                case = make_case(rng, variant, kind, query_len, length, gain=1.5)
                thresholds = rng.uniform(0.3, 1.02, variant.num_heads).astype(np.float32)
                case = case.with_(extra={"thresholds": thresholds})
                counts, indices = run_kernel_all(variant, case)
                feeds = case.feeds(variant)
                del feeds["thresholds"]
                want, before = kept_blocks(variant.masses(**feeds), thresholds)
                got = np.zeros_like(want)
                for at in np.ndindex(*counts.shape):
                    listed = indices[at][: counts[at]]
                    assert (np.diff(listed) > 0).all() and not indices[at][counts[at] :].any()
                    got[at][listed] = True
                # A mass may fall on either side of a threshold that it is this near to.
                close = np.abs(before - thresholds[:, None, None]) < 1e-5
                assert not ((got != want) & ~close).any(), (query_len, length, kind)
                assert (got != want).mean() < 0.01


def test_other_operators_are_rejected_with_a_reason() -> None:
    for template in (TEMPLATE, SELECT_TEMPLATE):
        rejection = template.supports(AttentionVariant(2, 2, 8, 8, 0.3))
        assert rejection is not None and "Attention" in rejection.reason
