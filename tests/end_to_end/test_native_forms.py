"""Attention that was never a softmax, from source to validated artifact, with compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

import subquad
import tiny_onnx
from subquad.cli import cli
from subquad.converter.conversion_report import ConversionReport
from subquad.converter.pipeline import convert, inspect_source
from subquad.kernels.host.build import missing_tools
from subquad.runtime.errors import ReplacementError
from subquad.runtime.manifest import Manifest
from subquad.runtime.validate import validate

LENGTH = 75
OFFSET = -1.25

SIGMOID = f"""
  heads = Constant<value_ints=[0, 0, 1, 1]>()
  kr = Gather<axis=1>(k, heads)
  vr = Gather<axis=1>(v, heads)
  kt = Transpose<perm=[0, 1, 3, 2]>(kr)
  s0 = MatMul(q, kt)
  scale = Constant<value_float=0.7>()
  s1 = Mul(s0, scale)
  offset = Constant<value_float={OFFSET}>()
  s2 = Add(s1, offset)
  w = Sigmoid(s2)
  seen = Cast<to=1>(mask)
  ws = Mul(w, seen)
  a = MatMul(ws, vr)
"""

Converted = tuple[Path, ConversionReport]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder with sigmoids in the place of its softmax."""
    path = tmp_path_factory.mktemp("source") / "sigmoid.onnx"
    with pytest.MonkeyPatch.context() as patch:
        softmax = "  a = Attention<scale=0.7>(q, k, v, mask)\n"
        assert softmax in tiny_onnx._TEXT
        patch.setattr(tiny_onnx, "_TEXT", tiny_onnx._TEXT.replace(softmax, SIGMOID))
        return tiny_onnx.save_tiny_decoder(path)


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("sigmoid") / "out"
    return folder, convert(source, folder, kernels="cpu")


def feeds() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    mask = np.ones((3, LENGTH), np.int64)
    mask[1, :13] = 0
    mask[2] = rng.random(LENGTH) < 0.6
    return {"input_ids": rng.integers(0, 31, (3, LENGTH)), "attention_mask": mask}


def oracle(given: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """The whole model in float64."""
    weights = {
        i.name: onnx.numpy_helper.to_array(i).astype(np.float64)
        for i in tiny_onnx.tiny_decoder().graph.initializer
    }
    x = weights["embedding"][given["input_ids"]]

    def heads(name: str, count: int) -> NDArray[np.float64]:
        split = (x @ weights[name]).reshape(*x.shape[:2], count, 6).swapaxes(1, 2)
        return np.asarray(np.repeat(split, 4 // count, axis=1))

    q, k, v = heads("wq", 4), heads("wk", 2), heads("wv", 2)
    seen = np.tril(np.ones((LENGTH, LENGTH), bool)) & (given["attention_mask"] > 0)[:, None, None]
    scores = 0.7 * q @ k.swapaxes(-1, -2) + OFFSET
    merged = (np.where(seen, 1 / (1 + np.exp(-scores)), 0) @ v).swapaxes(1, 2)
    y = x + merged.reshape(*x.shape[:2], 24) @ weights["wo"]
    return np.asarray(y @ weights["head"])


def test_inspect_shows_the_site(source: Path) -> None:
    report = inspect_source(source)
    (site,) = report.sites
    assert site["site"]["mask_text"] == f"causal, key padding, sigmoid, offset {OFFSET}"
    assert not report.rejections


def test_artifact_computes_the_model(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, report = converted
    assert "_sigmoid_offsetm1p25_linfr0_mask" in report.sites[0]["operator"]
    want = oracle(feeds())
    modes: list[Any] = ["off"]
    if missing_tools() is None:
        monkeypatch.setenv("SUBQUAD_POISON", "1")
        modes.append("require")
    for mode in modes:
        artifact = subquad.load(folder, kernels=mode)
        if mode == "require":
            assert artifact.execution.sites[0].runs_as.startswith("kernel attention.cpu")
        got = artifact.run(feeds())["logits"]
        # float32 sums of <= 75 terms
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_hidden_tokens_move_nothing(converted: Converted, kernels: Any) -> None:
    result = validate(converted[0], lengths=(1, 33, LENGTH), rows=3, kernels=kernels)
    assert result.metamorphic is not None and result.metamorphic.checks["future"] > 0
    assert not result.metamorphic.violations
    assert Manifest.read(converted[0]).sites[0].site["score_function"] == "sigmoid"


@pytest.mark.parametrize("method", ["window:8", "elu", "lolcats", "block_sparse:0.4,block=8"])
def test_methods_for_softmax_decline(source: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(ReplacementError, match="sigmoids of scores, without a common denominator"):
        convert(source, tmp_path / "out", force=(method,))


def assert_required(source: Path) -> None:
    """One site, which ``--require-sites`` counts like any other."""
    for needed in ("1", "all"):
        arguments = ["inspect", str(source), "--require-sites", needed]
        assert CliRunner().invoke(cli, arguments).exit_code == 0, needed
    result = CliRunner().invoke(cli, ["inspect", str(source), "--require-sites", "2"])
    assert result.exit_code == ReplacementError.exit_code, result.output


def test_sigmoid_sites_are_counted(source: Path) -> None:
    assert_required(source)


LINEAR = """
  heads = Constant<value_ints=[0, 0, 1, 1]>()
  kr = Gather<axis=1>(k, heads)
  vr = Gather<axis=1>(v, heads)
  unit = Constant<value_float=1.0>()
  qe = Elu(q)
  qf = Add(qe, unit)
  ke = Elu(kr)
  kf = Add(ke, unit)
  kt = Transpose<perm=[0, 1, 3, 2]>(kf)
  s0 = MatMul(qf, kt)
  seen = Cast<to=1>(mask)
  ws = Mul(s0, seen)
  keys = Constant<value_ints=[-1]>()
  total = ReduceSum<keepdims=1>(ws, keys)
  epsilon = Constant<value_float=1e-6>()
  divisor = Add(total, epsilon)
  shares = Div(ws, divisor)
  a = MatMul(shares, vr)
"""


def test_linear_attention_is_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = "  a = Attention<scale=0.7>(q, k, v, mask)\n"
    monkeypatch.setattr(tiny_onnx, "_TEXT", tiny_onnx._TEXT.replace(softmax, LINEAR))
    source = tiny_onnx.save_tiny_decoder(tmp_path / "linear.onnx")
    (site,) = inspect_source(source).sites
    assert site["site"]["mask_text"] == "causal, key padding, linear (elu), epsilon 1e-06"
    assert_required(source)
    report = convert(source, tmp_path / "out", kernels="none")
    assert report.sites[0]["operator"].startswith("HybridAttention:h4kv2d6v6_")
    result = validate(tmp_path / "out", lengths=(1, LENGTH), rows=3)
    assert result.metamorphic is not None and result.metamorphic.checks["future"] > 0
    assert not result.metamorphic.violations
    assert all(each.relative_l2 is not None and each.relative_l2 < 1e-5 for each in result.sites)
    with pytest.raises(ReplacementError, match="it is linear in the length already"):
        convert(source, tmp_path / "forced", force=("elu",))
