"""Two models, one data file: shared, aligned, deterministic, streamed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from subquad.converter.emit import DataFileWriter, copy_files, write_models
from subquad.converter.weights import DerivedTensor, StoredTensor

Tensors = dict[str, ir.TensorProtocol]


def _model(tensors: Tensors) -> ir.Model:
    """y = x @ w0 @ w1 ...; every weight square."""
    size = int(next(iter(tensors.values())).shape.numpy()[0])
    float32 = ir.TensorType(ir.DataType.FLOAT)
    current = ir.val("x", shape=ir.Shape(["batch", size]), type=float32)
    graph_input, nodes, weights = current, [], []
    for name, tensor in tensors.items():
        weight = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=float32,
            const_value=tensor,
        )
        weights.append(weight)
        nodes.append(ir.node("MatMul", [current, weight]))
        current = nodes[-1].outputs[0]
        current.name = f"h_{name}"
    current.name, current.type, current.shape = "y", float32, ir.Shape(["batch", size])
    graph = ir.Graph(
        [graph_input], [current], nodes=nodes, initializers=weights, opset_imports={"": 24}
    )
    return ir.Model(graph, ir_version=10)


def _square(seed: int, size: int = 64) -> ir.Tensor[Any]:
    values = np.random.default_rng(seed).standard_normal((size, size)).astype(np.float32)
    return ir.Tensor(values, name=f"w{seed}")


def _references(path: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            assert entries["location"] == "model.onnx.data"
            found[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    return found


def test_models_share_one_file_and_run(tmp_path: Path) -> None:
    a, b = _square(0), _square(1)
    transposed = ir.Tensor(np.asarray(b.numpy()).T, name="bt")
    models = {
        "model.onnx": _model({"a": a, "t": transposed}),
        "reference.onnx": _model({"a": a, "same": ir.Tensor(np.array(a.numpy())), "b": b}),
    }
    write_models(tmp_path, models)
    first, second = (_references(tmp_path / name) for name in models)
    assert first["a"] == second["a"] == second["same"], "identity and content are deduplicated"
    assert first["t"] != second["b"]
    x = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    for name, want in (
        ("model.onnx", x @ a.numpy() @ b.numpy().T),
        ("reference.onnx", x @ a.numpy() @ a.numpy() @ b.numpy()),
    ):
        session = onnxruntime.InferenceSession(str(tmp_path / name))
        # float32 sums of 64 terms, up to three times
        np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-3, atol=1e-3)


def test_same_models_same_bytes_and_hashes(tmp_path: Path) -> None:
    records = []
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        models = {"model.onnx": _model({"a": _square(0), "b": _square(1)})}
        records.append(write_models(tmp_path / run, models))
    assert records[0] == records[1]
    for name, record in records[0].items():
        contents = [(tmp_path / run / name).read_bytes() for run in ("one", "two")]
        assert contents[0] == contents[1]
        assert record == {
            "sha256": hashlib.sha256(contents[0]).hexdigest(),
            "size": len(contents[0]),
        }


def test_hash_is_right_after_a_duplicate_was_taken_back(tmp_path: Path) -> None:
    tensors: Tensors = {"a": _square(0, 200), "copy": _square(0, 200), "b": _square(1, 200)}
    record = write_models(tmp_path, {"model.onnx": _model(tensors)})["model.onnx.data"]
    content = (tmp_path / "model.onnx.data").read_bytes()
    assert record["sha256"] == hashlib.sha256(content).hexdigest()
    assert len(content) < 3 * 200 * 200 * 4


def test_large_tensors_start_on_a_page_small_ones_stay_inside(tmp_path: Path) -> None:
    write_models(tmp_path, {"small.onnx": _model({"s": _square(0, 16)})})
    assert _references(tmp_path / "small.onnx") == {}
    write_models(tmp_path, {"m.onnx": _model({"a": _square(0, 130), "b": _square(1, 130)})})
    assert all(offset % 4096 == 0 for offset, _ in _references(tmp_path / "m.onnx").values())


def test_saving_does_not_change_the_models(tmp_path: Path) -> None:
    tensor = _square(0)
    model = _model({"a": tensor})
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    write_models(tmp_path, {"model.onnx": model})
    assert model.graph.initializers["a"].const_value is tensor
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_lazy_tensors_are_cast_and_transposed_while_written(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((70, 70)).astype(np.float16)
    source = tmp_path / "weights.bin"
    source.write_bytes(b"skip" + values.tobytes())
    stored = StoredTensor(source, 4, ir.DataType.FLOAT16, (70, 70))
    lazy = DerivedTensor(stored, ir.DataType.FLOAT, (1, 0)).to_ir("w")
    write_models(tmp_path, {"model.onnx": _model({"w": lazy})})
    offset, length = _references(tmp_path / "model.onnx")["w"]
    content = (tmp_path / "model.onnx.data").read_bytes()[offset : offset + length]
    written = np.frombuffer(content, np.float32).reshape(70, 70)
    np.testing.assert_array_equal(written, values.T.astype(np.float32))


def test_subgraph_weights_go_to_the_data_file(tmp_path: Path) -> None:
    weight = np.ones((40, 40), np.float32)
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["w", "w"], ["z"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [40, 40])],
        initializer=[onnx.numpy_helper.from_array(weight, "w")],
    )
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        "g",
        [onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [40, 40])],
    )
    proto = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10
    )
    write_models(tmp_path, {"model.onnx": ir.from_proto(proto)})
    assert (tmp_path / "model.onnx.data").stat().st_size == weight.nbytes
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(session.run(None, {"c": np.array(True)})[0], 2 * weight)


def test_offsets_above_two_gigabytes(tmp_path: Path) -> None:
    """The writer continues a sparse file that is already larger than 2 GB."""
    path, start = tmp_path / "model.onnx.data", 2**31 + 4096
    with open(path, "wb") as file:
        file.truncate(start)
        file.seek(start)
        writer = DataFileWriter(file, position=start)
        tensor = _square(3, 130)
        extent = writer.add(tensor)
    assert extent.offset == start
    external = ir.ExternalTensor(
        path.name, start, extent.length, ir.DataType.FLOAT, shape=ir.Shape([130, 130]), name="a"
    )
    (tmp_path / "m.onnx").write_bytes(ir.to_proto(_model({"a": external})).SerializeToString())
    x = np.eye(130, dtype=np.float32)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    np.testing.assert_allclose(session.run(None, {"x": x})[0], tensor.numpy(), rtol=1e-6)
    path.unlink()


def test_source_that_shrank_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(b"\0" * 100)
    stored = StoredTensor(tmp_path / "short.bin", 0, ir.DataType.FLOAT, (64, 64))
    with pytest.raises(ValueError, match="expected 16384 bytes, got 100"):
        write_models(tmp_path, {"m.onnx": _model({"a": stored.to_ir("a")})})


def test_companions_are_copied_with_hashes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    source = tmp_path / "in" / "config.json"
    source.write_text(json.dumps({"a": 1}))
    record = copy_files(tmp_path / "out", [source])
    copied = (tmp_path / "out" / "config.json").read_bytes()
    assert record["config.json"]["sha256"] == hashlib.sha256(copied).hexdigest()
