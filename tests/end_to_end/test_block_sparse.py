"""``--force block_sparse`` from source to validated artifact, with compiled kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import subquad
from subquad.converter.conversion_report import ConversionReport
from subquad.converter.pipeline import convert
from subquad.kernels.host.build import missing_tools
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import MANIFEST_NAME, Manifest
from subquad.runtime.validate import validate
from tiny_onnx import save_tiny_decoder

POOLED = "block_sparse:0.4,block=8"
CAUSAL = "block_sparse:0.4,block=8,selector=causal"
LENGTH = 75

Converted = tuple[Path, ConversionReport]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_decoder(tmp_path_factory.mktemp("source") / "tiny.onnx")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("pooled") / "out"
    return folder, convert(source, folder, force=(POOLED,), kernels="cpu")


def feeds() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    mask = np.ones((3, LENGTH), np.int64)
    mask[1, :13] = 0
    mask[2, 50:] = 0
    return {"input_ids": rng.integers(0, 31, (3, LENGTH)), "attention_mask": mask}


def test_report_and_model_show_both_operators(converted: Converted) -> None:
    folder, report = converted
    (site,) = report.sites
    assert site["method"] == "block_sparse"
    assert site["params"] == {"tau": 0.4, "block": 8, "selector": "pooled", "sinks": 1}
    assert site["operator"].startswith("BlockSparseAttention:h4kv2d6v6_")
    assert len(site["prepared"]) == 1
    assert site["prepared"][0].startswith("BlockSelect:pooled_h4kv2d6_")
    assert (site["causal_granularity"], site["piece_granularity"]) == (8, 8)
    assert Manifest.read(folder).sites[0].causal_granularity == 8
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    ours = [node.op_type for node in model.graph.node if node.domain == "ai.subquad"]
    assert ours == ["BlockSelect", "BlockSparseAttention"]
    thresholds = [i for i in model.graph.initializer if i.name.endswith(".thresholds")]
    assert [tuple(i.dims) for i in thresholds] == [(4,)]


def test_kernels_and_functions_agree(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_POISON", "1")
    if missing_tools() is not None:
        pytest.skip(f"no kernels here: {missing_tools()}")
    folder, _ = converted
    artifact = subquad.load(folder, kernels="require")
    assert artifact.execution.sites[0].runs_as.startswith("kernel block_sparse.cpu (x86-64-v")
    got = artifact.run(feeds())["logits"]
    want = subquad.load(folder, kernels="off").run(feeds())["logits"]
    real = feeds()["attention_mask"] == 1
    assert not np.array_equal(got, want)
    # float32 sums of some 100 terms; a block at the threshold would show as 1e-2.
    np.testing.assert_allclose(got[real], want[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_hidden_tokens_move_nothing_at_the_declared_granularity(
    converted: Converted, kernels: Any
) -> None:
    result = validate(converted[0], lengths=(LENGTH,), rows=3, kernels=kernels)
    assert result.metamorphic is not None
    assert result.metamorphic.checks["future"] > 0
    assert not result.metamorphic.violations


def test_the_check_would_see_a_finer_claim_fail(converted: Converted, tmp_path: Path) -> None:
    """Pooling a block's own queries is not causal per token, and validation can tell."""
    folder = Path(shutil.copytree(converted[0], tmp_path / "out"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
    manifest["sites"][0]["causal_granularity"] = 1
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest), "utf-8")
    result = validate(folder, lengths=(LENGTH,), rows=3)
    assert result.metamorphic is not None
    assert {violation.relation for violation in result.metamorphic.violations} == {"future"}


def test_strict_causal_takes_only_the_causal_selector(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="causal only in blocks of 8 tokens"):
        convert(source, tmp_path / "out", force=(POOLED,), strict_causal=True)
    report = convert(source, tmp_path / "out", force=(CAUSAL,), strict_causal=True)
    assert (report.sites[0]["causal_granularity"], report.sites[0]["piece_granularity"]) == (1, 0)
    result = validate(tmp_path / "out", lengths=(LENGTH,), rows=3)
    assert result.metamorphic is not None
    assert result.metamorphic.checks["future"] > 0
    assert not result.metamorphic.violations
