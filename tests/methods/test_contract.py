"""What every method promises on every site it accepts, checked on the body in ONNX Runtime.

A new method is covered by one line in ``PARAMETERS``.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import Case, mask_of, prefix, random_case, reference, relative_error, run, session
from sites import SITES
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_sparse.reference import listed_pairs
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.operator import UNLIMITED
from subquad.passes.methods import METHODS, parse_method
from subquad.passes.methods.base import WHOLE
from subquad.passes.recognise.site import AttentionSite

PARAMETERS = {
    "dense": ["dense"],
    "window": ["window:3,sinks=2", "window:20,sinks=0"],
    "elu": ["elu"],
    "hedgehog": ["hedgehog", "hedgehog:dims=3"],
    "static": ["static", "static:1/0", "static:0/1/1/0"],
    "lolcats": ["lolcats:5,sinks=2", "lolcats:70,dims=4,mix=lse"],
    "block_sparse": [
        "block_sparse:0.6,block=8",
        "block_sparse:0.8,block=16,selector=causal,sinks=0",
    ],
}

# float32 bodies against float64: rounding of scores and of sums of at most 1000 terms. Seen: 7e-7.
TOLERANCE = 2e-6

Variant = AttentionVariant | HybridVariant | BlockSparseVariant


class Lowered:
    """One method with parameters on one site it accepts."""

    def __init__(self, text: str, site: AttentionSite) -> None:
        method, params = parse_method(text)
        self.text, self.site, self.method = text, site, method
        self.rejection = method.supports(site, params)
        self.causal_granularity = method.causal_granularity(params)
        self.piece_granularity = method.piece_granularity(params)
        if self.rejection is None:
            self.variant: Variant = method.lower(site, params)  # type: ignore[assignment]
            self.prepared = method.prepare(site, params)
            self.tensors = method.tensors(site, params)
            if method.name == "static":
                # As it starts, all keys weigh alike.
                case = random_case(np.random.default_rng(7), self.variant, query_len=40)
                sample = {"query": case.query, "key": case.key, "value": case.value}
                fitted = method.calibrate(site, params, [sample])
                assert fitted is not None
                self.tensors = fitted.tensors

    @property
    def reads_query(self) -> NDArray[np.bool_]:
        """Query heads whose output depends on the query, ``[num_heads]``."""
        reads = np.ones(self.site.num_heads, dtype=np.bool_)
        if self.method.name == "static":
            assert isinstance(self.variant, HybridVariant)
            reads = np.array([not part.linear for part in self.variant.parts])
        return reads

    @property
    def query_block(self) -> int:
        """Queries up to which one may matter to another."""
        return self.variant.block if isinstance(self.variant, BlockSparseVariant) else 1

    def prepare(self, case: Case) -> Case:
        """``case`` with the method's tensors and what its prepared nodes give."""
        case = case.with_(extra={**case.extra, **self.tensors})
        for variant in self.prepared:
            outputs = session(variant).run(None, case.feeds(variant))
            names = [spec.name for spec in variant.outputs]
            case = case.with_(extra={**case.extra, **dict(zip(names, outputs, strict=True))})
        return case

    def run(self, case: Case) -> NDArray[np.float32]:
        return run(self.variant, self.prepare(case))

    def reference(self, case: Case) -> NDArray[np.float64]:
        """The attention's; what prepares it has tests of its own, and may jump with rounding."""
        return reference(self.variant, self.prepare(case))

    def seen(self, case: Case) -> NDArray[np.bool_]:
        """Pairs that interact, ``[batch, num_heads or 1, query_len, kv_len]``."""
        allowed = self.allowed(case)[:, None]
        if not isinstance(self.variant, BlockSparseVariant):
            return allowed
        lists = self.prepare(case).extra
        return allowed & listed_pairs(
            lists["block_counts"],
            lists["block_indices"],
            case.query_positions,
            case.key_positions,
            self.variant.block,
        )

    def felt(self, case: Case) -> NDArray[np.bool_]:
        """Pairs where the key may matter to the query, at the granularity that is declared."""
        allowed = self.allowed(case)
        if self.causal_granularity == 1:
            return allowed
        rows = case.query_positions // self.causal_granularity
        same = (rows[:, :, None] == rows[:, None, :]).astype(np.int64)
        return np.asarray(same @ allowed.astype(np.int64) > 0)

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


@every_accepted
def test_tensors_are_the_inputs_that_the_site_does_not_have(lowered: Lowered) -> None:
    _, params = parse_method(lowered.text)
    tensors = lowered.method.tensors(lowered.site, params)
    prepared = lowered.method.prepare(lowered.site, params)
    made = {spec.name for variant in prepared for spec in variant.outputs}
    wanted = [spec for spec in lowered.variant.inputs[6:] if spec is not None]
    for spec in wanted:
        if spec.name not in made:
            assert tensors[spec.name].shape == spec.dims
            assert tensors[spec.name].dtype == spec.dtype
            assert np.isfinite(tensors[spec.name]).all()


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
        error = relative_error(lowered.run(case), lowered.reference(case))
        assert error < TOLERANCE, kind


@every_accepted
@pytest.mark.parametrize(("query_len", "kv_len"), [(1, 40), (5, 90), (70, 200), (1000, 1000)])
def test_matches_reference_on_long_and_cached_inputs(
    lowered: Lowered, query_len: int, kv_len: int, rng: np.random.Generator
) -> None:
    case = masked_case(rng, lowered, "holes", query_len, kv_len)
    error = relative_error(lowered.run(case), lowered.reference(case))
    assert error < TOLERANCE


@every_accepted
def test_large_scores(lowered: Lowered, rng: np.random.Generator) -> None:
    case = random_case(rng, lowered.variant, query_len=65)
    scores = lowered.variant.scale * np.einsum(
        "bhid,bhjd->bhij", case.query[:, :1], case.key[:, :1]
    )
    gain = np.float32(100.0 / np.abs(scores).max())
    case = case.with_(query=case.query * gain)
    error = relative_error(lowered.run(case), lowered.reference(case))
    # A score of 100 carries a float32 error near 1e-5, which exp turns into a relative one.
    assert error < 3e-5


@every_accepted
@pytest.mark.parametrize("kind", ["none", "holes", "left"])
@pytest.mark.parametrize(("query_len", "kv_len"), [(70, 70), (9, 30)])
def test_an_unseen_token_moves_no_bit(
    lowered: Lowered, kind: str, query_len: int, kv_len: int, rng: np.random.Generator
) -> None:
    case = masked_case(rng, lowered, kind, query_len, kv_len)
    felt, seen = lowered.felt(case), lowered.seen(case)
    before = lowered.run(case)
    for j in {0, 1, kv_len // 3, kv_len // 2, kv_len - query_len, kv_len - 2, kv_len - 1}:
        changed = case.edited("key", lambda x, j=j: x[:, :, j].fill(3.7))  # type: ignore[misc]
        changed = changed.edited("value", lambda x, j=j: x[:, :, j].fill(-91.0))  # type: ignore[misc]
        after = lowered.run(changed)
        moved = (after != before).any(axis=3)
        assert not (moved & ~felt[:, None, :, j]).any()
        assert moved[np.broadcast_to(seen[..., j], moved.shape)].all(), "a seen token must matter"


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
    assert np.array_equal(lowered.run(spoiled), lowered.run(case))


@every_accepted
def test_a_row_without_tokens_yields_zeros(lowered: Lowered, rng: np.random.Generator) -> None:
    if not lowered.site.mask.key_padding:
        return
    case = masked_case(rng, lowered, "empty_row", 66, 66)
    output = lowered.run(case)
    assert not output[-1].any()
    assert output[0].all()


@every_accepted
def test_batch_rows_are_independent(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "holes", 66, 66)
    before = lowered.run(case)
    for name in ("query", "key", "value"):
        after = lowered.run(case.edited(name, lambda x: x[0].fill(2.5)))
        assert np.array_equal(after[1], before[1])
        matters = name != "query" or lowered.reads_query.any()
        assert np.array_equal(after[0], before[0]) != matters


@every_accepted
def test_heads_are_independent(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "holes", 66, 66)
    before = lowered.run(case)
    heads = lowered.variant.heads
    readers = np.arange(heads.num_heads) // heads.group == 0
    for name, expected in (
        ("key", readers),
        ("value", readers),
        ("query", (np.arange(heads.num_heads) == 0) & lowered.reads_query),
    ):
        after = lowered.run(case.edited(name, lambda x: x[:, 0].fill(2.5)))
        moved = (after != before).any(axis=(0, 2, 3))
        assert np.array_equal(moved, expected), name


@every_accepted
def test_a_query_moves_only_its_own_row(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "left", 66, 66)
    before = lowered.run(case)
    after = lowered.run(case.edited("query", lambda x: x[:, :, 40].fill(1.5)))
    moved = (after != before).any(axis=(1, 3))
    assert moved[:, 40].all() == lowered.reads_query.any()
    rows = case.query_positions // lowered.query_block
    assert not (moved & (rows != rows[:, 40:41])).any()
    if lowered.site.mask.is_causal and lowered.causal_granularity == 1:
        assert not moved[:, :40].any()


@causal_accepted
def test_prefill_equals_stepwise_decoding(lowered: Lowered, rng: np.random.Generator) -> None:
    if lowered.piece_granularity != 1:
        return
    length = 70
    case = masked_case(rng, lowered, "left", length, length)
    prefill = lowered.run(case)
    steps = [prefix(case, i, i + 1) for i in range(length)]
    decoded = np.concatenate([lowered.run(step) for step in steps], axis=2)
    assert relative_error(decoded, prefill) < TOLERANCE


@causal_accepted
def test_prefill_in_chunks_equals_prefill(lowered: Lowered, rng: np.random.Generator) -> None:
    case = masked_case(rng, lowered, "holes", 150, 150)
    cuts = [0, 13, 77, 141, 150]
    step = lowered.piece_granularity
    if step == WHOLE:
        return
    if step > 1:
        # Pieces start at multiples of the step in positions: those of a row that starts at once.
        case = masked_case(rng, lowered, "right", 150, 150)
        cuts = sorted({*range(0, 150, max(step, 48)), 150})
    chunks = [
        lowered.run(prefix(case, start, end)) for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    assert relative_error(np.concatenate(chunks, axis=2), lowered.run(case)) < TOLERANCE


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
    error = relative_error(lowered.run(padded)[:, :, padding:], lowered.run(case))
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
    assert relative_error(lowered.run(permuted), lowered.run(case)) < TOLERANCE
