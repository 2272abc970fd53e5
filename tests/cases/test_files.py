"""Sizes and versions of files behind publicly reported failures (``docs/cases.md``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

import subquad
from subquad.converter.pipeline import convert
from tiny_onnx import save_tiny_decoder, tiny_decoder

FEEDS = {
    "input_ids": np.random.default_rng(0).integers(0, 31, (2, 9)),
    "attention_mask": np.ones((2, 9), np.int64),
}


def newest_ir() -> int:
    """The newest IR version that the installed runtime reads."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }'
    )
    newest = 8
    for version in range(9, 40):
        model.ir_version = version
        try:
            onnxruntime.InferenceSession(model.SerializeToString())
        except ort_errors.Fail:
            return newest
        newest = version
    return newest


def test_an_ir_newer_than_the_runtime_reads(tmp_path: Path) -> None:
    """Written for the runtime here, whatever the source says; of operators that older ones know."""
    source = save_tiny_decoder(tmp_path / "tiny.onnx")
    want = onnxruntime.InferenceSession(str(source)).run(None, FEEDS)[0]
    model = tiny_decoder()
    model.ir_version = newest_ir() + 1
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ort_errors.Fail, match="IR version"):
        onnxruntime.InferenceSession(str(source))
    convert(source, tmp_path / "out")
    for name in ("model.onnx", "reference.onnx"):
        written = onnx.load(tmp_path / "out" / name, load_external_data=False)
        assert written.ir_version <= newest_ir()
        got = onnxruntime.InferenceSession(str(tmp_path / "out" / name)).run(None, FEEDS)[0]
        # float32 sums of some ten terms
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    # Attention of opset 23 is a function of plain operators now.
    written = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False)
    (function,) = written.functions
    nodes = [*written.graph.node, *function.node]
    assert ("", "Attention") not in {(node.domain, node.op_type) for node in nodes}


_CONVERT = """
import resource, sys
from pathlib import Path
from subquad.converter.pipeline import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_an_embedding_above_two_gigabytes(tmp_path: Path) -> None:
    """External data at every stage: one file, a relative name, hashed, and never all in memory."""
    model = tiny_decoder()
    (table,) = (t for t in model.graph.initializer if t.name == "embedding")
    known = onnx.numpy_helper.to_array(table).astype(np.float32)
    # The small table over and over, so that any token has a row.
    times = 2_500_000_000 // known.nbytes + 1
    rows, width = len(known) * times, known.shape[1]
    table.Clear()
    table.name, table.data_type = "embedding", TensorProto.FLOAT
    table.dims.extend([rows, width])
    table.data_location = TensorProto.EXTERNAL
    size = rows * width * 4
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(size))):
        entry = table.external_data.add()
        entry.key, entry.value = key, value
    with open(tmp_path / "w.bin", "wb") as file:
        for start in range(0, times, 10_000):
            file.write(known.tobytes() * min(10_000, times - start))
    source = tmp_path / "large.onnx"
    source.write_bytes(model.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(source), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = tmp_path / "out" / "model.onnx.data"
    assert data.stat().st_size >= size
    assert sorted(p.name for p in (tmp_path / "out").glob("*.data")) == ["model.onnx.data"]
    for name in ("model.onnx", "reference.onnx"):
        written = onnx.load(tmp_path / "out" / name, load_external_data=False)
        (found,) = (t for t in written.graph.initializer if list(t.dims) == [rows, width])
        places = {entry.key: entry.value for entry in found.external_data}
        assert places["location"] == "model.onnx.data"
    # Well below the weights: they are copied in pieces.
    assert int(done.stdout.split()[-1]) < 1_500_000_000
    small = onnxruntime.InferenceSession(tiny_decoder().SerializeToString()).run(None, FEEDS)[0]
    got = subquad.load(tmp_path / "out", verify=False).run(FEEDS)["logits"]
    np.testing.assert_allclose(got, small, rtol=1e-5, atol=1e-5)
