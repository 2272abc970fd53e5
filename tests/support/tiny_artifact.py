"""Hand-made artifacts: a small transformer as ``reference.onnx`` and, with ``ai.subquad``
functions, as ``model.onnx``, written without the converter."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from subquad.runtime.manifest import (
    DATA_NAME,
    MODEL_NAME,
    REFERENCE_NAME,
    InputSpec,
    Manifest,
    OutputSpec,
    SiteRecord,
    file_record,
)

VOCABULARY = 32
WIDTH = 16
HEADS = 2
HEAD_DIM = WIDTH // HEADS
MAX_LENGTH = 600
DOMAIN = "ai.subquad"


@dataclass(frozen=True)
class Tiny:
    """What to build.

    Attributes:
        layers: attention layers.
        causal: a decoder with logits; else an encoder with hidden states and a pooled output.
        padded: whether there is a padding mask input.
        methods: method per layer as the manifest tells it.
        perturbed: layer of ``model.onnx`` whose scale is off by ``perturbation``.
        leak: layer of ``model.onnx`` that sees everything: later tokens and padding.
        nan: layer of ``model.onnx`` that yields NaN.
        zero: whether all weights are zero.
    """

    layers: int = 3
    causal: bool = True
    padded: bool = True
    methods: tuple[str, ...] = ()
    perturbed: int | None = None
    perturbation: float = 0.05
    leak: int | None = None
    nan: int | None = None
    zero: bool = False


def build(folder: Path, tiny: Tiny | None = None) -> Path:
    """Write the artifact directory ``folder`` and return it."""
    tiny = tiny or Tiny()
    folder.mkdir(parents=True)
    weights = _weights(tiny)
    data = b"".join(array.tobytes() for array in weights.values())
    (folder / DATA_NAME).write_bytes(data)
    (folder / REFERENCE_NAME).write_bytes(_model(tiny, weights, raised=False))
    (folder / MODEL_NAME).write_bytes(_model(tiny, weights, raised=True))
    (folder / "config.json").write_text("{}\n", "utf-8")
    write_manifest(folder, _manifest(tiny))
    return folder


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` with the records of all files that are in ``folder`` now."""
    files = {
        path.relative_to(folder).as_posix(): file_record(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    dataclasses.replace(manifest, files=files).dump(folder / "manifest.json")


def edit_manifest(folder: Path, **fields: Any) -> None:
    """Overwrite top-level fields of ``manifest.json`` as they are."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text("utf-8"))
    raw.update(fields)
    path.write_text(json.dumps(raw), "utf-8")


def feeds(
    rows: int = 2, length: int = 9, *, padded: bool = True, seed: int = 0
) -> dict[str, NDArray[Any]]:
    """Valid inputs of a tiny artifact."""
    rng = np.random.default_rng(seed)
    arrays = {"input_ids": rng.integers(0, VOCABULARY, (rows, length))}
    if padded:
        arrays["attention_mask"] = np.ones((rows, length), np.int64)
    return arrays


def save_npz(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """``numpy.savez``, whose stub takes no arrays by ``**``."""
    np.savez(path, **cast(Any, arrays))


def add_tokenizer(folder: Path) -> None:
    """Add a word tokenizer: ``w0 w1 ...`` are the tokens 0, 1, ..."""
    import tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_manifest(folder, Manifest.read(folder))


def _weights(tiny: Tiny) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    shapes = {"embedding": (VOCABULARY, WIDTH), "position": (MAX_LENGTH, WIDTH)}
    for layer in range(tiny.layers):
        # Large enough that attention is far from uniform: errors must show.
        shapes |= {f"{name}{layer}": (WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")}
    gain = 0.0 if tiny.zero else 1.0
    shapes["head"] = (WIDTH, VOCABULARY if tiny.causal else WIDTH)
    return {
        name: rng.normal(0.0, gain * (0.4 if "w" in name else 1.0), shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def _model(tiny: Tiny, weights: dict[str, NDArray[np.float32]], *, raised: bool) -> bytes:
    nodes: list[onnx.NodeProto] = []
    functions: list[onnx.FunctionProto] = []

    def node(op: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], domain=domain, **attributes))
        return output

    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    inputs = [ids]
    node("Shape", ["input_ids"], "length1", start=1, end=2)
    node("Squeeze", ["length1"], "length0")
    node("Range", ["zero", "length0", "one"], "slots")
    node("Gather", ["position", "slots"], "place")
    node("Gather", ["embedding", "input_ids"], "words")
    hidden = node("Add", ["words", "place"], "hidden")
    if tiny.padded:
        inputs.append(
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "length"])
        )
        node("Cast", ["attention_mask"], "real", to=TensorProto.BOOL)
    else:
        node("Less", ["input_ids", "zero"], "negative")
        node("Not", ["negative"], "real")
    for layer in range(tiny.layers):
        for name in ("q", "k", "v"):
            node("MatMul", [hidden, f"w{name}{layer}"], f"{name}_flat{layer}")
            node("Reshape", [f"{name}_flat{layer}", "heads_shape"], f"{name}_rows{layer}")
            node("Transpose", [f"{name}_rows{layer}"], f"{name}{layer}", perm=[0, 2, 1, 3])
        arguments = [f"q{layer}", f"k{layer}", f"v{layer}", "real"]
        context = f"{'site' if raised else 'context'}{layer}"
        scale = HEAD_DIM**-0.5
        if raised:
            if layer == tiny.perturbed:
                scale *= 1.0 + tiny.perturbation
            if layer == tiny.nan:
                scale = float("nan")
            leaks = layer == tiny.leak
            functions.append(_function(layer, scale, causal=tiny.causal and not leaks, mask=leaks))
            node("Attention", arguments, context, DOMAIN, overload=f"layer{layer}")
        else:
            body = _attention_nodes(arguments, context, scale, tiny.causal, False, f"l{layer}_")
            nodes.extend(body)
        node("Transpose", [context], f"rows{layer}", perm=[0, 2, 1, 3])
        node("Reshape", [f"rows{layer}", "flat_shape"], f"flat{layer}")
        node("MatMul", [f"flat{layer}", f"wo{layer}"], f"out{layer}")
        hidden = node("Add", [hidden, f"out{layer}"], f"hidden{layer}")
    main = "logits" if tiny.causal else "last_hidden_state"
    node("MatMul", [hidden, "head"], main)
    size = VOCABULARY if tiny.causal else WIDTH
    outputs = [helper.make_tensor_value_info(main, TensorProto.FLOAT, ["batch", "length", size])]
    if not tiny.causal:
        node("Gather", [main, "zero"], "pooled", axis=1)
        outputs.append(helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["batch", size]))
    initializers = [
        numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in {
            "zero": 0,
            "one": 1,
            "heads_shape": [0, 0, HEADS, HEAD_DIM],
            "flat_shape": [0, 0, WIDTH],
        }.items()
    ]
    offset = 0
    for name, array in weights.items():
        initializers.append(_external(name, array, offset))
        offset += array.nbytes
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)
    content: bytes = model.SerializeToString()
    return content


def _function(layer: int, scale: float, *, causal: bool, mask: bool) -> onnx.FunctionProto:
    names = ["query", "key", "value", "key_mask"]
    function = helper.make_function(
        DOMAIN,
        "Attention",
        names,
        ["output"],
        _attention_nodes(names, "output", scale, causal, mask, ""),
        [helper.make_opsetid("", 24)],
    )
    function.overload = f"layer{layer}"
    return function


def _attention_nodes(
    arguments: list[str], output: str, scale: float, causal: bool, ignore_mask: bool, prefix: str
) -> list[onnx.NodeProto]:
    """Softmax attention from standard operators; masked scores are the lowest finite float."""
    query, key, value, mask = arguments
    nodes: list[onnx.NodeProto] = []

    def constant(value: Any, dtype: type, name: str) -> str:
        tensor = numpy_helper.from_array(np.array(value, dtype))
        nodes.append(helper.make_node("Constant", [], [prefix + name], value=tensor))
        return prefix + name

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [prefix + name], **attributes))
        return prefix + name

    keys = node("Transpose", [key], "keys", perm=[0, 1, 3, 2])
    raw = node("MatMul", [query, keys], "raw")
    scores = node("Mul", [raw, constant(scale, np.float32, "scale")], "scores")
    axes = constant([1, 2], np.int64, "axes")
    visible = node("Unsqueeze", [mask, axes], "visible")
    if ignore_mask:
        visible = node("Or", [visible, node("Not", [visible], "hidden")], "all")
    if causal:
        length = node("Shape", [raw], "length", start=2, end=4)
        ones = node("ConstantOfShape", [length], "ones", value=_int_tensor(1))
        lower = node("Trilu", [ones], "lower", upper=0)
        triangle = node("Cast", [lower], "triangle", to=TensorProto.BOOL)
        visible = node("And", [visible, triangle], "both")
    lowest = constant(np.finfo(np.float32).min, np.float32, "lowest")
    masked = node("Where", [visible, scores, lowest], "masked")
    weights = node("Softmax", [masked], "weights", axis=-1)
    nodes.append(helper.make_node("MatMul", [weights, value], [output]))
    return nodes


def _int_tensor(value: int) -> TensorProto:
    return numpy_helper.from_array(np.array([value], np.int64))


def _external(name: str, array: NDArray[np.float32], offset: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": DATA_NAME, "offset": offset, "length": array.nbytes}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _manifest(tiny: Tiny) -> Manifest:
    shape = ("batch", "length")
    inputs = [InputSpec("input_ids", "int64", shape, "token_ids", VOCABULARY)]
    if tiny.padded:
        inputs.append(InputSpec("attention_mask", "int64", shape, "padding_mask"))
    if tiny.causal:
        outputs = [OutputSpec("logits", "float32", (*shape, VOCABULARY), is_logits=True)]
    else:
        outputs = [
            OutputSpec("last_hidden_state", "float32", (*shape, WIDTH)),
            OutputSpec("pooled", "float32", ("batch", WIDTH)),
        ]
    sites = tuple(
        SiteRecord(
            site={
                "name": f"layers.{layer}.attention",
                "index": layer,
                "source_form": "decomposed",
                "num_heads": HEADS,
                "num_kv_heads": HEADS,
                "head_dim": HEAD_DIM,
                "value_dim": HEAD_DIM,
                "scale": HEAD_DIM**-0.5,
                "softcap": 0.0,
                "mask": {
                    "window_left": -1,
                    "window_right": 0 if tiny.causal else -1,
                    "key_padding": tiny.padded,
                    "alignment": "end",
                },
                "mask_text": "causal" if tiny.causal else "full",
                "is_self": True,
                "source_output": f"context{layer}",
                "output": f"site{layer}",
            },
            method=tiny.methods[layer] if tiny.methods else "dense",
            params={},
            operator=f"Attention:layer{layer}",
        )
        for layer in range(tiny.layers)
    )
    return Manifest(
        source={"kind": "onnx", "name": "tiny", "hash": "0" * 64},
        versions={"subquad": "0.1.0"},
        seed=0,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        sites=sites,
        rejections=(),
        max_length=MAX_LENGTH,
    )
