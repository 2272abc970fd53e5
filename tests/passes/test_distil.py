"""Low-rank distillation: the loss falls, only what may change changes, and what ships is merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.operator import DOMAIN, DOMAIN_VERSION, OPSET
from subquad.passes.attention_nodes import NodeBuilder, SharedInputs, register_variant
from subquad.passes.repair.adapters import RepairWeights, repair_weights
from subquad.passes.repair.distil import DistilResult, DistilSettings, distil
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import OutputSpec
from subquad.runtime.samples import Layout

WIDTH, HEADS, VOCABULARY = 12, 3, 17
LENGTH = 20


def student_model(window: int) -> ir.Model:
    """Embedding, one causal attention, output projection, tied head: logits of a tiny decoder."""
    rng = np.random.default_rng(0)
    builder = NodeBuilder()
    graph_inputs = [ir.val("ids", ir.DataType.INT64, ["batch", "length"])]
    initializers = {}

    def weight(name: str, *shape: int) -> ir.Value:
        array = rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32) * 1.5
        initializers[name] = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(shape),
            const_value=ir.tensor(array, name=name),
        )
        return initializers[name]

    table = weight("table", VOCABULARY, WIDTH)
    hidden = builder.op("Gather", table, graph_inputs[0])
    heads = []
    for name in ("q", "k", "v"):
        projected = builder.op("MatMul", hidden, weight(f"{name}.weight", WIDTH, WIDTH))
        split = builder.op("Reshape", projected, builder.ints([0, 0, HEADS, WIDTH // HEADS]))
        heads.append(builder.op("Transpose", split, perm=[0, 2, 1, 3]))
    variant = AttentionVariant(
        HEADS, HEADS, WIDTH // HEADS, WIDTH // HEADS, 0.7, window_left=window, window_right=0
    )
    query, key, value = heads
    shared = SharedInputs(None, *builder.positions(query, key, None, "end"))
    (mixed,) = builder.operator(variant, query, key, value, shared, {}, name="attention")
    packed = builder.packed(mixed)
    out = builder.op("MatMul", packed, weight("o.weight", WIDTH, WIDTH))
    added = builder.op("Add", hidden, out)
    head = builder.op("Transpose", table, perm=[1, 0])
    logits = builder.op("MatMul", added, head)
    logits.name = "logits"
    logits.shape = ir.Shape(["batch", "length", VOCABULARY])
    graph = ir.Graph(
        graph_inputs,
        [logits],
        nodes=builder.nodes,
        initializers=list(initializers.values()),
        opset_imports={"": OPSET, DOMAIN: DOMAIN_VERSION},
        name="tiny",
    )
    model = ir.Model(graph, ir_version=10)
    register_variant(model, variant)
    return model


def session(model: ir.Model) -> Any:
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())


def weights_of(model: ir.Model) -> dict[str, NDArray[Any]]:
    return {
        name: np.array(value.const_value.numpy())
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


OUTPUTS = [OutputSpec("logits", "float32", ("batch", "length", VOCABULARY), is_logits=True)]
LAYOUT = Layout("batch", ("length",), {}, ())


def train(model: ir.Model, settings: DistilSettings) -> tuple[DistilResult, Any]:
    rng = np.random.default_rng(1)
    feeds = [{"ids": rng.integers(0, VOCABULARY, (2, LENGTH))} for _ in range(6)]
    teacher = session(student_model(LENGTH))

    def taught(given: Any) -> dict[str, NDArray[Any]]:
        return {"logits": teacher.run(["logits"], dict(given))[0]}

    weights = repair_weights(model, ["attention"])
    # Tokens are found through the input's role; here there is one input, and no padding.
    result = distil(model, weights, taught, OUTPUTS, LAYOUT, feeds[:4], feeds[4:], settings)
    return result, (teacher, feeds)


def test_weights_around_an_attention() -> None:
    model = student_model(1)
    # The embedding is also the head, and stands before the projections.
    assert repair_weights(model, ["attention"]) == RepairWeights(
        ("q.weight", "k.weight", "v.weight", "o.weight"), ()
    )
    assert repair_weights(model, ["elsewhere"]) == RepairWeights((), ())


def test_a_matrix_that_something_else_reads_is_left_alone() -> None:
    model = student_model(1)
    (use,) = model.graph.initializers["k.weight"].uses()
    use.node.replace_input_with(use.idx, model.graph.initializers["q.weight"])
    assert repair_weights(model, ["attention"]).projections == ("v.weight", "o.weight")


def test_loss_falls_and_the_merged_model_has_it() -> None:
    model = student_model(1)
    before = weights_of(model)
    result, (teacher, feeds) = train(model, DistilSettings(rank=4, steps=120, learning_rate=0.02))
    assert result.loss_after < 0.6 * result.loss_before
    after = weights_of(model)
    assert set(result.changed) == {"q.weight", "k.weight", "v.weight", "o.weight"}
    np.testing.assert_array_equal(after["table"], before["table"])
    for name in result.changed:
        change = after[name] - before[name]
        assert np.linalg.matrix_rank(change, tol=1e-4) <= 4
    runs = [session(model), teacher]
    losses = []
    for given in feeds[4:]:
        q, p = (run.run(["logits"], given)[0].astype(np.float64) for run in runs)
        log_q, log_p = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (q, p))
        losses.append((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())
    assert np.mean(losses) == pytest.approx(result.loss_after, rel=1e-3)


def test_same_seed_same_weights() -> None:
    models = [student_model(1), student_model(1)]
    for model in models:
        train(model, DistilSettings(steps=5))
    first, second = map(weights_of, models)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_what_does_not_help_is_not_kept() -> None:
    model = student_model(1)
    before = weights_of(model)
    result, _ = train(model, DistilSettings(steps=3, learning_rate=0.9, checks=1))
    assert result.best_step == 0 and result.changed == ()
    assert result.loss_after == result.loss_before
    for name, array in weights_of(model).items():
        np.testing.assert_array_equal(array, before[name])


def test_nothing_to_train_is_an_error() -> None:
    model = student_model(1)
    with pytest.raises(UsageError, match="no replaced attention"):
        distil(model, RepairWeights((), ()), dict, OUTPUTS, LAYOUT, [], [], DistilSettings())


@pytest.mark.parametrize("bad", [{"rank": 0}, {"steps": 0}, {"learning_rate": 1.5}])
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be"):
        DistilSettings(**bad)


def test_model_is_valid() -> None:
    onnx.checker.check_model(ir.to_proto(student_model(1)))
