"""The written artifact is compared with what the torch source itself computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from subquad.converter.module import ModuleSource
from subquad.converter.pipeline import convert
from subquad.converter.source_sample import run_source, run_source_on_random
from subquad.runtime.errors import UnsupportedModelError


class Mixer(torch.nn.Module):
    """One attention; what it returns while it is traced is ``exported_gain`` times too much."""

    def __init__(self, exported_gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(24, 72)
        self.exported_gain = exported_gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, 12).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        gain = self.exported_gain if torch.compiler.is_exporting() else 1.0
        return mixed.reshape(batch, length, width) * gain


def source(gain: float) -> ModuleSource:
    return ModuleSource(Mixer(gain), {"x": torch.randn(2, 11, 24)})


def test_error_of_the_source_is_reported(tmp_path: Path) -> None:
    report = convert(source(1.0), tmp_path / "out")
    # float32 sums of at most 24 terms, torch against ONNX Runtime.
    assert 0 <= report.check["source_error"] < 1e-5


def test_an_export_that_computes_something_else_is_discarded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is not what the source computes"):
        convert(source(1.01), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Tokens(torch.nn.Module):
    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        if input_ids.shape[1] < 4:
            raise ValueError("too short")
        return {"ids": input_ids, "mask": attention_mask.clone()}


def test_random_inputs_are_of_the_kind_of_the_example() -> None:
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask")}
    example = {name: torch.ones(2, 23, dtype=torch.int64) for name in axes}
    sample = run_source_on_random(Tokens(), example, axes, vocabulary=50)
    ids, mask = sample.outputs
    assert ids.shape == mask.shape == (2, 9)
    assert ids.min() >= 0 and ids.max() < 50 and len(np.unique(ids)) > 5
    np.testing.assert_array_equal(mask, [[1] * 9, [1] * 6 + [0] * 3])
    np.testing.assert_array_equal(sample.inputs["input_ids"], ids)


def test_a_source_that_refuses_random_inputs_runs_on_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Picky(Tokens):
        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            if bool((input_ids != 1).any()):
                raise ValueError("only ones")
            return super().forward(input_ids, attention_mask)

    example = {
        name: torch.ones(2, 5, dtype=torch.int64) for name in ("input_ids", "attention_mask")
    }
    sample = run_source_on_random(Picky(), example, {}, vocabulary=50)
    np.testing.assert_array_equal(sample.outputs[0], 1)
    assert "only ones" in caplog.text


def test_inputs_are_kept_as_they_were_given() -> None:
    class InPlace(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1.0)

    sample = run_source(InPlace(), {"x": torch.zeros(2)})
    np.testing.assert_array_equal(sample.inputs["x"], 0)
    np.testing.assert_array_equal(sample.outputs[0], 1)
