"""Block selection: its body against the float64 reference, and what a selector promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from oracles import Case, mask_of, prefix, random_case, session
from subquad.kernels.block_select.estimators import ESTIMATORS
from subquad.kernels.block_select.reference import kept_blocks
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.one_node import one_node_model

POOLED = BlockSelectVariant(4, 2, 7, 0.8, block=8, window_right=0, has_key_mask=True)
CAUSAL = BlockSelectVariant(
    3, 1, 16, 0.5, block=16, estimator="causal", window_right=0, has_key_mask=True
)
FULL = BlockSelectVariant(2, 2, 8, 0.7, block=12, sinks=0)
WINDOW = BlockSelectVariant(
    4, 4, 5, 0.9, 16, 2, "causal", softcap=3.0, window_left=70, window_right=0, has_key_mask=True
)
BAND = BlockSelectVariant(2, 2, 6, 0.6, block=8, window_left=50, window_right=21)
VARIANTS = [POOLED, CAUSAL, FULL, WINDOW, BAND]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)

# float32 scores of size 10 are off by 1e-6, masses by as much relatively
MARGIN = 1e-5

Lists = tuple[NDArray[np.int32], NDArray[np.int32]]


def make_case(
    rng: np.random.Generator, variant: BlockSelectVariant, kind: str, query_len: int, kv_len: int
) -> Case:
    kind = kind if variant.has_key_mask else "none"
    mask = mask_of(kind, 2, kv_len, rng)
    case = random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask, gain=1.5)
    thresholds = rng.uniform(0.3, 1.02, variant.num_heads).astype(np.float32)
    return case.with_(extra={"thresholds": thresholds})


def select(variant: BlockSelectVariant, case: Case) -> Lists:
    counts, indices = session(variant).run(None, case.feeds(variant))
    return counts, indices


def as_map(lists: Lists) -> NDArray[np.bool_]:
    """``[batch, num_heads, query_blocks, key_blocks]``; checks the form of the lists."""
    counts, indices = lists
    assert counts.dtype == indices.dtype == np.int32
    kept = np.zeros(indices.shape, np.bool_)
    for at in np.ndindex(*counts.shape):
        listed = indices[at][: counts[at]]
        assert (np.diff(listed) > 0).all()
        kept[at][listed] = True
        assert not indices[at][counts[at] :].any()
    return kept


def assert_selects(variant: BlockSelectVariant, case: Case, lists: Lists) -> None:
    """Equal to the reference, but for blocks at a threshold or of equal mass."""
    feeds = case.feeds(variant)
    thresholds = feeds.pop("thresholds")
    masses = variant.masses(**feeds)
    want, before = kept_blocks(masses, thresholds)
    differ = as_map(lists) != want
    close = np.abs(before - thresholds[:, None, None]) < MARGIN
    assert not (differ & ~close).any()
    # The escape above must not hide a wrong selection.
    assert differ.mean() < 0.01


@every_variant
def test_body_equals_reference(variant: BlockSelectVariant) -> None:
    rng = np.random.default_rng(0)
    for length in (1, 7, 63, 64, 65, 200):
        for kind in ("none", "left", "right", "holes", "empty_row"):
            for query_len in {length, -(-length // 3)}:
                case = make_case(rng, variant, kind, query_len, length)
                assert_selects(variant, case, select(variant, case))


def test_the_rule_by_hand() -> None:
    """One head, one dimension, blocks of 2: scores are products of means."""
    variant = BlockSelectVariant(1, 1, 1, 1.0, block=2, sinks=0)
    rows = np.repeat(np.log(np.array([8.0, 4.0, 2.0, 1.0, 1.0, 4.0])), 2)
    case = random_case(np.random.default_rng(0), variant, batch=1, query_len=12)
    case = case.with_(
        query=np.ones((1, 1, 12, 1), np.float32),
        key=rows.astype(np.float32)[None, None, :, None],
        extra={"thresholds": np.array([0.7], np.float32)},
    )
    # Masses 8 4 2 1 1 4 of 20: the first two and the last (the earlier of equals first) make .8;
    # before the last is .6, before the third .8. Near are the neighbours.
    kept = as_map(select(variant, case))[0, 0]
    by_mass = np.array([1, 1, 0, 0, 0, 1], np.bool_)
    for row in range(6):
        near = np.abs(np.arange(6) - row) <= 1
        assert np.array_equal(kept[row], by_mass | near)


@every_variant
def test_threshold_one_keeps_all_that_is_visible(variant: BlockSelectVariant) -> None:
    rng = np.random.default_rng(1)
    case = make_case(rng, variant, "holes", 90, 90)
    case = case.with_(extra={"thresholds": np.ones(variant.num_heads, np.float32)})
    kept = as_map(select(variant, case))
    block = variant.block
    rows, columns = case.query_positions // block, case.key_positions // block
    distance = case.query_positions[:, :, None] - case.key_positions[:, None, :]
    visible = np.ones(distance.shape, np.bool_)
    if variant.window_left >= 0:
        visible &= distance <= variant.window_left
    if variant.window_right >= 0:
        visible &= -distance <= variant.window_right
    if variant.has_key_mask:
        visible &= case.key_mask[:, None, :] & case.key_mask[:, :, None]
    for b, i, j in np.argwhere(visible):
        assert kept[b, :, rows[b, i], columns[b, j]].all()


@every_variant
def test_hidden_tokens_move_no_list(variant: BlockSelectVariant) -> None:
    """Padding never; later tokens only lists of blocks they reach at the declared granularity."""
    rng = np.random.default_rng(2)
    case = make_case(rng, variant, "holes", 90, 90)
    before = as_map(select(variant, case))
    reads_all = variant.estimator == "pooled"
    for slot in (0, 7, 8, 23, 40, 50, 88):

        def disturb(array: NDArray[Any], slot: int = slot) -> None:
            array[:, :, slot] = 9.0

        after = as_map(select(variant, case.edited("key", disturb).edited("query", disturb)))
        for b, _, row, _ in np.argwhere(before != after):
            assert case.key_mask[b, slot] or not variant.has_key_mask
            position = int(case.key_positions[b, slot])
            first = row * variant.block
            last = first + variant.block - 1
            if reads_all and first <= position <= last:
                continue
            # Every query of the block may see the token.
            if variant.window_right >= 0:
                assert position - first <= variant.window_right
            if variant.window_left >= 0:
                assert last - position <= variant.window_left


@every_variant
def test_a_prefix_gives_the_same_lists(variant: BlockSelectVariant) -> None:
    """Lists of whole blocks do not depend on what follows."""
    if variant.window_right != 0:
        return
    rng = np.random.default_rng(3)
    case = make_case(rng, variant, "right", 96, 96)
    whole = as_map(select(variant, case))
    for start, end in ((0, 48), (48, 96), (0, 64 + variant.block)):
        if start and variant.estimator == "causal":
            continue  # it reads queries of the block before, which this piece lacks
        piece = prefix(case, start, end).with_(extra=case.extra)
        blocks = slice(start // variant.block, end // variant.block)
        got = as_map(select(variant, piece))
        assert np.array_equal(got, whole[:, :, blocks, : got.shape[3]])


def test_rows_of_padding_are_empty() -> None:
    rng = np.random.default_rng(4)
    case = make_case(rng, POOLED, "right", 66, 66)
    counts, _ = select(POOLED, case)
    assert not counts[0, :, 6:].any()  # 44 of 66 are real: blocks 0 to 5
    assert counts[0, :, :6].all() and counts[1].all()


@every_variant
def test_body_is_valid_and_the_same_every_time(variant: BlockSelectVariant) -> None:
    model = one_node_model(variant)
    onnx.checker.check_model(model)
    assert one_node_model(variant) == model
    assert all(node.domain == "" for node in model.functions[0].node), "standard ops only"


def test_impossible_variants_are_refused() -> None:
    for changes in ({"block": 0}, {"sinks": -1}, {"estimator": "none"}, {"softcap": -1.0}):
        fields: dict[str, Any] = dict(num_heads=4, num_kv_heads=2, head_dim=7, scale=0.3, block=16)
        with pytest.raises(ValueError):
            BlockSelectVariant(**(fields | changes))


def test_estimators_are_named_once() -> None:
    names = [estimator.name for estimator in ESTIMATORS]
    assert len(set(names)) == len(names)
