"""``.onnx`` files of every accepted opset, and files that must be refused with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from subquad.converter.emit import write_models
from subquad.converter.source import trace
from subquad.converter.traced import TracedModel
from subquad.converter.weights import is_lazy
from subquad.runtime.errors import UnsupportedModelError, UsageError

VOCABULARY, WIDTH, HEADS = 300, 48, 2


class _Encoder(torch.nn.Module):
    """Hand-written attention over a padding mask; large weights, so that errors show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.segments = torch.nn.Embedding(2, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)
        self.norm = torch.nn.LayerNorm(WIDTH)
        with torch.no_grad():
            self.qkv.weight.mul_(4)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        x = self.norm(self.embed(input_ids) + self.segments(token_type_ids))
        batch, length, _ = x.shape
        q, k, v = (
            part.reshape(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores + (1.0 - attention_mask[:, None, None, :].float()) * -1e9
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return cast(torch.Tensor, self.out(mixed))


def _inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, (length + 1) // 2 :] = 0
    return {
        "input_ids": torch.randint(0, VOCABULARY, (batch, length), generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (batch, length), generator=generator),
    }


def _export(path: Path, opset: int) -> torch.nn.Module:
    module = _Encoder().eval()
    example = _inputs(2, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(example.values()),
            str(path),
            input_names=list(example),
            output_names=["logits"],
            dynamic_axes={name: {0: "B", 1: "N"} for name in (*example, "logits")},
            opset_version=min(opset, 18),
            dynamo=False,
        )
    if opset > 18:
        converted = onnx.version_converter.convert_version(onnx.load(path), opset)
        onnx.save(converted, path)
    return module


def _run(traced: TracedModel, folder: Path, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    folder.mkdir(exist_ok=True)
    models = {"model.onnx": traced.model, "reference.onnx": traced.reference}
    write_models(folder, models)
    feeds = {name: value.numpy() for name, value in inputs.items()}
    return [onnxruntime.InferenceSession(str(folder / name)).run(None, feeds)[0] for name in models]


@pytest.mark.parametrize("opset", [13, 17, 18, 24])
def test_any_opset_gives_the_same_model_at_24(tmp_path: Path, opset: int) -> None:
    module = _export(tmp_path / "encoder.onnx", opset)
    traced = trace(tmp_path / "encoder.onnx")
    assert traced.kind == "onnx" and traced.source_name == "encoder.onnx"
    assert traced.model.opset_imports[""] == 24 and traced.model.ir_version == 10
    assert traced.reference.opset_imports[""] == opset
    for batch, length in ((1, 1), (3, 7), (1, 65)):
        inputs = _inputs(batch, length)
        with torch.no_grad():
            want = module(**inputs).numpy()
        for got in _run(traced, tmp_path / "out", inputs):
            # float32 sums of at most 65 terms of size 10
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_signature_of_an_encoder(tmp_path: Path) -> None:
    _export(tmp_path / "encoder.onnx", 17)
    traced = trace(tmp_path / "encoder.onnx")
    found = {spec.name: (spec.role, spec.high, spec.shape, spec.dtype) for spec in traced.inputs}
    assert found == {
        "input_ids": ("token_ids", VOCABULARY, ("batch", "length"), "int64"),
        "attention_mask": ("padding_mask", None, ("batch", "length"), "int64"),
        "token_type_ids": ("ids", 2, ("batch", "length"), "int64"),
    }
    (logits,) = traced.outputs
    assert logits.is_logits and logits.shape == ("batch", "length", VOCABULARY)


def test_weights_are_stored_once_for_model_and_reference(tmp_path: Path) -> None:
    _export(tmp_path / "encoder.onnx", 13)
    traced = trace(tmp_path / "encoder.onnx")
    models = {"model.onnx": traced.model, "reference.onnx": traced.reference}
    files = write_models(tmp_path, models)
    weights = sum(p.numel() * 4 for p in _Encoder().parameters())
    assert files["model.onnx.data"]["size"] < 1.2 * weights


def test_hash_covers_graph_and_external_data(tmp_path: Path) -> None:
    path = _external(tmp_path)
    first = trace(path).source_hash
    assert trace(path).source_hash == first
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[-1] ^= 1
    (tmp_path / "w.bin").write_bytes(data)
    assert trace(path).source_hash != first


def test_external_weights_stay_on_disk(tmp_path: Path) -> None:
    traced = trace(_external(tmp_path))
    assert is_lazy(traced.model.graph.initializers["w"].const_value)
    x = torch.ones(2, 8)
    got, reference = _run(traced, tmp_path / "out", {"x": x})
    np.testing.assert_allclose(got, reference)
    np.testing.assert_allclose(got, x.numpy() @ _weight())


def test_hard_linked_weights_are_accepted(tmp_path: Path) -> None:
    """Package managers hard-link files; onnx_ir alone would refuse them."""
    path = _external(tmp_path)
    (tmp_path / "again.bin").hardlink_to(tmp_path / "w.bin")
    got, _ = _run(trace(path), tmp_path / "out", {"x": torch.ones(2, 8)})
    assert got.shape == (2, 8)


def test_companions_lie_next_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "vocab.pkl").write_bytes(b"\x80")
    traced = trace(_external(tmp_path))
    assert [path.name for path in traced.companions] == ["tokenizer.json"]


def test_made_up_dimension_names_are_unified(tmp_path: Path) -> None:
    """Exporters give each input its own symbol; batch and length are one each."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        "g",
        [_info("a", TensorProto.INT64, ["s72", "s53"]), _info("b", TensorProto.INT64, ["s43", ""])],
        [_info("y", TensorProto.INT64, ["s72", "s53"])],
    )
    traced = trace(_save(tmp_path, graph))
    assert [spec.shape for spec in traced.inputs] == [("batch", "length")] * 2
    assert traced.outputs[0].shape == ("batch", "length")


def test_named_dimensions_that_differ_stay_different(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["y"])],
        "g",
        [
            _info("a", TensorProto.FLOAT, ["rows", "k"]),
            _info("b", TensorProto.FLOAT, ["k", "cols"]),
        ],
        [_info("y", TensorProto.FLOAT, ["rows", "cols"])],
    )
    traced = trace(_save(tmp_path, graph))
    assert traced.inputs[0].shape == ("batch", "length")
    assert traced.inputs[1].shape == ("length", "cols")
    assert traced.outputs[0].shape == ("batch", "cols")


def test_operators_onnxruntime_knows_are_accepted(tmp_path: Path) -> None:
    graph = _one_node(helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft"))
    traced = trace(_save(tmp_path, graph, domains={"": 17, "com.microsoft": 1}))
    assert "com.microsoft" in traced.model.opset_imports


def test_large_generated_constants_are_not_evaluated(tmp_path: Path) -> None:
    """2^40 elements: folding it would take a terabyte."""
    shape = numpy_helper.from_array(np.array([2**20, 2**20], np.int64), "shape")
    graph = helper.make_graph(
        [
            helper.make_node("ConstantOfShape", ["shape"], ["huge"]),
            helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
            helper.make_node("Add", ["x", "sum"], ["y"]),
        ],
        "g",
        [_info("x", TensorProto.FLOAT, ["b", 8])],
        [_info("y", TensorProto.FLOAT, ["b", 8])],
        initializer=[shape],
    )
    traced = trace(_save(tmp_path, graph))
    assert "ConstantOfShape" in {node.op_type for node in traced.model.graph}


# ---- hostile and broken files


def _weight() -> np.ndarray:
    return np.arange(64, dtype=np.float32).reshape(8, 8)


def _info(name: str, dtype: int, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _one_node(*nodes: onnx.NodeProto, weights: tuple[TensorProto, ...] = ()) -> onnx.GraphProto:
    return helper.make_graph(
        list(nodes),
        "g",
        [_info("x", TensorProto.FLOAT, ["b", 8])],
        [_info("y", TensorProto.FLOAT, ["b", 8])],
        initializer=list(weights),
    )


def _save(
    folder: Path,
    graph: onnx.GraphProto,
    domains: dict[str, int] | None = None,
    functions: tuple[onnx.FunctionProto, ...] = (),
) -> Path:
    imports = [helper.make_opsetid(*item) for item in (domains or {"": 17}).items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8, functions=list(functions))
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _external(
    folder: Path, location: str = "w.bin", offset: str = "0", length: str = "256", size: int = 256
) -> Path:
    content = _weight().tobytes()
    (folder / "w.bin").write_bytes(content[:size])
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8, 8])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=value)
    return _save(
        folder, _one_node(helper.make_node("MatMul", ["x", "w"], ["y"]), weights=(tensor,))
    )


def _tensor(**fields: object) -> TensorProto:
    return TensorProto(**{"name": "w", "data_type": TensorProto.FLOAT, **fields})  # type: ignore[arg-type]


def _with_weight(folder: Path, tensor: TensorProto) -> Path:
    return _save(
        folder, _one_node(helper.make_node("MatMul", ["x", "w"], ["y"]), weights=(tensor,))
    )


def _nested(folder: Path, depth: int) -> Path:
    """``If`` in ``If``; written as bytes because protobuf itself refuses to build deep ones."""

    def field(number: int, content: bytes) -> bytes:
        length, size = len(content), b""
        while length > 127:
            size += bytes([length & 127 | 128])
            length >>= 7
        return bytes([number << 3 | 2]) + size + bytes([length]) + content

    def output(name: str) -> bytes:
        return field(12, _info(name, TensorProto.FLOAT, ["b"]).SerializeToString())

    def leaf(name: str) -> bytes:
        node = helper.make_node("Identity", ["x"], [name]).SerializeToString()
        return field(1, node) + field(2, b"g") + output(name)

    graph, inner = leaf("z"), "z"
    for level in range(depth):
        branches = b"".join(
            field(5, field(1, name) + field(6, content) + b"\xa0\x01\x05")
            for name, content in ((b"then_branch", graph), (b"else_branch", leaf(f"e{level}")))
        )
        inner = f"z{level}"
        node = field(1, b"c") + field(2, inner.encode()) + field(4, b"If") + branches
        graph = field(1, node) + field(2, b"g") + output(inner)
    for value in (_info("x", TensorProto.FLOAT, ["b"]), _info("c", TensorProto.BOOL, [])):
        graph += field(11, value.SerializeToString())
    path = folder / "model.onnx"
    opset = helper.make_opsetid("", 17).SerializeToString()
    path.write_bytes(b"\x08\x08" + field(7, graph) + field(8, opset))
    return path


def _symlink_out(folder: Path) -> Path:
    path = _external(folder)
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (folder / "w.bin").rename(outside / "w.bin")
    (folder / "w.bin").symlink_to(outside / "w.bin")
    return path


def _recursive_function(folder: Path) -> Path:
    function = helper.make_function(
        "local",
        "f",
        ["a"],
        ["b"],
        [helper.make_node("f", ["a"], ["b"], domain="local")],
        [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)],
    )
    graph = _one_node(helper.make_node("f", ["x"], ["y"], domain="local"))
    return _save(folder, graph, {"": 17, "local": 1}, (function,))


def _relu(folder: Path, **domains: int) -> Path:
    versions = {"" if key == "default" else key: value for key, value in domains.items()}
    return _save(folder, _one_node(helper.make_node("Relu", ["x"], ["y"])), versions)


def _bytes(content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(content)
        return folder / "model.onnx"

    return write


def _truncated(folder: Path) -> Path:
    path = _with_weight(folder, numpy_helper.from_array(_weight(), "w"))
    path.write_bytes(path.read_bytes()[:200])
    return path


def _graph(*nodes: onnx.NodeProto) -> Callable[[Path], Path]:
    return lambda folder: _save(folder, _one_node(*nodes))


node = helper.make_node
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty file": (_bytes(b""), "holds no ONNX graph"),
    "html": (_bytes(b"<!doctype html><html>not found</html>"), "no readable ONNX model"),
    "noise": (_bytes(np.random.default_rng(0).bytes(4096)), "no readable ONNX model"),
    "truncated": (_truncated, "no readable ONNX model"),
    "opset too old": (lambda f: _relu(f, default=12), "opset 12; supported are 13 to 28"),
    "opset too new": (lambda f: _relu(f, default=29), "opset 29; supported are 13 to 28"),
    "no opset": (lambda f: _relu(f, other=1), "does not say which opset"),
    "absolute path": (lambda f: _external(f, "/etc/passwd"), "absolute path"),
    "drive": (lambda f: _external(f, "C:\\w.bin"), "absolute path"),
    "path out of the folder": (lambda f: _external(f, "../w.bin"), "leaves the model's folder"),
    "backslashes": (lambda f: _external(f, "a\\..\\..\\w.bin"), "leaves the model's folder"),
    "symbolic link": (_symlink_out, "symbolic link out of"),
    "missing data": (lambda f: _external(f, "other.bin"), "missing from"),
    "short data": (lambda f: _external(f, size=100), "which has 100"),
    "offset past the end": (lambda f: _external(f, offset="1000"), "which has 256"),
    "negative offset": (lambda f: _external(f, offset="-8"), "needs 256 bytes"),
    "offset no number": (lambda f: _external(f, offset="many"), "no number"),
    "length lies": (lambda f: _external(f, length="16"), "needs 256 bytes"),
    "no location": (lambda f: _external(f, location=""), "names no file"),
    "negative size": (
        lambda f: _with_weight(f, _tensor(dims=[-8, 8], raw_data=b"")),
        "negative dimension",
    ),
    "huge size": (
        lambda f: _with_weight(f, _tensor(dims=[2**40, 2**40], raw_data=b"abcd")),
        "4 are stored",
    ),
    "huge size, typed": (
        lambda f: _with_weight(f, _tensor(dims=[2**62, 4], float_data=[1.0])),
        "1 are stored",
    ),
    "unknown dtype": (
        lambda f: _with_weight(f, _tensor(dims=[8, 8], data_type=99, raw_data=b"")),
        "unknown dtype 99",
    ),
    "cycle": (
        _graph(
            node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["y"])
        ),
        "has a cycle",
    ),
    "value made twice": (
        _graph(node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])),
        "'y' is defined twice",
    ),
    "undefined value": (_graph(node("Add", ["x", "ghost"], ["y"])), "reads 'ghost'"),
    "output from nowhere": (_graph(node("Relu", ["x"], ["z"])), "nothing produces output 'y'"),
    "unknown operator": (_graph(node("Frobnicate", ["x"], ["y"])), "does not exist in opset 17"),
    "too many inputs": (_graph(node("Relu", ["x", "x"], ["y"])), "has 2 inputs"),
    "unknown attribute": (_graph(node("Relu", ["x"], ["y"], slope=1)), "attribute 'slope'"),
    "attribute of another type": (
        _graph(node("Softmax", ["x"], ["y"], axis="last")),
        "attribute 'axis' is not of type INT",
    ),
    "missing attribute": (_graph(node("Cast", ["x"], ["y"])), "lacks the attribute 'to'"),
    "custom operator": (
        lambda f: _save(
            f, _one_node(node("Nope", ["x"], ["y"], domain="evil")), {"": 17, "evil": 1}
        ),
        "operators of evil, and ONNX Runtime cannot run it",
    ),
    "custom operator, not imported": (
        lambda f: _save(f, _one_node(node("Nope", ["x"], ["y"], domain="evil"))),
        "without importing",
    ),
    "nested 20 deep": (lambda f: _nested(f, 20), "nests subgraphs"),
    "nested 300 deep": (lambda f: _nested(f, 300), "nested too deeply"),
    "recursive function": (_recursive_function, "[Cc]ycl"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_refused_with_a_reason(tmp_path: Path, case: str) -> None:
    build, reason = HOSTILE[case]
    with pytest.raises(UnsupportedModelError, match=reason):
        trace(build(tmp_path))


def test_duplicate_weight(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(_weight(), "w")
    graph = _one_node(helper.make_node("MatMul", ["x", "w"], ["y"]), weights=(weight, weight))
    with pytest.raises(UnsupportedModelError, match="'w' is defined twice"):
        trace(_save(tmp_path, graph))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        trace(tmp_path / "absent.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(UsageError, match="config.json"):
        trace(tmp_path / "folder.onnx")
    with pytest.raises(UsageError, match="does not exist"):
        trace(tmp_path / "absent")


def test_strings_are_refused(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [_info("x", TensorProto.STRING, ["b"])],
        [_info("y", TensorProto.STRING, ["b"])],
    )
    with pytest.raises(UnsupportedModelError, match="strings"):
        trace(_save(tmp_path, graph))


def test_overridable_defaults_become_constants(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(_weight(), "w")
    graph = _one_node(helper.make_node("MatMul", ["x", "w"], ["y"]), weights=(weight,))
    graph.input.append(_info("w", TensorProto.FLOAT, [8, 8]))
    traced = trace(_save(tmp_path, graph))
    assert [spec.name for spec in traced.inputs] == ["x"]
    assert [value.name for value in traced.model.graph.inputs] == ["x"]


def test_source_graph_is_not_changed_by_the_conversion(tmp_path: Path) -> None:
    _export(tmp_path / "encoder.onnx", 13)
    reference = trace(tmp_path / "encoder.onnx").reference
    source = ir.load(tmp_path / "encoder.onnx")
    kinds = [n.op_type for n in source.graph if n.op_type != "Constant"]
    assert sorted(n.op_type for n in reference.graph if n.op_type != "Constant") == sorted(kinds)
