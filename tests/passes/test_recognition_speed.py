"""Recognition of 24 layers, in processor time: below 10 s without probing, 60 s with.

The limits hold on one core of a slow machine; measured times are a fifth of them and less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from case_models import FirstOutput, build, export_file
from exact_folder import save_decoder
from subquad.converter.onnx_source import trace_onnx
from subquad.passes import raise_attention as module
from subquad.passes.canonicalise import canonicalise
from subquad.passes.recognise.probe import NodeProbes

LAYERS = 24
pytestmark = pytest.mark.slow


def decomposed(name: str) -> Callable[[Path], Path]:
    """An export without attention operators: masks, rotary positions and all in small nodes."""

    def save(path: Path) -> Path:
        model = build(name, num_hidden_layers=LAYERS, layer_types=None)
        model.config.use_cache = False
        inputs = {
            "input_ids": torch.randint(3, 90, (2, 11)),
            "attention_mask": torch.ones(2, 11, dtype=torch.long),
        }
        axes = {name: {0: "batch", 1: "length"} for name in inputs}
        export_file(FirstOutput(model, list(inputs)), inputs, axes, path)
        return path

    return save


SOURCES: dict[str, Callable[[Path], Path]] = {
    "attention nodes": lambda path: save_decoder(path, layers=LAYERS),
    "llama": decomposed("llama"),
    "gemma3": decomposed("gemma3"),
    "opt": decomposed("opt"),
}


@pytest.fixture(scope="module", params=SOURCES)
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ir.Model]:
    path = SOURCES[request.param](tmp_path_factory.mktemp("speed") / "model.onnx")
    model = trace_onnx(path).model
    canonicalise(model)
    yield model


def seconds(model: ir.Model) -> float:
    start = time.process_time()
    result = module.raise_attention(model)
    spent = time.process_time() - start
    assert len(result.sites) == LAYERS, result.rejections[:1]
    return spent


def test_with_probing(source: ir.Model) -> None:
    assert seconds(source.clone()) < 60


def test_without_probing(source: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "probe_masks", lambda *_: 0)
    monkeypatch.setattr(module, "probe_node", lambda *_: NodeProbes())
    assert seconds(source.clone()) < 10
