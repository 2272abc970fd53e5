"""Graphs in torch: operators as the ONNX specification has them, bodies exact, gradients right."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from block_lists import with_lists
from onnx_cases import specified_cases
from oracles import Case, mask_of, random_case, reference, relative_error
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.one_node import one_node_model
from subquad.kernels.operator import present_inputs
from subquad.passes.differentiable.graph import TorchGraph, unknown_operators
from subquad.passes.differentiable.operators import STANDARD_OPERATORS
from subquad.runtime.errors import UnsupportedModelError

SIZES = (4, 2, 7, 5, 0.3)
Variant = AttentionVariant | HybridVariant | BlockSparseVariant

VARIANTS: list[Variant] = [
    AttentionVariant(*SIZES),
    AttentionVariant(*SIZES, has_key_mask=True),
    AttentionVariant(*SIZES, softcap=4.0, has_key_mask=True),
    AttentionVariant(*SIZES, window_right=0),
    AttentionVariant(*SIZES, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, window_left=40, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, window_left=5000, window_right=0, has_key_mask=True),
    HybridVariant(*SIZES, 40, 0, 4, allowed_right=0, feature_map="elu", has_key_mask=True),
    HybridVariant(*SIZES, 40, 40, sinks=4, feature_map="elu", has_key_mask=True),
    HybridVariant(*SIZES, feature_map="elu"),
    BlockSparseVariant(*SIZES, block=4, window_right=0, has_key_mask=True),
    BlockSparseVariant(*SIZES, block=32),
]

DTYPES = {np.dtype(name) for name in ("f2", "f4", "f8", "i1", "u1", "i4", "i8", "?")}
# Forms that opset 24 has no more, and reductions over nothing.
LEFT_OUT = ("opset13", "empty_set")


def as_torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array, copy=True))


def cases_of(op_type: str) -> list[Any]:
    """The specification's examples of dtypes that torch and NumPy share."""
    return [
        case
        for case in specified_cases(op_type)
        if not any(word in case.name for word in LEFT_OUT)
        and all(
            isinstance(array, np.ndarray | np.generic) and array.dtype in DTYPES
            for inputs, outputs in case.data_sets
            for array in (*inputs, *outputs)
        )
    ]


def assert_as_specified(case: Any) -> None:
    graph = TorchGraph(ir.from_proto(case.model))
    names = [value.name for value in case.model.graph.input]
    for inputs, outputs in case.data_sets:
        feeds = {name: as_torch(array) for name, array in zip(names, inputs, strict=True)}
        for tensor, want in zip(graph(feeds).values(), outputs, strict=True):
            got = tensor.numpy()
            assert got.dtype == want.dtype, case.name
            # float16 has three digits.
            tolerance = 2e-3 if want.dtype == np.float16 else 1e-5
            np.testing.assert_allclose(
                got.astype(np.float64),
                want.astype(np.float64),
                rtol=tolerance,
                atol=tolerance,
                err_msg=case.name,
            )


@pytest.mark.parametrize("op_type", sorted(STANDARD_OPERATORS))
def test_operator_as_specified(op_type: str) -> None:
    """Every example is right or refused with a reason, and most operators refuse none."""
    refused = 0
    cases = cases_of(op_type)
    for case in cases:
        try:
            assert_as_specified(case)
        except UnsupportedModelError as error:
            assert op_type in str(error)
            refused += 1
    has_modes = {"Pad", "ScatterND", "BatchNormalization", "Conv", "ConvTranspose"}
    several_outputs = {"LayerNormalization"}
    assert not refused or op_type in has_modes | several_outputs
    assert len(cases) > refused or op_type in {"Cast", "CastLike", "ReduceL2", *several_outputs}


def case_of(rng: np.random.Generator, variant: Variant, length: int, padding: str) -> Case:
    mask = mask_of(padding, 2, length, rng)
    case = random_case(rng, variant, query_len=length, mask=mask)
    if isinstance(variant, BlockSparseVariant):
        case = with_lists(rng, variant, case)
    return case


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.op_type}_{v.overload}")
def test_bodies_are_exact(variant: Variant) -> None:
    rng = np.random.default_rng(5)
    graph = TorchGraph(ir.from_proto(one_node_model(variant)))
    for length in (1, 7, 130):
        case = case_of(rng, variant, length, "left")
        feeds = {name: as_torch(array) for name, array in case.feeds(variant).items()}
        got = graph(feeds)["output"].numpy()
        # As for the same bodies in ONNX Runtime.
        assert relative_error(got, reference(variant, case)) < 2e-6


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.op_type}_{v.overload}")
def test_gradients_are_those_of_the_output(variant: Variant) -> None:
    """The directional derivative in float64 differences of the float64 reference."""
    rng = np.random.default_rng(6)
    case = case_of(rng, variant, 9, "holes")
    feeds = {name: as_torch(array) for name, array in case.feeds(variant).items()}
    moving = ("query", "key", "value")
    for name in moving:
        feeds[name].requires_grad_()
    output = TorchGraph(ir.from_proto(one_node_model(variant)))(feeds)["output"]
    weights = rng.normal(size=output.shape)
    (output * as_torch(weights).float()).sum().backward()
    step = 1e-6
    for name in moving:
        direction = rng.normal(size=feeds[name].shape)
        values = getattr(case, name).astype(np.float64)
        ends = [
            reference(variant, case.with_(**{name: values + sign * step * direction}))
            for sign in (1, -1)
        ]
        wanted = float(np.sum(weights * (ends[0] - ends[1])) / (2 * step))
        gradient = feeds[name].grad
        assert gradient is not None and torch.isfinite(gradient).all()
        got = float(np.sum(gradient.numpy().astype(np.float64) * direction))
        # float32 gradients of some hundred terms.
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_operators_without_usable_examples() -> None:
    rng = np.random.default_rng(8)
    x = as_torch(rng.normal(size=(3, 4, 5)).astype(np.float32))
    cast = STANDARD_OPERATORS["Cast"]
    np.testing.assert_array_equal(cast(x, to=7).numpy(), x.numpy().astype(np.int64))
    assert cast(x, to=9).dtype == torch.bool
    norm = STANDARD_OPERATORS["ReduceL2"](x, as_torch(np.array([0, -1])), keepdims=0)
    np.testing.assert_allclose(norm.numpy(), np.sqrt((x.numpy() ** 2).sum((0, 2))), rtol=1e-6)
    scale, bias = (as_torch(rng.normal(size=(4, 5)).astype(np.float32)) for _ in range(2))
    got = STANDARD_OPERATORS["LayerNormalization"](x, scale, bias, axis=1, epsilon=0.1)
    centred = x.numpy() - x.numpy().mean((1, 2), keepdims=True)
    deviation = np.sqrt((centred**2).mean((1, 2), keepdims=True) + 0.1)
    want = centred / deviation * scale.numpy() + bias.numpy()
    np.testing.assert_allclose(got.numpy(), want, atol=1e-5)


TRAINED = """
<ir_version: 10, opset_import: ["" : 24]>
agraph (float[n, 2] x, bool flag) => (float[n, 2] y)
  <float[2, 2] weight = {1, 2, 3, 4}, float[2] shift = {1, 1}>
{
  h = MatMul(x, weight)
  y = If (flag) <
    then_branch = then_graph () => (float[n, 2] a) { a = Add(h, shift) },
    else_branch = else_graph () => (float[n, 2] b) { b = Neg(h) }
  >
}
"""


def trained_graph() -> TorchGraph:
    model = ir.from_proto(onnx.parser.parse_model(TRAINED))
    model.graph.initializers["weight"].name = "layer.weight"
    return TorchGraph(model)


def test_weights_given_get_gradients_and_branches_are_taken() -> None:
    graph = trained_graph()
    x = torch.tensor([[1.0, 1.0]])
    added = graph({"x": x, "flag": torch.tensor(True)})["y"]
    np.testing.assert_array_equal(added.numpy(), [[5, 7]])
    weight = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    feeds = {"x": x, "flag": torch.tensor(False)}
    negated = graph(feeds, outputs=["h", "y"], weights={"layer.weight": weight})
    np.testing.assert_array_equal(negated["h"].detach().numpy(), [[4, 7]])
    np.testing.assert_array_equal(negated["y"].detach().numpy(), [[-4, -7]])
    negated["y"].sum().backward()
    assert weight.grad is not None
    np.testing.assert_array_equal(weight.grad.numpy(), [[-1, -1], [-1, -1]])


LOOP = """
<ir_version: 10, opset_import: ["" : 24]>
agraph (float[2] x, int64 most, bool go) => (float[2] last, float[n, 2] each)
  <float[2] factor = {2, 3}>
{
  last, each = Loop (most, go, x) <
    body = step (int64 i, bool on, float[2] a) => (bool going, float[2] b, float[2] c)
      <float[2] one = {1, 1}, int64 three = {3}>
    {
      going = Less(i, three)
      h = Mul(a, factor)
      b = Add(h, one)
      c = Neg(b)
    }
  >
}
"""


def test_loop_carries_stacks_and_stops() -> None:
    """By its count, by its condition, and not at all; gradients go through all steps."""
    graph = TorchGraph(ir.from_proto(onnx.parser.parse_model(LOOP)))
    x = torch.tensor([1.0, 1.0])
    factor = torch.tensor([2.0, 3.0], requires_grad=True)
    feeds = {"x": x, "most": torch.tensor(2), "go": torch.tensor(True)}
    got = graph(feeds, weights={"factor": factor})
    np.testing.assert_array_equal(got["last"].detach().numpy(), [7, 13])
    np.testing.assert_array_equal(got["each"].detach().numpy(), [[-3, -4], [-7, -13]])
    got["last"].sum().backward()
    # d (f (f + 1) + 1) / df
    np.testing.assert_array_equal(factor.grad, [5, 7])
    got = graph({**feeds, "most": torch.tensor(9)})
    assert len(got["each"]) == 4, "step 3 says that there is no other"
    for nothing in ({"most": torch.tensor(0)}, {"go": torch.tensor(False)}):
        with pytest.raises(UnsupportedModelError, match="Loop .* without a step"):
            graph({**feeds, **nothing})


def test_unknown_operators_inside_a_loop_are_named() -> None:
    text = LOOP.replace("Neg(b)", "Det(b)")
    assert unknown_operators(ir.from_proto(onnx.parser.parse_model(text))) == ["ai.onnx::Det"]


def test_unknown_initializer_is_named() -> None:
    with pytest.raises(KeyError, match="absent"):
        trained_graph()({}, weights={"absent": torch.zeros(1)})


def test_unknown_operators_are_named_before_anything_runs() -> None:
    text = TRAINED.replace("h = MatMul(x, weight)", "h = Det(x)")
    text = text.replace("Neg(h)", "com.example.Odd(h)").replace(
        '"" : 24', '"" : 24, "com.example" : 1'
    )
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert unknown_operators(model) == ["ai.onnx::Det", "com.example::Odd"]
    with pytest.raises(UnsupportedModelError, match="ai.onnx::Det, com.example::Odd"):
        TorchGraph(model)


def test_inputs_of_attention_are_the_variants() -> None:
    variant = VARIANTS[4]
    graph = TorchGraph(ir.from_proto(one_node_model(variant)))
    with pytest.raises(KeyError, match="key_mask"):
        graph({name: torch.zeros(1) for name in present_inputs(variant) if name != "key_mask"})
