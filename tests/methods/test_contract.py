"""What every method promises on every site it accepts, checked on the body in ONNX Runtime.

A new method is covered by one line in ``PARAMETERS``.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import Case, mask_of, prefix, random_case, reference, relative_error, run
from sites import SITES
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.operator import UNLIMITED
from subquad.passes.methods import METHODS, parse_method
from subquad.passes.recognise.site import AttentionSite

PARAMETERS = {
    "dense": ["dense"],
    "window": ["window:3,sinks=2", "window:20,sinks=0"],
    "elu": ["elu"],
}

# float32 bodies against float64: rounding of scores and of sums of at most 1000 terms. Seen: 7e-7.
TOLERANCE = 2e-6

Variant = AttentionVariant | HybridVariant


class Lowered:
    """One method with parameters on one site it accepts."""

    def __init__(self, text: str, site: AttentionSite) -> None:
        method, params = parse_method(text)
        self.text, self.site, self.method = text, site, method
        self.rejection = method.supports(site, params)
        if self.rejection is None:
            self.variant: Variant = method.lower(site, params)  # type: ignore[assignment]

    def allowed(self, case: Case) -> NDArray[np.bool_]:
        """Pairs the method may let interact: by the site's mask, from positions, no shortcuts."""
        batch, query_len, kv_len = len(case.key_mask), *(x.shape[2] for x in (case.query, case.key))
        allowed = np.zeros((batch, query_len, kv_len), dtype=np.bool_)
        mask = self.site.mask
        for b, i, j in np.ndindex(*allowed.shape):
            distance = int(case.query_positions[b, i] - case.key_positions[b, j])
            near = mask.window_left == UNLIMITED or distance <= mask.window_left
            near &= mask.window_right == UNLIMITED or -distance <= mask.window_right
            allowed[b, i, j] = near and (case.key_mask[b, j] or not mask.key_padding)
        if self.method.name == "window":
            assert isinstance(self.variant, HybridVariant)
            reach = (self.variant.window_left, self.variant.window_right)
            for b, i, j in np.ndindex(*allowed.shape):
                distance = int(case.query_positions[b, i] - case.key_positions[b, j])
                in_window = -reach[1] <= distance <= reach[0]
                is_sink = 0 <= case.key_positions[b, j] < self.variant.sinks
                allowed[b, i, j] &= in_window or is_sink
        return allowed


ALL = [
    Lowered(text, site) for method in METHODS for text in PARAMETERS[method.name] for site in SITES
]
ACCEPTED = [lowered for lowered in ALL if lowered.rejection is None]
every_accepted = pytest.mark.parametrize(
    "lowered", ACCEPTED, ids=[f"{x.text}-{x.site.name}" for x in ACCEPTED]
)
causal_accepted = pytest.mark.parametrize(
    "lowered",
    [x for x in ACCEPTED if x.site.mask.is_causal],
    ids=[f"{x.text}-{x.site.name}" for x in ACCEPTED if x.site.mask.is_causal],
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


def masked_case(
    rng: np.random.Generator, lowered: Lowered, kind: str, query_len: int, kv_len: int
) -> Case:
    kind = kind if lowered.site.mask.key_padding else "none"
    mask = mask_of(kind, 2, kv_len, rng)
    return random_case(rng, lowered.variant, query_len=query_len, kv_len=kv_len, mask=mask)


def test_every_method_is_covered() -> None:
    assert set(PARAMETERS) == {method.name for method in METHODS}
    for method in METHODS:
        assert any(lowered.method is method for lowered in ACCEPTED)


def test_every_rejection_has_a_reason_and_a_place() -> None:
    rejected = [lowered for lowered in ALL if lowered.rejection is not None]
    assert rejected
    for lowered in rejected:
        assert lowered.rejection is not None
        assert lowered.rejection.where == lowered.site.name
        assert len(lowered.rejection.reason) > 20


@every_accepted
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65])
def test_matches_reference(lowered: Lowered, length: int, rng: np.random.Generator) -> None:
    for kind in ("none", "left", "right", "holes", "empty_row"):
        case = masked_case(rng, lowered, kind, length, length)
        error = relative_error(run(lowered.variant, case), reference(lowered.variant, case))
        assert error < TOLERANCE, kind


@every_accepted
@pytest.mark.parametrize(("query_len", "kv_len"), [(1, 40), (5, 90), (70, 200), (1000, 1000)])
def test_matches_reference_on_long_and_cached_inputs(
    lowered: Lowered, query_len: int, kv_len: int, rng: np.random.Generator
) -> None:
    case = masked_case(rng, lowered, "holes", query_len, kv_len)
    error = relative_error(run(lowered.variant, case), reference(lowered.variant, case))
    assert error < TOLERANCE


@every_accepted
def test_large_scores(lowered: Lowered, rng: np.random.Generator) -> None:
    case = random_case(rng, lowered.variant, query_len=65)
    scores = lowered.variant.scale * np.einsum(
        "bhid,bhjd->bhij", case.query[:, :1], case.key[:, :1]
    )
    gain = np.float32(100.0 / np.abs(scores).max())
    case = case.with_(query=case.query * gain)
    error = relative_error(run(lowered.variant, case), reference(lowered.variant, case))
    # A score of 100 carries a float32 error near 1e-5, which exp turns into a relative one.
    assert error < 3e-5


@every_accepted
@pytest.mark.parametrize("kind", ["none", "holes", "left"])
@pytest.mark.parametrize(("query_len", "kv_len"), [(70, 70), (9, 30)])
def test_an_unseen_token_moves_no_bit(
    lowered: Lowered, kind: str, query_len: int, kv_len: int, rng: np.random.Generator
) -> None:
    case = masked_case(rng, lowered, kind, query_len, kv_len)
    allowed = lowered.allowed(case)
    before = run(lowered.variant, case)
    for j in {0, 1, kv_len // 3, kv_len // 2, kv_len - query_len, kv_len - 2, kv_len - 1}:
        changed = case.edited("key", lambda x, j=j: x[:, :, j].fill(3.7))  # type: ignore[misc]
        changed = changed.edited("value", lambda x, j=j: x[:, :, j].fill(-91.0))  # type: ignore[misc]
        after = run(lowered.variant, changed)
        moved = (after != before).any(axis=(1, 3))
        assert not (moved & ~allowed[:, :, j]).any()
        assert (moved == allowed[:, :, j]).all(), "a visible token must matter"


@every_accepted
def test_padding_may_hold_large_numbers(lowered: Lowered, rng: np.random.Generator) -> None:
    if not lowered.site.mask.key_padding:
        return
    case = masked_case(rng, lowered, "left", 20, 20)
    padding = ~case.key_mask[:, None, :, None]
    spoiled = case.with_(
        key=np.where(padding, np.float32(1e6), case.key),
        value=np.where(padding, np.float32(-1e6), case.value),
    )
    assert np.array_equal(run(lowered.variant, spoiled), run(lowered.variant, case))


@every_accepted
def test_a_row_without_tokens_yields_zeros(lowered: Lowered, rng: np.random.Generator) -> None:
    if not lowered.site.mask.key_padding:
        return
    case = masked_case(rng, lowered, "empty_row", 66, 66)
    output = run(lowered.variant, case)
    assert not output[-1].any()
    assert output[0].all()


@every_accepted
def test_batch_rows_are_independent(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "holes", 66, 66)
    before = run(lowered.variant, case)
    for name in ("query", "key", "value"):
        after = run(lowered.variant, case.edited(name, lambda x: x[0].fill(2.5)))
        assert np.array_equal(after[1], before[1])
        assert not np.array_equal(after[0], before[0])


@every_accepted
def test_heads_are_independent(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "holes", 66, 66)
    before = run(lowered.variant, case)
    heads = lowered.variant.heads
    readers = np.arange(heads.num_heads) // heads.group == 0
    for name, expected in (
        ("key", readers),
        ("value", readers),
        ("query", np.arange(heads.num_heads) == 0),
    ):
        after = run(lowered.variant, case.edited(name, lambda x: x[:, 0].fill(2.5)))
        moved = (after != before).any(axis=(0, 2, 3))
        assert np.array_equal(moved, expected), name


@every_accepted
def test_a_query_moves_only_its_own_row(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "left", 66, 66)
    before = run(lowered.variant, case)
    after = run(lowered.variant, case.edited("query", lambda x: x[:, :, 40].fill(1.5)))
    moved = (after != before).any(axis=(0, 1, 3))
    assert np.array_equal(moved, np.arange(66) == 40)


@causal_accepted
def test_prefill_equals_stepwise_decoding(lowered: Lowered, rng: np.random.Generator) -> None:
    length = 70
    case = masked_case(rng, lowered, "left", length, length)
    prefill = run(lowered.variant, case)
    steps = [prefix(case, i, i + 1) for i in range(length)]
    decoded = np.concatenate([run(lowered.variant, step) for step in steps], axis=2)
    assert relative_error(decoded, prefill) < TOLERANCE


@causal_accepted
def test_prefill_in_chunks_equals_prefill(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "holes", 150, 150)
    cuts = [0, 13, 77, 141, 150]
    chunks = [
        run(lowered.variant, prefix(case, start, end))
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    assert relative_error(np.concatenate(chunks, axis=2), run(lowered.variant, case)) < TOLERANCE


@every_accepted
@pytest.mark.parametrize("padding", [1, 37, 64])
def test_left_padding_changes_nothing(
    lowered: Lowered, padding: int, rng: np.random.Generator
) -> None:
    if not lowered.site.mask.key_padding:
        return
    case = random_case(rng, lowered.variant, query_len=70)
    grow = ((0, 0), (0, 0), (padding, 0), (0, 0))
    first = np.arange(-padding, 0, dtype=np.int64)[None].repeat(2, axis=0)
    padded = Case(
        query=np.pad(case.query, grow, constant_values=0.5),
        key=np.pad(case.key, grow, constant_values=0.5),
        value=np.pad(case.value, grow, constant_values=0.5),
        key_mask=np.pad(case.key_mask, ((0, 0), (padding, 0))),
        query_positions=np.concatenate([first, case.query_positions], axis=1),
        key_positions=np.concatenate([first, case.key_positions], axis=1),
    )
    error = relative_error(run(lowered.variant, padded)[:, :, padding:], run(lowered.variant, case))
    assert error < TOLERANCE


@every_accepted
def test_permuting_keys_with_their_positions_gone(
    lowered: Lowered, rng: np.random.Generator
) -> None:
    if lowered.variant.has_positions:
        return
    case = masked_case(rng, lowered, "holes", 30, 50)
    order = rng.permutation(50)
    permuted = case.with_(
        key=case.key[:, :, order],
        value=case.value[:, :, order],
        key_mask=case.key_mask[:, order],
    )
    assert relative_error(run(lowered.variant, permuted), run(lowered.variant, case)) < TOLERANCE
