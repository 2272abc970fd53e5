"""Files of opsets 25 to 28: read where the operators mean the same at 24, refused by name else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import subquad
from subquad.converter.onnx_source import trace_onnx
from subquad.converter.pipeline import convert, inspect_source
from subquad.runtime.errors import UnsupportedModelError

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 6, 5
FLOAT = TensorProto.FLOAT


def save(
    path: Path,
    nodes: list[onnx.NodeProto],
    opset: int,
    inputs: dict[str, int],
    output: tuple[int | str, ...] = ("batch", "length", HEADS * VALUE_DIM),
) -> Path:
    graph = helper.make_graph(
        nodes,
        "test",
        [
            helper.make_tensor_value_info(name, FLOAT, ["batch", "length", width])
            for name, width in inputs.items()
        ],
        [helper.make_tensor_value_info("y", FLOAT, list(output))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, path)
    return path


WIDTHS = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * VALUE_DIM}


def linear(path: Path, rule: str = "linear", opset: int = 27, **more: Any) -> Path:
    """ONNX's own operator, and a convolution in front of it."""
    extra = {"gated": ["", "g"], "delta": ["", "", "beta"], "gated_delta": ["", "g", "beta"]}
    operands = extra.get(rule, [])
    inputs = {**WIDTHS, **{name: KV_HEADS for name in operands if name}}
    weight = np.ones((HEADS * DIM, 1, 3), np.float32) / 3
    nodes = [
        helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(weight)),
        helper.make_node("Transpose", ["q"], ["qt"], perm=[0, 2, 1]),
        helper.make_node("CausalConvWithState", ["qt", "w"], ["qc", "state"]),
        helper.make_node("Transpose", ["qc"], ["qf"], perm=[0, 2, 1]),
        helper.make_node(
            "LinearAttention",
            ["qf", "k", "v", *operands],
            ["y", "present"],
            q_num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            update_rule=rule,
            **more,
        ),
    ]
    return save(path, nodes, opset, inputs)


def feeds(length: int, batch: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    return {
        name: rng.standard_normal((batch, length, width)).astype(np.float32)
        for name, width in WIDTHS.items()
    }


@pytest.mark.parametrize("opset", [27, 28])
@pytest.mark.parametrize("more", [{}, {"scale": 0.7}])
def test_linear_attention_of_onnx(tmp_path: Path, opset: int, more: dict[str, Any]) -> None:
    path = linear(tmp_path / "m.onnx", opset=opset, **more)
    convert(path, tmp_path / "out", require_sites="all")
    written = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    assert {e.domain: e.version for e in written.opset_import}[""] == 24
    artifact, reference = subquad.load(tmp_path / "out"), ReferenceEvaluator(str(path))
    for length in (1, 7, 63, 64, 65):
        (want,) = reference.run(["y"], feeds(length))
        got = artifact.run(feeds(length))["y"]
        # float32 sums of at most 65 keys on both sides
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), length


@pytest.mark.parametrize("rule", ["gated", "delta", "gated_delta"])
def test_other_rules_are_named(tmp_path: Path, rule: str) -> None:
    report = inspect_source(linear(tmp_path / "m.onnx", rule))
    assert not report.sites and len(report.rejections) == 1
    assert f"LinearAttention ({rule})" in str(report.rejections[0])


def single(path: Path, op_type: str, opset: int, **attributes: Any) -> Path:
    inputs = {"x": 8, "z": 8} if op_type in ("SwiGLU", "Mod") else {"x": 8}
    node = helper.make_node(op_type, list(inputs), ["y"], **attributes)
    shape = ("batch", 8, "length") if op_type == "Transpose" else ("batch", "length", 8)
    return save(path, [node], opset, inputs, shape)


@pytest.mark.parametrize("opset", [25, 26, 27, 28])
def test_operators_of_more_types(tmp_path: Path, opset: int) -> None:
    traced = trace_onnx(single(tmp_path / "m.onnx", "Transpose", opset, perm=[0, 2, 1]))
    assert traced.model.opset_imports[""] == 24
    assert traced.reference.opset_imports[""] == opset


@pytest.mark.parametrize(
    ("op_type", "opset", "attributes", "message"),
    [
        ("SwiGLU", 28, {}, "(SwiGLU) needs opset 28"),
        ("Mod", 28, {}, "with the sign of the divisor, which needs opset 28"),
        ("Relu", 29, {}, "opset 29; supported are 13 to 28"),
    ],
)
def test_what_opset_24_has_not(
    tmp_path: Path, op_type: str, opset: int, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        trace_onnx(single(tmp_path / "m.onnx", op_type, opset, **attributes))
    assert message in str(caught.value)


def test_an_opset_that_the_installed_onnx_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(
        tmp_path / "m.onnx", [helper.make_node("Neg", ["x"], ["y"])], 27, {"x": 8}, ("n", 8)
    )
    monkeypatch.setattr(onnx.defs, "onnx_opset_version", lambda: 26)
    with pytest.raises(
        UnsupportedModelError, match="opset 27, .* up to 26, .* Install a newer onnx"
    ):
        trace_onnx(path)


def test_a_remainder_of_floats_inside_a_graph(tmp_path: Path) -> None:
    """The file does not say of which type it is."""
    nodes = [helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Mod", ["a", "z"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, 28, {"x": 8, "z": 8}, ("batch", "length", 8))
    with pytest.raises(UnsupportedModelError, match="with the sign of the divisor"):
        trace_onnx(path)


def test_windows_of_attention(tmp_path: Path) -> None:
    inputs = dict.fromkeys("qkv", 24)
    more: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 4, "left_window_size": 3}
    node = helper.make_node("Attention", list(inputs), ["y"], **more)
    shape = ("batch", "length", 24)
    with pytest.raises(UnsupportedModelError, match="has left_window_size=3"):
        trace_onnx(save(tmp_path / "m.onnx", [node], 25, inputs, shape))
    node = helper.make_node("Attention", list(inputs), ["y"], **{**more, "left_window_size": -1})
    traced = trace_onnx(save(tmp_path / "m.onnx", [node], 25, inputs, shape))
    assert traced.model.opset_imports[""] == 24
