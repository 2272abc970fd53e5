"""Encoders, layouts and element types behind publicly reported failures (``docs/cases.md``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from case_models import HEADS, LAYERS, WIDTH, FirstOutput, Read, build, eager, export, relative
from subquad.converter.emit import write_models
from subquad.converter.module import ModuleSource, trace_module
from subquad.converter.onnx_source import trace_onnx
from subquad.passes.plan import Request, make_plan

TOLERANCE = 1e-4


# --- one canonical form ------------------------------------------------------------------------


@cache
def tower(name: str, spelling: str) -> tuple[nn.Module, Read]:
    module = FirstOutput(build(name, spelling), ["pixel_values"])
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    return module, export(module, {"pixel_values": pixels}, {"pixel_values": {0: "batch"}})


@pytest.mark.parametrize("name", ["clip", pytest.param("siglip", marks=pytest.mark.slow)])
def test_exports_of_one_tower_have_one_form_and_one_plan(name: str) -> None:
    """Eager and SDPA exports: the same sites, the same plan, the same numbers."""
    reads = [tower(name, spelling)[1] for spelling in ("eager", "sdpa")]
    claims = [
        [
            (s.index, s.num_heads, s.num_kv_heads, s.head_dim, s.value_dim, s.softcap, s.mask)
            for s in read.result.sites
        ]
        for read in reads
    ]
    assert claims[0] == claims[1] and len(claims[0]) == LAYERS
    scales = [[site.scale for site in read.result.sites] for read in reads]
    np.testing.assert_allclose(scales[0], scales[1], rtol=1e-6)
    request = Request.parse("window:size=2", "1")
    plans = [
        [(a.site.index, a.method.name, a.params) for a in make_plan(r.result.sites, [request])]
        for r in reads
    ]
    assert plans[0] == plans[1]
    pixels = np.random.default_rng(2).standard_normal((3, 3, 24, 24)).astype(np.float32)
    want = eager(tower(name, "eager")[0], {"pixel_values": pixels})[0]
    for read in reads:
        assert relative(read.run()({"pixel_values": pixels})[0], want) <= TOLERANCE


# --- causality -----------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention with an additive mask: a table of its own, or an input."""

    def __init__(self, visible: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        with torch.no_grad():
            self.qkv.weight.mul_(4)
        table = None if visible is None else torch.where(visible, 0.0, -torch.inf)[None, None]
        self.register_buffer("table", table)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).split(WIDTH, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        scores = scores + (self.table if mask is None else mask)
        mixed: Tensor = scores.softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, WIDTH)


def tables() -> dict[str, Tensor]:
    rows, columns = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    random = torch.rand(12, 12, generator=torch.Generator().manual_seed(3)) < 0.6
    return {
        "causal": columns <= rows,
        "all but one causal": (columns <= rows) | ((rows == 3) & (columns == 7)),
        "random": random | (rows == columns),
        "blocks": rows // 4 == columns // 4,
        "band": (rows - columns).abs() <= 2,
        "looks ahead": columns >= rows,
        "everything": columns >= 0,
    }


MEANT = {
    "causal": "causal",
    "band": "band -2..+2",
    "looks ahead": "band -0..+inf",
    "everything": "full",
}
FAST = ("causal", "all but one causal", "looks ahead")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in tables()],
)
def test_causality_is_read_from_the_mask_s_values(name: str) -> None:
    """A mask of a ViT is not causal because it is there."""
    module = Masked(tables()[name])
    x = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(4))
    read = export(module, {"x": x}, {"x": {0: "batch"}})
    (site,) = read.result.sites
    assert site.mask.describe() == MEANT.get(name, "full")
    assert bool(site.biases) is (name not in MEANT)
    feeds = {"x": np.random.default_rng(5).standard_normal((3, 12, WIDTH)).astype(np.float32)}
    assert relative(read.run()(feeds)[0], eager(module, feeds)[0]) <= TOLERANCE


def test_a_mask_that_is_an_input_is_no_causality() -> None:
    module = Masked(None)
    example = {"x": torch.randn(2, 9, WIDTH), "mask": torch.zeros(2, 1, 9, 9)}
    axes = {"x": {0: "batch", 1: "length"}, "mask": {0: "batch", 2: "length", 3: "length"}}
    read = export(module, example, axes)
    (site,) = read.result.sites
    assert site.mask.describe() == "full" and [b.axes for b in site.biases] == ["bqk"]
    rng = np.random.default_rng(6)
    for visible in (np.tri(13, dtype=bool), rng.random((13, 13)) < 0.7):
        table = np.where(visible | np.eye(13, dtype=bool), 0, -1e9).astype(np.float32)
        feeds = {
            "x": rng.standard_normal((2, 13, WIDTH)).astype(np.float32),
            "mask": np.broadcast_to(table, (2, 1, 13, 13)).copy(),
        }
        assert relative(read.run()(feeds)[0], eager(module, feeds)[0]) <= TOLERANCE


# --- layout and head sizes -----------------------------------------------------------------------


class Laid(nn.Module):
    """SDPA over ``[batch, heads, length, dim]``, from tensors kept in that or the other layout."""

    def __init__(self, layout: str, head_dim: int, kv_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout, self.head_dim, self.kv_heads = layout, head_dim, kv_heads
        self.query = nn.Linear(WIDTH, HEADS * head_dim)
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * head_dim) for _ in range(2))
        self.out = nn.Linear(HEADS * head_dim, WIDTH)
        with torch.no_grad():
            self.query.weight.mul_(6)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (HEADS, self.kv_heads, self.kv_heads)
        parts = [
            layer(x).view(batch, length, count, self.head_dim)
            for layer, count in zip((self.query, self.key, self.value), heads, strict=True)
        ]
        if self.layout == "length first":
            q, k, v = (part.transpose(1, 2) for part in parts)
        else:
            q, k, v = (part.permute(0, 2, 1, 3).contiguous() for part in parts)
        k, v = (repeated(part, HEADS // self.kv_heads) for part in (k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.layout == "length first":
            mixed = mixed.transpose(1, 2)
        else:
            mixed = mixed.permute(0, 2, 1, 3).contiguous()
        result: Tensor = self.out(mixed.reshape(batch, length, HEADS * self.head_dim))
        return result


def repeated(x: Tensor, times: int) -> Tensor:
    """Each head ``times`` times, as grouped-query attention is written."""
    batch, heads, length, dim = x.shape
    wide = x[:, :, None].expand(batch, heads, times, length, dim)
    return wide.reshape(batch, heads * times, length, dim)


@pytest.mark.parametrize("layout", ["length first", "heads first"])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads"),
    [(5, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((8, 4), (20, 1)))],
)
def test_layouts_and_head_sizes(layout: str, head_dim: int, kv_heads: int) -> None:
    """Nothing follows from the hidden size: heads and dimensions are those of the graph."""
    module = Laid(layout, head_dim, kv_heads)
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(7))
    read = export(module, {"x": x}, {"x": {0: "batch", 1: "length"}})
    (site,) = read.result.sites
    assert (site.num_heads, site.num_kv_heads, site.head_dim) == (HEADS, kv_heads, head_dim)
    assert site.mask.describe() == "causal"
    assert site.scale == pytest.approx(head_dim**-0.5, rel=1e-6)
    for length in (1, 23):
        feeds = {"x": np.random.default_rng(8).standard_normal((3, length, WIDTH))}
        feeds["x"] = feeds["x"].astype(np.float32)
        assert relative(read.run()(feeds)[0], eager(module, feeds)[0]) <= TOLERANCE


# --- half precision ------------------------------------------------------------------------------


class Normalised(nn.Module):
    """LayerNorm over values near 300, whose squares float16 cannot hold, then attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x * 300.0)).split(WIDTH, dim=-1)
        )
        mixed = scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).reshape(batch, length, WIDTH)


@pytest.mark.slow
def test_half_precision_weights_are_computed_in_float32(tmp_path: Path) -> None:
    """The source is float16; its graph is float32, over the same rounded weights."""
    module = Normalised().half()
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(9))
    traced = trace_module(ModuleSource(module, {"x": x}))
    write_models(tmp_path, {"model.onnx": traced.model})
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    with torch.no_grad():
        want = module.float()(x).numpy()
    (got,) = session.run(None, {"x": x.numpy()})
    assert np.isfinite(got).all() and relative(got, want) <= 1e-5


def test_shape_of_an_old_reduction(tmp_path: Path) -> None:
    """ReduceMean of opset 13: axes are an attribute, and the axis may go."""
    for keep in (0, 1):
        graph = helper.make_graph(
            [
                helper.make_node("ReduceMean", ["x"], ["m"], axes=[1], keepdims=keep),
                helper.make_node("Shape", ["m"], ["y"]),
            ],
            "reduce",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 4])],
            [helper.make_tensor_value_info(name, kind, None) for name, kind in _KINDS],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        path = tmp_path / f"reduce{keep}.onnx"
        onnx.save(proto, str(path))
        traced = trace_onnx(path)
        write_models(tmp_path, {"model.onnx": traced.model})
        feeds: dict[str, NDArray[Any]] = {"x": np.ones((3, 5, 4), np.float32)}
        old, new = (
            onnxruntime.InferenceSession(str(p)).run(None, feeds)
            for p in (path, tmp_path / "model.onnx")
        )
        for a, b in zip(old, new, strict=True):
            np.testing.assert_array_equal(a, b)
        (mean,) = (o for o in traced.outputs if o.name == "m")
        assert len(mean.shape) == old[0].ndim == 2 + keep


_KINDS = (("m", TensorProto.FLOAT), ("y", TensorProto.INT64))
