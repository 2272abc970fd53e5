"""A split model computes what the whole one does, exactly and with replacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from exact_folder import VOCABULARY, ExactFolder
from subquad.converter.emit import write_models
from subquad.passes.calibrate.engine import Engine, State
from subquad.passes.calibrate.measure import assignment_of, visible_blocks
from subquad.passes.calibrate.segments import Projection
from subquad.passes.plan import Assignment
from subquad.passes.replace import replace_sites
from subquad.runtime.manifest import MODEL_NAME
from subquad.runtime.session import open_session, run_session

Feeds = dict[str, NDArray[Any]]

# Cutting a graph changes how ONNX Runtime fuses it, so sums of up to 24 terms are re-associated.
TOLERANCE = 1e-5


def feeds(rng: np.random.Generator, rows: int = 2, length: int = 70) -> Feeds:
    mask = np.ones((rows, length), np.int64)
    mask[0, :9] = 0
    return {
        "input_ids": rng.integers(0, VOCABULARY, (rows, length)),
        "attention_mask": mask,
    }


def logits_of(engine: Engine, inputs: Feeds, plan: Mapping[int, Assignment]) -> NDArray[Any]:
    found: list[NDArray[Any]] = []
    engine.run([inputs], plan, finish=lambda number, out: found.append(out["logits"]))
    return found[0]


def relative(got: NDArray[Any], want: NDArray[Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_segments_compute_the_whole_model(exact: ExactFolder, rng: np.random.Generator) -> None:
    inputs = feeds(rng)
    session = open_session(exact.path / MODEL_NAME, folder=exact.path, threads=1)
    (want,) = run_session(session, inputs, ["logits"])
    got = logits_of(Engine(exact.split(), exact.path, threads=1), inputs, {})
    assert relative(got, want) < TOLERANCE


@pytest.mark.parametrize(
    "texts",
    [
        {0: "window:size=8,sinks=0"},
        {0: "elu", 2: "window:size=16,sinks=2"},
        {0: "window:size=8", 1: "window:size=8", 2: "elu"},
        {0: "block_sparse:tau=0.3,block=8", 2: "block_sparse:tau=0.2,block=4,selector=causal"},
    ],
)
def test_a_plan_runs_as_the_rewritten_model_does(
    exact: ExactFolder, texts: dict[int, str], rng: np.random.Generator, tmp_path: Any
) -> None:
    inputs = feeds(rng)
    plan = {rank: assignment_of(exact.sites[rank], text) for rank, text in texts.items()}
    model = ir.load(exact.path / MODEL_NAME)
    whole = [plan.get(rank, assignment_of(site, "dense")) for rank, site in enumerate(exact.sites)]
    replace_sites(model, whole)
    write_models(tmp_path, {MODEL_NAME: model})
    session = open_session(tmp_path / MODEL_NAME, folder=tmp_path, threads=1)
    (want,) = run_session(session, inputs, ["logits"])
    engine = Engine(exact.split(), exact.path, threads=1)
    got = logits_of(engine, inputs, plan)
    assert relative(got, want) < TOLERANCE
    assert relative(got, logits_of(engine, inputs, {})) > 1e-3, "the plan must matter"


def test_batches_run_side_by_side(exact: ExactFolder, rng: np.random.Generator) -> None:
    engine = Engine(exact.split(), exact.path, threads=1)
    batches = [feeds(rng, 1, 33), feeds(rng, 3, 20)]
    found: dict[int, NDArray[Any]] = {}
    engine.run(batches, {}, finish=lambda number, out: found.update({number: out["logits"]}))
    for number, batch in enumerate(batches):
        assert np.array_equal(found[number], logits_of(engine, batch, {}))


def test_going_on_from_a_site_equals_the_whole_run(
    exact: ExactFolder, rng: np.random.Generator
) -> None:
    inputs = feeds(rng)
    engine = Engine(exact.split(), exact.path, threads=1)
    plan = {1: assignment_of(exact.sites[1], "window:size=8")}
    want = logits_of(engine, inputs, plan)
    found: list[NDArray[Any]] = []

    def visit(rank: int, states: Sequence[State]) -> None:
        if rank == 1:
            before = [dict(state) for state in states]
            outputs = [engine.attention(1, state, plan[1]).output for state in states]
            engine.run_from(
                1, states, outputs, {}, finish=lambda number, out: found.append(out["logits"])
            )
            assert [set(state) for state in states] == [set(state) for state in before]

    engine.run([inputs], {}, visit=visit)
    assert np.array_equal(found[0], want)


def test_projection_leads_into_the_residual_stream(
    exact: ExactFolder, rng: np.random.Generator
) -> None:
    split = exact.split()
    engine = Engine(split, exact.path, threads=1)
    for rank, site in enumerate(split.sites):
        assert isinstance(site.projection, Projection)
        # The bias belongs to it, the residual does not.
        assert site.projection.output.startswith("b") and site.projection.weight is not None
        weight = split.weight(site.projection.weight, exact.path)
        assert weight.shape == (24, 16), rank

    def visit(rank: int, states: Sequence[State]) -> None:
        (state,) = states
        output = engine.attention(rank, state, None).output
        projected, stream = engine.project(rank, state, output)
        nothing, base = engine.project(rank, state, np.zeros_like(output))
        assert stream is not None and base is not None
        projection = split.sites[rank].projection
        assert isinstance(projection, Projection) and projection.weight is not None
        weight = split.weight(projection.weight, exact.path).astype(np.float64)
        merged = output.transpose(0, 2, 1, 3).reshape(*projected.shape[:2], -1)
        assert relative(projected - nothing, merged @ weight) < TOLERANCE
        assert relative(stream - base, merged @ weight) < TOLERANCE

    engine.run([feeds(rng)], {}, visit=visit)


def test_only_one_layer_s_values_are_held(exact: ExactFolder, rng: np.random.Generator) -> None:
    engine = Engine(exact.split(), exact.path, threads=1)
    held: list[int] = []
    engine.run(
        [feeds(rng, 1, 500)],
        {},
        visit=lambda rank, states: held.append(sum(v.nbytes for v in states[0].values())),
    )
    # The mask of 500 x 500 is not among them, and nothing piles up.
    assert held[-1] <= held[1] and max(held) < 500 * 500


def test_weights_can_be_replaced(exact: ExactFolder, rng: np.random.Generator) -> None:
    inputs, split = feeds(rng), exact.split()
    projection = split.sites[1].projection
    assert isinstance(projection, Projection) and projection.weight is not None
    zero = np.zeros((24, 16), np.float32)
    changed = Engine(split, exact.path, threads=1, weights={projection.weight: zero})
    plain = Engine(exact.split(), exact.path, threads=1)
    assert relative(logits_of(changed, inputs, {}), logits_of(plain, inputs, {})) > 1e-2


def test_a_selector_tells_how_many_blocks_it_keeps(
    exact: ExactFolder, rng: np.random.Generator
) -> None:
    engine = Engine(exact.split(), exact.path, threads=1)
    inputs = feeds(rng, 2, 64)
    inputs["attention_mask"][:] = 1
    visible = visible_blocks(exact.sites[0].mask, 64, 64, 8)
    assert visible == 8 * 9 / 2
    heads = 2 * exact.sites[0].num_heads
    kept: dict[str, NDArray[np.int64] | None] = {}

    def visit(rank: int, states: Sequence[State]) -> None:
        for text in ("block_sparse:tau=1.0,block=8", "block_sparse:tau=0.1,block=8", "elu"):
            result = engine.attention(rank, states[0], assignment_of(exact.sites[rank], text))
            kept[text] = result.kept

    engine.run([inputs], {}, visit=visit)
    all_of_them, few, none = kept.values()
    assert all_of_them is not None and few is not None and none is None
    assert (all_of_them == 2 * visible).all() and len(all_of_them) == heads / 2
    # At least the block itself, the one before and the first.
    assert heads * (1 + 2 + 6 * 3) <= few.sum() < 0.9 * heads * visible


def test_equal_attentions_share_a_session(exact: ExactFolder, rng: np.random.Generator) -> None:
    engine = Engine(exact.split(), exact.path, threads=1)
    logits_of(engine, feeds(rng), {})
    assert len(engine._attentions) == 1
