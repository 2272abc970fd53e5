"""Python modules: the factory convention, naming, and equality with eager torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional

import subquad.converter.module
from subquad.converter.emit import write_models
from subquad.converter.module import ModuleSource
from subquad.converter.source import trace
from subquad.converter.source_hash import hash_model
from subquad.runtime.errors import UnsupportedModelError, UsageError


class Mixer(torch.nn.Module):
    """One attention; ``fused`` calls SDPA, otherwise it is spelled out. Causal, with a mask."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.qkv = torch.nn.Linear(40, 120)
        with torch.no_grad():
            self.qkv.weight.mul_(4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, 20).permute(2, 0, 3, 1, 4).unbind(0)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = causal & keep[:, None, None, :]
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(-1, -2)) * 20**-0.5
            mixed = scores.masked_fill(~mask, -1e9).softmax(-1) @ v
        return {"mixed": mixed.transpose(1, 2).reshape(batch, length, width), "input": x * 2}


class Scaled(torch.nn.Module):
    """Cheap to trace."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x * 3.0 if y is None else x * y


class HalfTable(torch.nn.Module):
    """A float32 model with one table in half precision, negated as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.linspace(0.1, 3.0, 4).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = cast(torch.Tensor, self.phase)
        return x * torch.cat([-phase[:2], phase[2:]])


class Fixed(torch.nn.Module):
    """Works for one length only."""

    def __init__(self) -> None:
        super().__init__()
        self.position = torch.nn.Parameter(torch.zeros(9, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def _inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    keep = torch.ones(batch, length, dtype=torch.bool)
    keep[0, (length + 1) // 2 :] = False
    return {"x": torch.randn(batch, length, 40, generator=generator), "keep": keep}


@pytest.mark.parametrize("fused", [True, False])
def test_module_equals_eager(tmp_path: Path, fused: bool) -> None:
    module = Mixer(fused).train()
    traced = trace(ModuleSource(module, _inputs(2, 11), name="mixer"))
    assert module.training, "the caller's module is left as it was"
    write_models(tmp_path, {"model.onnx": traced.model, "reference.onnx": traced.reference})
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    for batch, length in ((1, 1), (3, 7), (1, 65)):
        inputs = _inputs(batch, length)
        with torch.no_grad():
            want = module(**inputs)["mixed"].numpy()
        got = session.run(["mixed"], {k: v.numpy() for k, v in inputs.items()})[0]
        # float32 sums of at most 65 terms
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    kinds = {node.op_type for node in traced.model.graph}
    assert ("Attention" in kinds) is fused and ("Softmax" in kinds) is not fused
    roles = {spec.name: (spec.role, spec.shape) for spec in traced.inputs}
    assert roles == {
        "x": ("values", ("batch", "length", 40)),
        "keep": ("padding_mask", ("batch", "length")),
    }
    assert [output.name for output in traced.outputs] == ["mixed", "input"]
    assert traced.kind == "module" and traced.source_name == "mixer"


FACTORIES = """
import torch
from dataclasses import dataclass

class Scaled(torch.nn.Module):
    def forward(self, x, y=None):
        return x * 3.0 if y is None else x * y

class WithExamples(Scaled):
    def example_inputs(self):
        return {"x": torch.ones(2, 5)}

def pair(): return Scaled(), {"x": torch.ones(2, 5)}
def positional(): return Scaled(), (torch.ones(2, 5), torch.ones(2, 5))
def axes(): return Scaled(), {"x": torch.ones(2, 5)}, {"x": {1: "time"}}
def bare(): return Scaled()
def nothing(): return None
def broken(): raise ValueError("no weights here")
module = WithExamples()
"""


@pytest.mark.parametrize(
    ("reference", "inputs", "axes"),
    [
        ("good_factories:pair", {"x"}, None),
        ("good_factories.py:positional", 2, None),
        ("good_factories.py:axes", {"x"}, {"x": {1: "time"}}),
        ("good_factories.py:module", {"x"}, None),
        ("good_factories.py:WithExamples", {"x"}, None),
    ],
)
def test_factories(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reference: str,
    inputs: set[str] | int,
    axes: dict[str, dict[int, str]] | None,
) -> None:
    (tmp_path / "good_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subquad.converter.module, "trace_module", lambda source: source)
    source = cast(ModuleSource, trace(reference))
    given = source.example_inputs
    assert (set(given) if isinstance(given, dict) else len(given)) == inputs
    assert source.dynamic_axes == axes and source.name == reference


def test_default_and_declared_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "axis_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    assert trace("axis_factories:pair").inputs[0].shape == ("batch", "length")
    assert trace("axis_factories:axes").inputs[0].shape == (2, "time")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("bad_factories:bare", "example inputs are missing"),
        ("bad_factories:nothing", "got NoneType, which is no model"),
        ("bad_factories:broken", "no weights here"),
        ("bad_factories:absent", "absent"),
        ("no_such_module_anywhere:f", "cannot import 'no_such_module_anywhere'"),
        ("missing.py:f", "missing.py does not exist"),
    ],
)
def test_factories_that_do_not_follow_the_convention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, reason: str
) -> None:
    (tmp_path / "bad_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=reason):
        trace(reference)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Scaled(), "example inputs are missing"),
        (ModuleSource(Scaled(), {"z": torch.ones(2)}), "no argument 'z'"),
        (ModuleSource(Scaled(), {"y": torch.ones(2)}), "lack 'x'"),
        (ModuleSource(Scaled(), {"x": 3}), "is int, expected a tensor"),  # type: ignore[dict-item]
        (ModuleSource(Scaled(), {"x": torch.ones(2)}, {"q": {0: "a"}}), "names 'q'"),
        (ModuleSource(Scaled(), {"x": torch.ones(2)}, {"x": {7: "a"}}), "names axis 7"),
        (ModuleSource(Scaled(), {"x": torch.ones(2)}, {"x": {0: "a b"}}), "must be a name"),
        (ModuleSource(Scaled(), [torch.ones(2)] * 3), "do not fit"),
    ],
)
def test_wrong_use_of_the_api(source: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        trace(source)


def test_fixed_length_is_reported() -> None:
    with pytest.raises(UnsupportedModelError, match="ties or fixes a dimension.*length = 9"):
        trace(ModuleSource(Fixed(), {"x": torch.ones(2, 9, 4)}))


def test_fixed_length_may_be_declared() -> None:
    source = ModuleSource(Fixed(), {"x": torch.ones(2, 9, 4)}, {"x": {0: "batch"}})
    assert trace(source).inputs[0].shape == ("batch", 9, 4)


def test_data_dependent_branch_is_reported() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot trace the model"):
        trace(ModuleSource(Branching(), {"x": torch.ones(2, 9)}))


def test_hash_follows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ModuleSource(Fixed(), {"x": torch.ones(2, 9, 4)}, {"x": {0: "batch"}})
    first = trace(source)
    assert hash_model(first.model) == first.source_hash
    with torch.no_grad():
        source.module.get_parameter("position").add_(1.0)
    assert hash_model(first.model) != first.source_hash


def test_half_precision_tables_become_float32(tmp_path: Path) -> None:
    module = HalfTable()
    x = torch.randn(2, 3, 4)
    traced = trace(ModuleSource(module, {"x": x}))
    write_models(tmp_path, {"model.onnx": traced.model})
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (got,) = session.run(None, {"x": x.numpy()})
    # The same bfloat16 values, multiplied in float32 on both sides.
    np.testing.assert_array_equal(got, module(x).numpy())
    assert (
        cast(torch.Tensor, module.phase).dtype == torch.bfloat16
    )  # the user's module is as it was
