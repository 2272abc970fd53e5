from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

import subquad
from subquad.runtime import artifact as artifact_module
from subquad.runtime.artifact import check_inputs
from subquad.runtime.errors import (
    IntegrityError,
    SubquadError,
    TargetUnavailableError,
    UsageError,
)
from subquad.runtime.manifest import InputSpec, Manifest, file_record
from tiny_artifact import MAX_LENGTH, VOCABULARY, Tiny, edit_manifest, feeds

FILES = ("model.onnx", "model.onnx.data", "reference.onnx", "config.json", "tokenizer.json")


def edit(arrays: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**arrays, **changed}


def test_run_equals_plain_onnxruntime(decoder: Path) -> None:
    loaded = subquad.load(decoder, threads=1)
    arrays = feeds()
    session = onnxruntime.InferenceSession(decoder / "model.onnx")
    (want,) = session.run(None, arrays)
    got = loaded.run(arrays)
    assert list(got) == ["logits"]
    assert np.array_equal(got["logits"], want)


def test_outputs_can_be_chosen(encoder: Path) -> None:
    loaded = subquad.load(encoder, threads=1)
    assert list(loaded.run(feeds(), ["pooled"])) == ["pooled"]
    with pytest.raises(UsageError, match="No output 'logits'"):
        loaded.run(feeds(), ["logits"])


def test_execution_tells_what_really_runs(decoder: Path) -> None:
    execution = subquad.load(decoder, threads=1).execution
    assert execution.provider == "CPUExecutionProvider"
    assert execution.session_providers == ("CPUExecutionProvider",)
    assert execution.threads == 1
    assert [site.runs_as for site in execution.sites] == ["function body"] * 3
    assert execution.sites[0].operator == "Attention:layer0"


def test_a_kernel_of_the_manifest_is_not_believed(copied: Path) -> None:
    manifest = Manifest.read(copied)
    sites = (dataclasses.replace(manifest.sites[0], kernel="tile_cpu"), *manifest.sites[1:])
    dataclasses.replace(manifest, sites=sites).dump(copied / "manifest.json")
    site = subquad.load(copied).execution.sites[0]
    assert site.runs_as == "function body"
    assert site.reason == "the artifact has no kernel library"


def test_several_artifacts_in_one_process(decoder: Path, encoder: Path) -> None:
    first, second = subquad.load(decoder, threads=1), subquad.load(encoder, threads=2)
    before = first.run(feeds())["logits"]
    second.run(feeds())
    assert np.array_equal(first.run(feeds())["logits"], before)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found(copied: Path, name: str) -> None:
    path = copied / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=f"{name}: content differs"):
        subquad.load(copied)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found_even_without_hashing(copied: Path, name: str) -> None:
    path = copied / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=f"{name}: .* bytes, but the manifest says"):
        subquad.load(copied, verify=False)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(copied: Path, name: str) -> None:
    (copied / name).unlink()
    with pytest.raises(IntegrityError, match=f"{name} is missing"):
        subquad.load(copied)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "a/../model.onnx", "./model.onnx", "", "c:\\x", "a//b"]
)
def test_paths_that_lead_elsewhere_are_refused(copied: Path, name: str) -> None:
    (copied.parent / "outside").write_text("x")
    files = json.loads((copied / "manifest.json").read_text())["files"]
    edit_manifest(copied, files={**files, name: {"size": 1, "sha256": "0" * 64}})
    with pytest.raises(IntegrityError, match="no plain relative path"):
        subquad.load(copied)


def test_a_link_out_of_the_artifact_is_refused(copied: Path) -> None:
    path = copied / "config.json"
    outside = copied.parent / "outside.json"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(IntegrityError, match="leads out of the artifact"):
        subquad.load(copied)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_refused_and_not_read(copied: Path) -> None:
    (copied / "config.json").unlink()
    os.mkfifo(copied / "config.json")
    with pytest.raises(IntegrityError, match="not a regular file"):
        subquad.load(copied)


def test_weights_from_an_unlisted_file_are_refused(copied: Path) -> None:
    files = json.loads((copied / "manifest.json").read_text())["files"]
    del files["model.onnx.data"]
    edit_manifest(copied, files=files)
    with pytest.raises(IntegrityError, match="'model.onnx.data', which the manifest does not"):
        subquad.load(copied)


def test_a_manifest_without_model_is_refused(copied: Path) -> None:
    edit_manifest(copied, files={})
    with pytest.raises(IntegrityError, match="lists no model.onnx"):
        subquad.load(copied)


def test_a_file_that_is_no_onnx_is_refused(copied: Path) -> None:
    path = copied / "model.onnx"
    path.write_bytes(b"\x07 no protobuf")
    files = json.loads((copied / "manifest.json").read_text())["files"]
    edit_manifest(copied, files={**files, "model.onnx": file_record(path)})
    with pytest.raises(IntegrityError, match="not an ONNX file"):
        subquad.load(copied)


def test_a_model_that_onnxruntime_refuses(copied: Path) -> None:
    path = copied / "model.onnx"
    # a protobuf message without a graph
    path.write_bytes(b"\x08\x0a")
    files = json.loads((copied / "manifest.json").read_text())["files"]
    edit_manifest(copied, files={**files, "model.onnx": file_record(path)})
    with pytest.raises(SubquadError, match="cannot load model.onnx"):
        subquad.load(copied)


def test_a_signature_that_differs_from_the_model_is_refused(copied: Path) -> None:
    manifest = Manifest.read(copied)
    dataclasses.replace(manifest, inputs=manifest.inputs[:1]).dump(copied / "manifest.json")
    with pytest.raises(IntegrityError, match="has the inputs attention_mask, input_ids"):
        subquad.load(copied)


@pytest.mark.parametrize(
    ("put", "field", "value"),
    [
        ("inputs", "dtype", "int32"),
        ("inputs", "dtype", "junk"),
        ("inputs", "shape", ("batch",)),
        ("inputs", "shape", (-1, "length")),
        ("outputs", "dtype", "float64"),
    ],
)
def test_types_and_sizes_that_differ_from_the_model_are_refused(
    copied: Path, put: str, field: str, value: Any
) -> None:
    manifest = Manifest.read(copied)
    first, *others = getattr(manifest, put)
    changed: dict[str, Any] = {put: (dataclasses.replace(first, **{field: value}), *others)}
    dataclasses.replace(manifest, **changed).dump(copied / "manifest.json")
    with pytest.raises(IntegrityError, match=f"{first.name}.*but the manifest lists"):
        subquad.load(copied)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such artifact"):
        subquad.load(tmp_path / "nothing")


@pytest.mark.parametrize("provider", ["cuda", "CUDAExecutionProvider"])
def test_a_provider_that_is_not_there(decoder: Path, provider: str) -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(TargetUnavailableError, match="CUDAExecutionProvider is not part"):
        subquad.load(decoder, provider=provider)


def test_a_provider_that_is_listed_but_does_not_start(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The GPU wheel on a machine without GPU: listed, and the session quietly comes without it.
    real = onnxruntime.InferenceSession

    def without_cuda(model: Any, options: Any, *, providers: Any, **rest: Any) -> Any:
        return real(model, options, providers=["CPUExecutionProvider"], **rest)

    have = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: have)
    monkeypatch.setattr(onnxruntime, "InferenceSession", without_cuda)
    with pytest.raises(TargetUnavailableError, match="did not start"):
        subquad.load(decoder, provider="cuda")


@pytest.mark.parametrize("arguments", [{"provider": "fast"}, {"threads": 0}])
def test_bad_arguments(decoder: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        subquad.load(decoder, **arguments)


def test_runtimes_that_confuse_overloads_are_refused(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        __version__ = "1.26.0"

    monkeypatch.setattr(artifact_module, "onnxruntime", lambda: Old)
    with pytest.raises(TargetUnavailableError, match="several variants of ai.subquad::Attention"):
        artifact_module.check_overloads(decoder)


def test_one_variant_may_run_on_an_old_runtime(
    make: Callable[[Tiny], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old:
        __version__ = "1.24.1"

    folder = make(Tiny(layers=1))
    monkeypatch.setattr(artifact_module, "onnxruntime", lambda: Old)
    artifact_module.check_overloads(folder)


IDS: NDArray[np.int64] = feeds()["input_ids"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": IDS.astype(np.int32)}, "got dtype int32. Convert with .astype"),
        ({"input_ids": IDS[0]}, "got 1 dimensions"),
        ({"input_ids": IDS.tolist()}, "got list"),
        ({"input_ids": IDS[:, :0]}, r"axis 1 \(length\) is empty"),
        ({"input_ids": IDS[:0]}, r"axis 0 \(batch\) is empty"),
        ({"input_ids": IDS + VOCABULARY}, "must hold indices of 0 to 31"),
        ({"input_ids": IDS - VOCABULARY}, "must hold indices of 0 to 31, got -"),
        ({"attention_mask": np.ones((2, 8), np.int64)}, "length is 9 in input 'input_ids'"),
        ({"attention_mask": np.ones((1, 9), np.int64)}, "batch is 2 in input 'input_ids'"),
        ({"attention_mask": np.full((2, 9), 2)}, "0 .padding. and 1 .real token. only"),
        ({"extra": IDS}, "unknown: extra"),
    ],
)
def test_wrong_inputs(decoder: Path, changed: dict[str, Any], message: str) -> None:
    specs = Manifest.read(decoder).inputs
    with pytest.raises(UsageError, match=message):
        check_inputs(specs, edit(feeds(), **changed))


def test_a_missing_input_is_named(decoder: Path) -> None:
    arrays = feeds()
    del arrays["attention_mask"]
    with pytest.raises(UsageError, match="missing: attention_mask"):
        subquad.load(decoder).run(arrays)


def test_fixed_dimensions_are_checked() -> None:
    spec = InputSpec("pixels", "float32", ("batch", 3, 8), "values")
    with pytest.raises(UsageError, match="axis 1 must be 3"):
        check_inputs([spec], {"pixels": np.zeros((1, 4, 8), np.float32)})


def test_a_view_is_made_contiguous(decoder: Path) -> None:
    arrays = {name: array.repeat(2, axis=1)[:, ::2] for name, array in feeds().items()}
    loaded = subquad.load(decoder)
    assert np.array_equal(loaded.run(arrays)["logits"], loaded.run(feeds())["logits"])


def test_a_failure_inside_onnxruntime_has_its_reason(decoder: Path) -> None:
    # positions beyond the table of position embeddings
    with pytest.raises(SubquadError, match="ONNX Runtime failed: Non-zero status .* 600 by 601"):
        subquad.load(decoder).run(feeds(1, MAX_LENGTH + 1))
