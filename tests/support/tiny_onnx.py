"""A small decoder written directly in ONNX: embedding, one GQA attention, logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

_TEXT = """
<ir_version: 10, opset_import: ["" : 23]>
tiny (int64[batch, length] input_ids, int64[batch, length] attention_mask)
  => (float[batch, length, 31] logits)
{
  x = Gather(embedding, input_ids)
  q0 = MatMul(x, wq)
  k0 = MatMul(x, wk)
  v0 = MatMul(x, wv)
  split_q = Constant<value_ints=[0, 0, 4, 6]>()
  split_kv = Constant<value_ints=[0, 0, 2, 6]>()
  q1 = Reshape(q0, split_q)
  k1 = Reshape(k0, split_kv)
  v1 = Reshape(v0, split_kv)
  q = Transpose<perm=[0, 2, 1, 3]>(q1)
  k = Transpose<perm=[0, 2, 1, 3]>(k1)
  v = Transpose<perm=[0, 2, 1, 3]>(v1)
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
  a = Attention<scale=0.7>(q, k, v, mask)
  t = Transpose<perm=[0, 2, 1, 3]>(a)
  merge = Constant<value_ints=[0, 0, 24]>()
  m = Reshape(t, merge)
  o = MatMul(m, wo)
  y = Add(x, o)
  logits = MatMul(y, head)
}
"""


def tiny_decoder(seed: int = 0, *, capped: bool = False) -> onnx.ModelProto:
    """GQA 4/2 heads of 6, causal with key padding, vocabulary 31; weights that matter.

    ``capped`` adds a second attention to it, with a softcap.
    """
    text = _TEXT
    if capped:
        second = "Attention<scale=0.7, softcap=2.5>(q, k, v, mask)"
        text = text.replace("perm=[0, 2, 1, 3]>(a)", "perm=[0, 2, 1, 3]>(both)")
        text = text.replace("  t = ", f"  c = {second}\n  both = Add(a, c)\n  t = ")
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding": (31, 16),
        "wq": (16, 24),
        "wk": (16, 12),
        "wv": (16, 12),
        "wo": (24, 16),
        "head": (16, 31),
    }
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) * 0.5).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def save_tiny_decoder(path: Path, seed: int = 0, *, capped: bool = False) -> Path:
    onnx.save(tiny_decoder(seed, capped=capped), str(path))
    return path
