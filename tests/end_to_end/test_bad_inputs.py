"""Every bad input: the documented exit code, one clear line, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tiny_onnx import save_tiny_decoder, tiny_decoder

COMMAND = str(Path(sys.executable).with_name("subquad"))


def run_cli(
    *arguments: str | Path, limit_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    def set_limit() -> None:
        assert limit_bytes is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=set_limit if limit_bytes is not None else None,
    )


def assert_refused(
    done: subprocess.CompletedProcess[str], code: int, *words: str, written: Path | None = None
) -> None:
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, (word, done.stderr)
    if written is not None:
        assert not written.exists()
        # neither the destination nor its temporary stand-in
        assert [p.name for p in written.parent.iterdir() if written.name in p.name] == []


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_tiny_decoder(tmp_path / "tiny.onnx")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder / "artifact"


def test_missing_source(tmp_path: Path, output: Path) -> None:
    done = run_cli("convert", tmp_path / "absent.onnx", output)
    assert_refused(done, 2, "absent.onnx", written=output)


def test_truncated_onnx(source: Path, output: Path) -> None:
    source.write_bytes(source.read_bytes()[:-400])
    assert_refused(run_cli("convert", source, output), 3, "tiny.onnx", written=output)


def test_garbage_onnx(source: Path, output: Path) -> None:
    source.write_bytes(np.random.default_rng(0).bytes(5000))
    assert_refused(run_cli("convert", source, output), 3, "tiny.onnx", written=output)


@pytest.mark.parametrize("opset", [11, 99])
def test_wrong_opset(source: Path, output: Path, opset: int) -> None:
    model = tiny_decoder()
    model.opset_import[0].version = opset
    onnx.save(model, str(source))
    assert_refused(run_cli("convert", source, output), 3, str(opset), written=output)


def test_external_data_outside_the_folder(tmp_path: Path, source: Path, output: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 4096)
    inside = tmp_path / "model"
    inside.mkdir()
    model = tiny_decoder()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../secret.bin"), ("offset", "0"), ("length", "1984")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    (inside / "tiny.onnx").write_bytes(model.SerializeToString())
    done = run_cli("convert", inside / "tiny.onnx", output)
    assert_refused(done, 3, "../secret.bin", written=output)


def test_no_attention(tmp_path: Path, output: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    shape: list[str | int | None] = ["batch", 4]
    graph = helper.make_graph(
        [node],
        "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, str(tmp_path / "plain.onnx"))
    done = run_cli("convert", tmp_path / "plain.onnx", output)
    assert_refused(done, 3, "No attention", written=output)


@pytest.mark.parametrize("force", ["lightning", "window:-3", "window:many", "elu:5", "window:8@99"])
def test_bad_method(source: Path, output: Path, force: str) -> None:
    done = run_cli("convert", source, output, "--force", force)
    assert_refused(done, 2, written=output)


def test_output_below_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = run_cli("convert", source, tmp_path / "file" / "artifact")
    assert_refused(done, 8, "artifact")


def test_output_that_holds_other_files(source: Path, output: Path) -> None:
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    for flags in ([], ["--overwrite"]):
        done = run_cli("convert", source, output, *flags)
        assert_refused(done, 2, "artifact")
        assert (output / "thesis.txt").read_text() == "years of work"


def test_full_disk(source: Path, output: Path) -> None:
    # A file size limit is the one "disk full" that needs no file system of its own.
    done = run_cli("convert", source, output, limit_bytes=4096)
    assert_refused(done, 8, written=output)


def test_interrupted(source: Path, output: Path) -> None:
    process = subprocess.Popen(
        [COMMAND, "convert", str(source), str(output)],
        stderr=subprocess.PIPE,
        text=True,
    )
    # The temporary directory appears when work begins.
    deadline = time.monotonic() + 60
    while not any(output.parent.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    done = subprocess.CompletedProcess([], process.returncode, "", stderr)
    assert_refused(done, 130, "interrupted", written=output)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    output = folder / "artifact"
    done = run_cli("convert", save_tiny_decoder(folder / "tiny.onnx"), output)
    assert done.returncode == 0, done.stderr
    return output


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _drop_site_field(path: Path) -> None:
    manifest = json.loads(path.read_text())
    del manifest["sites"][0]["site"]["output"]
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.onnx.data", _flip_last_byte),
        ("model.onnx", _flip_last_byte),
        ("reference.onnx", Path.unlink),
        ("model.onnx.data", Path.unlink),
        ("manifest.json", Path.unlink),
        ("manifest.json", _drop_site_field),
    ],
)
def test_damaged_artifact(
    artifact: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in artifact.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    damage(copy / name)
    assert_refused(run_cli("validate", copy), 7, name)


def test_length_zero(artifact: Path, tmp_path: Path) -> None:
    empty = np.zeros((1, 0), np.int64)
    np.savez(tmp_path / "empty.npz", input_ids=empty, attention_mask=empty)
    done = run_cli("run", artifact, "--input", tmp_path / "empty.npz")
    assert_refused(done, 2, "0")


def test_cuda_without_a_gpu(artifact: Path) -> None:
    assert_refused(run_cli("validate", artifact, "--provider", "cuda"), 6)
