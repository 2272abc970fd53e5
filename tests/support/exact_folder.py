"""A small decoder of several layers, raised and written the way planning sees it, without the
check that a conversion makes in a child process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from subquad.converter.emit import write_models
from subquad.converter.source import trace
from subquad.passes.calibrate.segments import SplitModel, load_split
from subquad.passes.canonicalise import canonicalise
from subquad.passes.plan import make_plan
from subquad.passes.raise_attention import raise_attention
from subquad.passes.recognise.site import AttentionSite
from subquad.passes.replace import replace_sites
from subquad.runtime.manifest import MODEL_NAME, REFERENCE_NAME, Manifest, SiteRecord

VOCABULARY = 31
WIDTH = 16

_HEAD = """
<ir_version: 10, opset_import: ["" : 23]>
deep (int64[batch, length] input_ids, int64[batch, length] attention_mask)
  => (float[batch, length, 31] logits)
{
  x0 = Gather(embedding, input_ids)
  split_q = Constant<value_ints=[0, 0, 4, 6]>()
  split_kv = Constant<value_ints=[0, 0, 2, 6]>()
  merge = Constant<value_ints=[0, 0, 24]>()
  length1 = Shape<start=1>(input_ids)
  zero = Constant<value_int=0>()
  one = Constant<value_int=1>()
  length0 = Squeeze(length1)
  slots = Range(zero, length0, one)
  first = Constant<value_ints=[0]>()
  last = Constant<value_ints=[1]>()
  row = Unsqueeze(slots, last)
  column = Unsqueeze(slots, first)
  causal = LessOrEqual(column, row)
  real = Cast<to=9>(attention_mask)
  axes = Constant<value_ints=[1, 2]>()
  real4 = Unsqueeze(real, axes)
  mask = And(causal, real4)
"""

# The gate of every layer reads the embedding: a value that crosses all cuts.
_LAYER = """
  q{i} = MatMul(x{i}, wq{i})
  k{i} = MatMul(x{i}, wk{i})
  v{i} = MatMul(x{i}, wv{i})
  qs{i} = Reshape(q{i}, split_q)
  ks{i} = Reshape(k{i}, split_kv)
  vs{i} = Reshape(v{i}, split_kv)
  qt{i} = Transpose<perm=[0, 2, 1, 3]>(qs{i})
  kt{i} = Transpose<perm=[0, 2, 1, 3]>(ks{i})
  vt{i} = Transpose<perm=[0, 2, 1, 3]>(vs{i})
  a{i} = Attention<scale=0.5>(qt{i}, kt{i}, vt{i}, mask)
  t{i} = Transpose<perm=[0, 2, 1, 3]>(a{i})
  m{i} = Reshape(t{i}, merge)
  o{i} = MatMul(m{i}, wo{i})
  b{i} = Add(o{i}, bias{i})
  y{i} = Add(x{i}, b{i})
  g{i} = Tanh(x0)
  f{i} = Mul(y{i}, g{i})
  x{j} = Add(y{i}, f{i})
"""


@dataclass(frozen=True)
class ExactFolder:
    """What planning starts from."""

    path: Path
    source: Path
    manifest: Manifest
    sites: tuple[AttentionSite, ...]

    def split(self) -> SplitModel:
        return load_split(self.path, MODEL_NAME, self.sites)


def save_decoder(path: Path, layers: int = 3, seed: int = 0) -> Path:
    """GQA 4/2 heads of 6, causal with key padding, one bias and one gate per layer."""
    body = "".join(_LAYER.format(i=i, j=i + 1) for i in range(layers))
    text = f"{_HEAD}{body}  logits = MatMul(x{layers}, head)\n}}\n"
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (VOCABULARY, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    for i in range(layers):
        shapes |= {f"wq{i}": (WIDTH, 24), f"wk{i}": (WIDTH, 12), f"wv{i}": (WIDTH, 12)}
        shapes |= {f"wo{i}": (24, WIDTH), f"bias{i}": (WIDTH,)}
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) * 0.4).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, str(path))
    return path


def build(folder: Path, layers: int = 3) -> ExactFolder:
    """Raise and write the decoder into ``folder``."""
    folder.mkdir(parents=True)
    source = save_decoder(folder / "source.onnx", layers)
    path = folder / "exact"
    path.mkdir()
    traced = trace(source)
    canonicalise(traced.model)
    raised = raise_attention(traced.model)
    assert len(raised.sites) == layers
    plan = make_plan(raised.sites, ())
    replace_sites(traced.model, plan)
    files = write_models(path, {MODEL_NAME: traced.model, REFERENCE_NAME: traced.reference})
    manifest = Manifest(
        source={"kind": "onnx", "name": "source.onnx", "hash": traced.source_hash},
        versions={},
        seed=0,
        inputs=traced.inputs,
        outputs=traced.outputs,
        sites=tuple(SiteRecord(site.to_json(), "dense", {}, "") for site in raised.sites),
        rejections=(),
        files=files,
    )
    manifest.dump(path / "manifest.json")
    return ExactFolder(path, source, Manifest.read(path), raised.sites)
