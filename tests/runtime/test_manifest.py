from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from subquad.runtime.errors import IntegrityError
from subquad.runtime.manifest import Manifest, file_record


def broken(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``raw`` with the field at ``a/0/b`` set to ``value``, or removed if that is ``...``."""
    result = copy.deepcopy(raw)
    *parents, last = path.split("/")
    target: Any = result
    for key in parents:
        target = target[int(key)] if isinstance(target, list) else target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return result


def test_round_trip(decoder: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(decoder)
    manifest.dump(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path) == manifest
    assert (tmp_path / "manifest.json").read_bytes() == (decoder / "manifest.json").read_bytes()


def test_file_record_is_size_and_sha256(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"subquad" * 100_000)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert file_record(path) == {"size": 700_000, "sha256": digest}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"{} {}", b"9" * 5000],
    ids=["empty", "cut", "not utf-8", "deep", "two", "long number"],
)
def test_not_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(IntegrityError, match="not valid JSON"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("content", ["[]", "null", "3", "{}", '{"schema_version": true}'])
def test_not_a_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(IntegrityError, match="schema_version"):
        Manifest.read(tmp_path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is not a subquad artifact"):
        Manifest.read(tmp_path)


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(IntegrityError, match="cannot be read"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version 2"),
        ("schema_version", "1", "schema_version '1'"),
        ("source", ..., "'source' is missing"),
        ("files", [], "files must be dict"),
        ("files/model.onnx", "x", "must be dict, got str"),
        ("files/model.onnx/size", "1", "size must be int"),
        ("files/model.onnx/size", True, "size must be int"),
        ("files/model.onnx/size", -1, "size >= 0"),
        ("files/model.onnx/sha256", ..., "'sha256' is missing"),
        ("files/model.onnx/sha256", "A" * 64, "lower-case hex"),
        ("files/model.onnx/sha256", "0" * 63, "lower-case hex"),
        ("inputs", {}, "inputs must be list"),
        ("inputs/0/shape", "bl", "shape must be list"),
        ("inputs/0/shape", [1.5], "shape holds 1.5"),
        ("inputs/0/role", "tokens", "role is 'tokens'"),
        ("inputs/0/high", "32", "high must be int"),
        ("inputs/0/high", -3, "high is -3"),
        ("inputs/0/high", 2**64, "high is 18446744073709551616"),
        ("max_length", 0, "max_length is 0"),
        ("rejections", [{"where": "a"}], "'reason' is missing"),
        ("sites/0/site/num_heads", "4", "num_heads must be int"),
        ("inputs/0/extra", 1, "unexpected keyword"),
        ("outputs/0/is_logits", 1, "is_logits must be bool"),
        ("outputs/0/name", ..., "'name' is missing"),
        ("sites", None, "sites must be list"),
        ("sites/0/site/index", ..., "'index' is missing"),
        ("sites/0/site/mask", None, "mask must be dict"),
        ("sites/0/site/mask/window_right", None, "window_right must be int"),
        ("sites/0/method", None, "method must be str"),
        ("sites/0/params", [], "params must be dict"),
        ("rejections", ["x"], "must be dict"),
        ("seed", None, "seed must be int"),
        ("max_length", "long", "max_length must be int"),
    ],
)
def test_broken_fields_are_named(
    decoder: Path, tmp_path: Path, path: str, value: Any, message: str
) -> None:
    raw = json.loads((decoder / "manifest.json").read_text("utf-8"))
    (tmp_path / "manifest.json").write_text(json.dumps(broken(raw, path, value)))
    with pytest.raises(IntegrityError, match=message):
        Manifest.read(tmp_path)


def test_fields_that_came_later_may_be_absent(decoder: Path, tmp_path: Path) -> None:
    raw = json.loads((decoder / "manifest.json").read_text("utf-8"))
    del raw["max_length"]
    (tmp_path / "manifest.json").write_text(json.dumps(raw))
    assert Manifest.read(tmp_path).max_length is None
