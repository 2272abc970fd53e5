from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from subquad.runtime import onnx_wire
from subquad.runtime.session import open_session
from tiny_artifact import feeds


def test_added_outputs_are_what_the_onnx_package_would_add(decoder: Path) -> None:
    content = (decoder / "model.onnx").read_bytes()
    extended = onnx.load_from_string(onnx_wire.add_outputs(content, ["site0", "site2"]))
    want = onnx.load_from_string(content)
    want.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("site0", "site2"))
    assert extended == want


def test_added_outputs_can_be_read_with_external_data(decoder: Path) -> None:
    content = (decoder / "model.onnx").read_bytes()
    session = open_session(onnx_wire.add_outputs(content, ["site1"]), folder=decoder, threads=1)
    logits, site = session.run(["logits", "site1"], feeds(2, 5))
    assert site.shape == (2, 2, 5, 8)
    plain = open_session(decoder / "model.onnx", folder=decoder, threads=1)
    assert np.array_equal(plain.run(["logits"], feeds(2, 5))[0], logits)


def test_no_outputs_change_nothing(decoder: Path) -> None:
    content = (decoder / "model.onnx").read_bytes()
    assert onnx_wire.add_outputs(content, []) == content


def test_names_and_locations_agree_with_the_onnx_package(decoder: Path) -> None:
    content = (decoder / "reference.onnx").read_bytes()
    graph = onnx.load_from_string(content).graph
    names = {name for node in graph.node for name in node.output}
    assert onnx_wire.value_names(content) == names
    assert onnx_wire.external_locations(content) == {"model.onnx.data"}


def test_overloads(decoder: Path) -> None:
    names = onnx_wire.overloaded_functions((decoder / "model.onnx").read_bytes())
    assert names == {"ai.subquad::Attention"}
    assert not onnx_wire.overloaded_functions((decoder / "reference.onnx").read_bytes())


def test_matmul_model_is_valid_and_multiplies() -> None:
    model = onnx.load_from_string(onnx_wire.matmul_model())
    onnx.checker.check_model(model, full_check=True)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 300)).astype(np.float32)
    b = rng.standard_normal((300, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(onnx_wire.matmul_model())
    (c,) = session.run(None, {"a": a, "b": b})
    # float32 sums of 300 terms
    assert np.allclose(c, a.astype(np.float64) @ b, atol=1e-4)


@pytest.mark.parametrize("content", [b"\x3a\x7f", b"\x07", b"\xff" * 12, b"\x3a"])
def test_what_is_no_message_raises(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a protobuf message"):
        onnx_wire.value_names(content)
