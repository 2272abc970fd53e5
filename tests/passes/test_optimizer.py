"""Models that ONNX Runtime's transformer optimizer has been over: its attentions are raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnx_graphs import Runner
from subquad.converter.onnx_source import trace_onnx
from subquad.passes.canonicalise import canonicalise
from subquad.passes.raise_attention import raise_attention
from zoo.exports import export

pytestmark = pytest.mark.slow


def optimised(family: str, kind: str, folder: Path, *, raw_mask: bool = False) -> Path:
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    options = FusionOptions(kind)
    options.use_raw_attention_mask(raw_mask)
    source = export(family, "torchscript17-eager").path
    model = optimizer.optimize_model(
        str(source),
        model_type=kind,
        num_heads=4,
        hidden_size=60,
        optimization_options=options,
        opt_level=0,
    )
    path = folder / "optimised.onnx"
    model.save_model_to_file(str(path))
    return path


@pytest.mark.parametrize(
    ("family", "kind", "raw_mask", "meaning"),
    [
        ("bert", "bert", True, "full, key padding"),
        # The optimizer hands over the number of real tokens: with holes that is no padding mask.
        ("bert", "bert", False, "full, mask computed from attention_mask, input_ids"),
        ("gpt2", "gpt2", False, "causal, key padding"),
    ],
)
def test_optimised(family: str, kind: str, raw_mask: bool, meaning: str, tmp_path: Path) -> None:
    path = optimised(family, kind, tmp_path, raw_mask=raw_mask)
    traced = trace_onnx(path)
    model = traced.model
    canonicalise(model)
    result = raise_attention(model)
    assert not result.rejections
    assert [site.describe() for site in result.sites] == [meaning] * 2
    source, ours = Runner(traced.reference), Runner(model)
    for given, _ in export(family, "torchscript17-eager").samples:
        feeds = matching(given, traced.reference)
        want, got = source(feeds)[0], ours(feeds)[0]
        real = feeds["attention_mask"] > 0
        error = np.abs(want - got)[real].max() / np.abs(want[real]).max()
        # Two layers in float32, weights far from small; measured 2e-6.
        assert error <= 2e-5


def matching(given: dict[str, Any], reference: ir.Model) -> dict[str, Any]:
    """The optimizer turns int64 inputs into int32."""
    return {
        value.name or "": given[value.name or ""].astype(value.dtype.numpy())
        for value in reference.graph.inputs
        if value.dtype is not None
    }
