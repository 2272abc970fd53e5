"""Who can compute an attention: our kernels and function bodies, ONNX Runtime, torch.

An engine prepares one entry of a workload on given sizes. What it returns runs once per call and
keeps its last output. Engines of ``TORCH`` live in a process of their own with torch, the others in
one with ONNX Runtime (``child.py``), so that no library's threads wait on another's cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.example_inputs import Sizes

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Task:
    """What an engine shall prepare.

    Attributes:
        variant: the operator variant that says what is computed.
        library: of compiled kernels.
    """

    variant: Any
    sizes: Sizes
    feeds: Feeds
    threads: int
    library: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A contestant that is ready.

    Attributes:
        call: computes once.
        output: what the last call computed, ``[batch, num_heads, query_len, value_dim]``.
    """

    call: Callable[[], None]
    output: Callable[[], NDArray[np.float32]]


@dataclass(frozen=True)
class Engine:
    """One way to compute.

    Attributes:
        prepare: opens it.
        comparable: whether its output is what the variant's reference says.
        scratch: bytes it needs at least beside inputs and output, where that is a lot.
    """

    prepare: Callable[[Task], Prepared]
    comparable: bool = True
    scratch: Callable[[Any, Sizes], int] = lambda variant, sizes: 0


def _scores(variant: Any, sizes: Sizes) -> int:
    """Two float32 copies of all scores."""
    return 8 * sizes.batch * int(variant.num_heads) * sizes.query_len * sizes.kv_len


# ONNX Runtime.


def open_model(model: bytes, threads: int, library: str | None = None) -> Any:
    from subquad.runtime.session import TURNS, open_session

    libraries = () if library is None else (Path(library),)
    return open_session(
        model, folder=Path.cwd(), threads=threads, config=TURNS, libraries=libraries
    )


def bind(
    session: Any, feeds: Feeds, unpack: Callable[[Any], Any] = lambda array: array
) -> Prepared:
    """Inputs stay where they are, the output in ONNX Runtime's arena: as inside a graph."""
    from subquad.runtime.session import BoundRun

    run = BoundRun.bind(session, {name: np.ascontiguousarray(feeds[name]) for name in feeds})
    return Prepared(run, lambda: unpack(run.output()))


def _subquad(with_kernel: bool) -> Callable[[Task], Prepared]:
    def prepare(task: Task) -> Prepared:
        from subquad.kernels.one_node import one_node_model

        library = task.library if with_kernel else None
        if with_kernel and library is None:
            raise ValueError("there is no compiled kernel")
        model = one_node_model(task.variant).SerializeToString()
        return bind(open_model(model, task.threads, library), task.feeds)

    return prepare


def _is_causal(variant: Any) -> bool:
    allowed = getattr(variant, "window_right", -1), getattr(variant, "allowed_right", -1)
    return bool(allowed[0] == 0 or allowed[1] == 0)


def _microsoft(op_type: str, **attributes: Any) -> Callable[[Task], Prepared]:
    """A com.microsoft attention on inputs already packed as it wants them."""

    def prepare(task: Task) -> Prepared:
        heads, sizes = task.variant.heads, task.sizes
        packed = {name: _pack(np.asarray(task.feeds[name])) for name in ("query", "key", "value")}
        inputs, outputs = ["query", "key", "value"], ["output"]
        own: dict[str, Any] = dict(attributes)
        if op_type == "GroupQueryAttention":
            own |= {"num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads}
            own["scale"] = task.variant.scale
            inputs += ["", "", "last", "total"]
            outputs += ["present_key", "present_value"]
            packed["last"] = np.full(sizes.batch, sizes.kv_len - 1, dtype=np.int32)
            packed["total"] = np.array(sizes.kv_len, dtype=np.int32)
        elif op_type == "MultiHeadAttention":
            own |= {"num_heads": heads.num_heads, "scale": task.variant.scale}
            if "key_mask" in task.feeds:
                inputs += ["", "lengths"]
                packed["lengths"] = task.feeds["key_mask"].sum(axis=1).astype(np.int32)
        else:
            own |= {"q_num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads}
            outputs += ["state"]
        model = _one_node(op_type, "com.microsoft", inputs, outputs, packed, own)
        shape = (sizes.batch, sizes.query_len, heads.num_heads, heads.value_dim)
        return bind(
            open_model(model, task.threads),
            packed,
            lambda array: array.reshape(shape).transpose(0, 2, 1, 3),
        )

    return prepare


def _pack(array: NDArray[Any]) -> NDArray[Any]:
    batch, _, length, _ = array.shape
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(batch, length, -1)


def _onnx_attention(task: Task) -> Prepared:
    """``Attention`` of ONNX opset 24, as exporters write it."""
    feeds = {name: task.feeds[name] for name in ("query", "key", "value")}
    attributes = {"scale": task.variant.scale, "is_causal": int(_is_causal(task.variant))}
    inputs = list(feeds)
    if "key_mask" in task.feeds:
        inputs.append("mask")
        sizes = task.sizes
        shape = (sizes.batch, 1, sizes.query_len, sizes.kv_len)
        feeds["mask"] = np.broadcast_to(task.feeds["key_mask"][:, None, None], shape)
    model = _one_node("Attention", "", inputs, ["output"], feeds, attributes)
    return bind(open_model(model, task.threads), feeds)


def _one_node(
    op_type: str,
    domain: str,
    inputs: list[str],
    outputs: list[str],
    feeds: Feeds,
    attributes: Mapping[str, Any],
) -> bytes:
    from onnx import TensorProto, helper

    types = {
        np.dtype(np.float32): TensorProto.FLOAT,
        np.dtype(np.int32): TensorProto.INT32,
        np.dtype(np.bool_): TensorProto.BOOL,
    }
    node = helper.make_node(op_type, inputs, outputs, domain=domain, **attributes)
    formal = [
        helper.make_tensor_value_info(name, types[array.dtype], array.shape)
        for name, array in feeds.items()
    ]
    result = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "rival", formal, [result])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


# torch.


def _tensors(task: Task) -> tuple[Any, Any, Any]:
    import torch

    torch.set_num_threads(task.threads)
    query, key, value = (torch.from_numpy(task.feeds[name]) for name in ("query", "key", "value"))
    return query, key, value


def _torch_call(function: Callable[[], Any]) -> Prepared:
    import torch

    kept: list[Any] = [None]

    def call() -> None:
        kept[0] = None
        with torch.inference_mode():
            kept[0] = function()

    return Prepared(call, lambda: kept[0].numpy())


def _torch_sdpa(compiled: bool) -> Callable[[Task], Prepared]:
    """Scaled dot product attention by torch's own causal flag, or by a mask."""

    def prepare(task: Task) -> Prepared:
        import torch

        query, key, value = _tensors(task)
        options: dict[str, Any] = {"scale": task.variant.scale}
        if task.variant.heads.group > 1:
            options["enable_gqa"] = True
        if _windowed(task.variant):
            options["attn_mask"] = torch.from_numpy(_band(task.variant, task.sizes))
        elif _is_causal(task.variant) and task.sizes.query_len > 1:
            options["is_causal"] = True
        if "key_mask" in task.feeds:
            options["attn_mask"] = torch.from_numpy(task.feeds["key_mask"])[:, None, None]

        def attend(q: Any, k: Any, v: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        run = torch.compile(attend) if compiled else attend
        return _torch_call(lambda: run(query, key, value))

    return prepare


def _windowed(variant: Any) -> bool:
    return int(getattr(variant, "window_left", -1)) != -1


def _band(variant: Any, sizes: Sizes) -> NDArray[np.bool_]:
    """A causal window with sinks as a mask ``[query_len, kv_len]``."""
    queries = np.arange(sizes.kv_len)[-sizes.query_len :, None]
    keys = np.arange(sizes.kv_len)[None]
    near = queries - keys <= variant.window_left
    return (keys <= queries) & (near | (keys < getattr(variant, "sinks", 0)))


def _torch_flex(task: Task) -> Prepared:
    """``flex_attention``, compiled: the window's blocks only."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = _tensors(task)
    left, sinks = task.variant.window_left, getattr(task.variant, "sinks", 0)

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((q - k <= left) | (k < sinks))

    sizes = task.sizes
    mask = create_block_mask(visible, None, None, sizes.query_len, sizes.kv_len, device="cpu")
    run = torch.compile(flex_attention)
    return _torch_call(lambda: run(query, key, value, block_mask=mask, scale=task.variant.scale))


def _torch_linear(compiled: bool) -> Callable[[Task], Prepared]:
    """Causal linear attention with elu + 1 by chunks of 64, in plain torch."""

    def prepare(task: Task) -> Prepared:
        import torch

        if task.sizes.kv_len % 64 or task.variant.heads.group > 1:
            raise ValueError("written for whole chunks of 64 and equal heads")

        def attend(query: Any, key: Any, value: Any) -> Any:
            batch, heads, length, dim = query.shape
            q = (torch.nn.functional.elu(query) + 1).view(batch, heads, -1, 64, dim)
            k = (torch.nn.functional.elu(key) + 1).view(batch, heads, -1, 64, dim)
            v = torch.nn.functional.pad(value, (0, 1), value=1.0).view(
                batch, heads, -1, 64, dim + 1
            )
            sums = k.transpose(-1, -2) @ v
            state = torch.cumsum(sums, dim=2) - sums
            out = torch.tril(q @ k.transpose(-1, -2)) @ v + q @ state
            return (out[..., :-1] / out[..., -1:]).view(batch, heads, length, dim)

        run = torch.compile(attend) if compiled else attend
        tensors = _tensors(task)
        return _torch_call(lambda: run(*tensors))

    return prepare


ENGINES: Mapping[str, Engine] = {
    "kernel": Engine(_subquad(True)),
    "body": Engine(_subquad(False)),
    "ORT GroupQueryAttention": Engine(_microsoft("GroupQueryAttention")),
    "ORT MultiHeadAttention": Engine(_microsoft("MultiHeadAttention")),
    # The kernel without its feature map and normaliser, which are given to it free.
    "ORT LinearAttention": Engine(
        _microsoft("LinearAttention", update_rule="linear", scale=1.0), comparable=False
    ),
    "ORT Attention": Engine(_onnx_attention, scratch=_scores),
    "torch SDPA": Engine(
        _torch_sdpa(False),
        scratch=lambda variant, sizes: _scores(variant, sizes) if _windowed(variant) else 0,
    ),
    "torch.compile SDPA": Engine(_torch_sdpa(True)),
    "torch.compile flex_attention": Engine(_torch_flex),
    "torch chunked": Engine(_torch_linear(False)),
    "torch.compile chunked": Engine(_torch_linear(True)),
}


def needs_torch(engine: str) -> bool:
    """Whether an engine lives in the process with torch."""
    return engine.startswith("torch")
