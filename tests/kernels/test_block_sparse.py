"""Block-sparse attention: its body against the float64 reference, and that against a loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from block_lists import every_block, with_lists
from oracles import Case, mask_of, prefix, random_case, reference, relative_error, run
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.one_node import one_node_model

CAUSAL = BlockSparseVariant(4, 2, 7, 5, 0.4, block=16, window_right=0, has_key_mask=True)
FULL = BlockSparseVariant(3, 3, 8, 8, 0.3, block=8)
WINDOW = BlockSparseVariant(
    6, 2, 5, 7, 0.4, block=12, window_left=40, window_right=0, has_key_mask=True
)
CAPPED = BlockSparseVariant(
    2, 1, 8, 4, 0.3, block=64, softcap=2.5, window_left=30, window_right=9, has_key_mask=True
)
VARIANTS = [CAUSAL, FULL, WINDOW, CAPPED]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)

# float32 sums of at most 200 terms
TOLERANCE = 1e-6


def make_case(
    rng: np.random.Generator, variant: BlockSparseVariant, kind: str, query_len: int, kv_len: int
) -> Case:
    kind = kind if variant.has_key_mask else "none"
    mask = mask_of(kind, 2, kv_len, rng)
    case = random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask)
    return with_lists(rng, variant, case, slack=int(rng.integers(3)))


@every_variant
def test_body_equals_reference(variant: BlockSparseVariant) -> None:
    rng = np.random.default_rng(0)
    for length in (1, 7, 63, 64, 65, 200):
        for kind in ("none", "left", "right", "holes", "empty_row"):
            for query_len in {length, -(-length // 3)}:
                case = make_case(rng, variant, kind, query_len, length)
                got, want = run(variant, case), reference(variant, case)
                assert relative_error(got, want) < TOLERANCE, (query_len, length, kind)
                assert not got[want == 0.0].any(), "queries that see nothing must be exact zeros"


@every_variant
def test_all_blocks_listed_is_dense_attention(variant: BlockSparseVariant) -> None:
    rng = np.random.default_rng(1)
    dense = AttentionVariant(
        *(variant.num_heads, variant.num_kv_heads, variant.head_dim, variant.value_dim),
        scale=variant.scale,
        softcap=variant.softcap,
        window_left=variant.window_left,
        window_right=variant.window_right,
        has_key_mask=variant.has_key_mask,
    )
    case = make_case(rng, variant, "holes", 100, 150)
    case = every_block(variant, case)
    real = case.query_positions[:, None, :, None] >= 0
    got = np.where(real, reference(variant, case), 0.0)
    want = np.where(real, reference(dense, case.with_(extra={})), 0.0)
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)


def attend_one(variant: BlockSparseVariant, case: Case, b: int, h: int, i: int) -> Any:
    """One query, from the text of the operator's description."""
    output = np.zeros(variant.value_dim)
    position = int(case.query_positions[b, i])
    if position < 0:
        return output
    first = next(int(p) for p in case.query_positions[b] if p >= 0)
    row = (position - first) // variant.block
    count = case.extra["block_counts"][b, h, row]
    blocks = set(case.extra["block_indices"][b, h, row, :count].tolist())
    total = 0.0
    for j in range(case.key.shape[2]):
        at = int(case.key_positions[b, j])
        if at < 0 or at // variant.block not in blocks:
            continue
        if variant.has_key_mask and not case.key_mask[b, j]:
            continue
        if variant.window_left >= 0 and position - at > variant.window_left:
            continue
        if variant.window_right >= 0 and at - position > variant.window_right:
            continue
        head = h * variant.num_kv_heads // variant.num_heads
        score = variant.scale * float(
            np.dot(case.query[b, h, i].astype(float), case.key[b, head, j].astype(float))
        )
        if variant.softcap:
            score = variant.softcap * math.tanh(score / variant.softcap)
        total += math.exp(score)
        output += math.exp(score) * case.value[b, head, j].astype(float)
    return output / total if total else output


@every_variant
@pytest.mark.parametrize(("query_len", "kv_len"), [(37, 37), (9, 41)])
def test_reference_equals_one_query_at_a_time(
    variant: BlockSparseVariant, query_len: int, kv_len: int
) -> None:
    rng = np.random.default_rng(2)
    case = make_case(rng, variant, "left", query_len, kv_len)
    want = np.array(
        [
            [
                [attend_one(variant, case, b, h, i) for i in range(query_len)]
                for h in range(variant.num_heads)
            ]
            for b in range(2)
        ]
    )
    np.testing.assert_allclose(reference(variant, case), want, rtol=1e-12, atol=1e-14)


def moved_lists(case: Case, first: int, last: int) -> dict[str, NDArray[Any]]:
    """The lists of the query blocks ``first .. last - 1``."""
    return {name: array[:, :, first:last] for name, array in case.extra.items()}


def test_left_padding_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    for padding in (1, 16, 37):
        case = make_case(rng, CAUSAL, "none", 70, 70)
        grow = ((0, 0), (0, 0), (padding, 0), (0, 0))
        before = np.arange(-padding, 0, dtype=np.int64)[None].repeat(2, axis=0)
        blocks = -(-(70 + padding) // CAUSAL.block) - 5
        extra = {
            name: np.pad(array, ((0, 0), (0, 0), (0, blocks), (0, 0))[: array.ndim])
            for name, array in case.extra.items()
        }
        padded = Case(
            query=np.pad(case.query, grow, constant_values=0.5),
            key=np.pad(case.key, grow, constant_values=0.5),
            value=np.pad(case.value, grow, constant_values=0.5),
            key_mask=np.pad(case.key_mask, ((0, 0), (padding, 0))),
            query_positions=np.concatenate([before, case.query_positions], axis=1),
            key_positions=np.concatenate([before, case.key_positions], axis=1),
            extra=extra,
        )
        got = run(CAUSAL, padded)
        assert relative_error(got[:, :, padding:], run(CAUSAL, case)) < TOLERANCE
        assert not got[:, :, :padding].any()


def test_pieces_that_start_at_blocks_make_the_whole() -> None:
    rng = np.random.default_rng(4)
    case = make_case(rng, CAUSAL, "holes", 150, 150)
    case = case.with_(key_mask=np.concatenate([np.ones((2, 1), bool), case.key_mask[:, 1:]], 1))
    positions = np.arange(150, dtype=np.int64)[None].repeat(2, axis=0)
    case = case.with_(query_positions=positions, key_positions=positions)
    pieces = []
    for start, end in ((0, 32), (32, 112), (112, 150)):
        lists = moved_lists(case, start // 16, -(-end // 16))
        pieces.append(run(CAUSAL, prefix(case, start, end).with_(extra=lists)))
    assert relative_error(np.concatenate(pieces, axis=2), run(CAUSAL, case)) < TOLERANCE


@every_variant
def test_hidden_and_unlisted_keys_never_matter(variant: BlockSparseVariant) -> None:
    rng = np.random.default_rng(5)
    case = make_case(rng, variant, "holes", 90, 90)
    before = run(variant, case)
    for slot in (0, 15, 16, 40, 89):

        def disturb(array: NDArray[Any], slot: int = slot) -> None:
            array[:, :, slot] = 1e3

        after = run(variant, case.edited("key", disturb).edited("value", disturb))
        for b, h, i in np.argwhere((before != after).any(axis=-1)):
            distance = int(case.query_positions[b, i] - case.key_positions[b, slot])
            assert variant.window_left < 0 or distance <= variant.window_left
            assert variant.window_right < 0 or -distance <= variant.window_right
            assert case.key_mask[b, slot] or not variant.has_key_mask
            row = int(case.query_positions[b, i]) // variant.block
            count = case.extra["block_counts"][b, h, row]
            listed = case.extra["block_indices"][b, h, row, :count]
            assert case.key_positions[b, slot] // variant.block in listed


@every_variant
def test_body_is_valid_and_the_same_every_time(variant: BlockSparseVariant) -> None:
    model = one_node_model(variant)
    onnx.checker.check_model(model)
    assert one_node_model(variant) == model
    (function,) = model.functions
    assert {opset.domain for opset in function.opset_import} == {"", "com.microsoft"}
    assert all(node.domain == "" for node in function.node), "standard ops only"


def test_impossible_variants_are_refused() -> None:
    for changes in ({"block": 0}, {"window_left": -2}, {"softcap": -1.0}, {"num_heads": 3}):
        fields: dict[str, Any] = dict(
            num_heads=4, num_kv_heads=2, head_dim=7, value_dim=5, scale=0.3, block=16
        )
        with pytest.raises(ValueError):
            BlockSparseVariant(**(fields | changes))
