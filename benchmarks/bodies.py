"""Times function bodies against ONNX Runtime's own attention, on this machine.

    python benchmarks/bodies.py --length 4096 --rounds 10 --threads 1 --output bodies.json

Candidates of a group and a square GEMM run round-robin, so that a busy machine slows all alike;
what is reported is the median over rounds of the ratio to the group's first candidate. A run whose
GEMM times spread more than 15 % between quartiles says so (``"quiet": false``): trust only large
ratios then. Every candidate runs in its own process once more to read its peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.one_node import one_node_model

HEADS, DIM, SCALE, WINDOW = 12, 64, 0.125, 128
SIZES = (HEADS, HEADS, DIM, DIM, SCALE)
GEMM = 768
Feeds = dict[str, NDArray[Any]]


def standard() -> onnx.ModelProto:
    """MatMul, Add, Softmax, MatMul with an additive ``[query_len, kv_len]`` mask."""
    nodes = [
        helper.make_node("Transpose", ["key"], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("Mul", ["query", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "kt"], ["scores"]),
        helper.make_node("Add", ["scores", "bias"], ["biased"]),
        helper.make_node("Softmax", ["biased"], ["weights"]),
        helper.make_node("MatMul", ["weights", "value"], ["output"]),
    ]
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [1], [SCALE])
    return model_of(nodes, ["query", "key", "value", "bias"], [scale])


def onnx_attention(is_causal: bool) -> onnx.ModelProto:
    """``Attention`` of opset 24."""
    names = ["query", "key", "value"]
    node = helper.make_node("Attention", names, ["output"], is_causal=int(is_causal), scale=SCALE)
    return model_of([node], names)


SPARE_OUTPUTS = {
    "GroupQueryAttention": ("present_key", "present_value"),
    "LinearAttention": ("state",),
}


def microsoft(op_type: str, **attributes: Any) -> onnx.ModelProto:
    """A com.microsoft attention with the transpositions it needs around it."""
    names = ["query", "key", "value"]
    nodes = []
    for name in names:
        nodes.append(helper.make_node("Transpose", [name], [f"{name}_t"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"{name}_t", "packed"], [f"{name}_p"]))
    inputs = [f"{name}_p" for name in names]
    extra = []
    if op_type == "GroupQueryAttention":
        inputs += ["", "", "last", "total"]
        extra = ["last", "total"]
    outputs = ["attended", *SPARE_OUTPUTS.get(op_type, ())]
    nodes += [
        helper.make_node(
            op_type,
            inputs,
            outputs,
            domain="com.microsoft",
            **attributes,
        ),
        helper.make_node("Reshape", ["attended", "unpacked"], ["split"]),
        helper.make_node("Transpose", ["split"], ["output"], perm=[0, 2, 1, 3]),
    ]
    packed = helper.make_tensor("packed", TensorProto.INT64, [3], [0, 0, HEADS * DIM])
    unpacked = helper.make_tensor("unpacked", TensorProto.INT64, [4], [0, 0, HEADS, DIM])
    return model_of(nodes, names + extra, [packed, unpacked])


def grouped(**attributes: Any) -> onnx.ModelProto:
    return microsoft(
        "GroupQueryAttention", num_heads=HEADS, kv_num_heads=HEADS, scale=SCALE, **attributes
    )


def linear_attention() -> onnx.ModelProto:
    """com.microsoft LinearAttention without feature map or normaliser: its core alone."""
    return microsoft(
        "LinearAttention", q_num_heads=HEADS, kv_num_heads=HEADS, update_rule="linear", scale=1.0
    )


INPUT_TYPES = {
    "last": (TensorProto.INT32, 1),
    "total": (TensorProto.INT32, 0),
    "bias": (TensorProto.FLOAT, 4),
}


def model_of(
    nodes: list[onnx.NodeProto], names: list[str], constants: list[onnx.TensorProto] | None = None
) -> onnx.ModelProto:
    inputs = []
    for name in names:
        element, rank = INPUT_TYPES.get(name, (TensorProto.FLOAT, 4))
        dims = [f"{name}_{axis}" for axis in range(rank)]
        inputs.append(helper.make_tensor_value_info(name, element, dims))
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["b", "h", "n", "d"])
    graph = helper.make_graph(nodes, "candidate", inputs, [output], constants or [])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def ours(variant: AttentionVariant | HybridVariant) -> Callable[[], onnx.ModelProto]:
    return lambda: one_node_model(variant)


GROUPS: dict[str, dict[str, Callable[[], onnx.ModelProto]]] = {
    "full": {
        "ai.subquad Attention": ours(AttentionVariant(*SIZES)),
        "ai.subquad Attention, key mask": ours(AttentionVariant(*SIZES, has_key_mask=True)),
        "MultiHeadAttention": lambda: microsoft("MultiHeadAttention", num_heads=HEADS, scale=SCALE),
        "Attention-24": lambda: onnx_attention(False),
        "standard ops": standard,
    },
    "causal": {
        "ai.subquad Attention": ours(AttentionVariant(*SIZES, window_right=0)),
        "ai.subquad Attention, key mask": ours(
            AttentionVariant(*SIZES, window_right=0, has_key_mask=True)
        ),
        "GroupQueryAttention": grouped,
        "Attention-24": lambda: onnx_attention(True),
    },
    "window": {
        "ai.subquad HybridAttention, 4 sinks, key mask": ours(
            HybridVariant(*SIZES, WINDOW - 1, 0, 4, allowed_right=0, has_key_mask=True)
        ),
        "ai.subquad HybridAttention, 4 sinks": ours(
            HybridVariant(*SIZES, WINDOW - 1, 0, 4, allowed_right=0)
        ),
        "ai.subquad Attention, no sinks": ours(
            AttentionVariant(*SIZES, window_left=WINDOW - 1, window_right=0)
        ),
        "GroupQueryAttention, local window": lambda: grouped(local_window_size=WINDOW),
        "GroupQueryAttention, whole past": grouped,
    },
    "linear": {
        "ai.subquad HybridAttention, elu, causal": ours(
            HybridVariant(*SIZES, allowed_right=0, feature_map="elu")
        ),
        "ai.subquad HybridAttention, elu, full": ours(HybridVariant(*SIZES, feature_map="elu")),
        "ai.subquad HybridAttention, elu, causal, window, 4 sinks": ours(
            HybridVariant(*SIZES, WINDOW - 1, 0, 4, allowed_right=0, feature_map="elu")
        ),
        "LinearAttention, causal, core only": linear_attention,
        "GroupQueryAttention, causal softmax": grouped,
    },
}


def make_feeds(length: int) -> Feeds:
    """Every input any candidate reads; 5 % of the keys are padding on the left."""
    rng = np.random.default_rng(0)
    shape = (1, HEADS, length, DIM)
    mask = np.ones((1, length), dtype=np.bool_)
    mask[:, : length // 20] = False
    positions = np.arange(length, dtype=np.int64)[None] - length // 20
    return {
        "query": rng.standard_normal(shape).astype(np.float32),
        "key": rng.standard_normal(shape).astype(np.float32),
        "value": rng.standard_normal(shape).astype(np.float32),
        "key_mask": mask,
        "query_positions": positions,
        "key_positions": positions,
        "last": np.array([length - 1], dtype=np.int32),
        "total": np.array(length, dtype=np.int32),
    }


def make_session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_once(session: ort.InferenceSession, feeds: Feeds) -> float:
    """Seconds of one run."""
    wanted = {}
    for value in session.get_inputs():
        if value.name == "bias":
            length = feeds["key"].shape[2]
            wanted["bias"] = np.zeros((1, 1, 1, length), dtype=np.float32)
        else:
            wanted[value.name] = feeds[value.name]
    start = time.perf_counter()
    session.run(None, wanted)
    return time.perf_counter() - start


def gemm_model() -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["query", "key"], ["output"])]
    return model_of(nodes, ["query", "key"])


def measure(group: str, length: int, rounds: int, threads: int) -> dict[str, Any]:
    feeds = make_feeds(length)
    sessions = {name: make_session(build(), threads) for name, build in GROUPS[group].items()}
    gemm = make_session(gemm_model(), threads)
    square = np.random.default_rng(1).standard_normal((1, 1, GEMM, GEMM)).astype(np.float32)
    square_feeds = {"query": square, "key": square}
    for session in sessions.values():
        run_once(session, feeds)
    run_once(gemm, square_feeds)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    gemm_times = []
    for _ in range(rounds):
        for name, session in sessions.items():
            times[name].append(run_once(session, feeds))
        gemm_times.append(run_once(gemm, square_feeds))
    base = np.array(times[next(iter(times))])
    quartiles = np.quantile(gemm_times, [0.25, 0.5, 0.75])
    return {
        "group": group,
        "length": length,
        "gemm_gflops": 2 * GEMM**3 / quartiles[1] / 1e9,
        "quiet": bool((quartiles[2] - quartiles[0]) / quartiles[1] < 0.15),
        "candidates": {
            name: {
                "median_ms": float(np.median(values)) * 1e3,
                "best_ms": min(values) * 1e3,
                "median_ratio_to_first": float(np.median(np.array(values) / base)),
                "ratio_quartiles": [float(x) for x in np.quantile(values / base, [0.25, 0.75])],
                "peak_mib": peak_mib(group, name, length, threads),
            }
            for name, values in times.items()
        },
    }


def peak_mib(group: str, name: str, length: int, threads: int) -> float:
    """Growth of the peak resident set over one run, in a process of its own."""
    command = [sys.executable, __file__, "--length", str(length), "--threads", str(threads)]
    done = subprocess.run(
        [*command, "--memory-of", group, name], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def print_memory(group: str, name: str, length: int, threads: int) -> None:
    feeds = make_feeds(length)
    session = make_session(GROUPS[group][name](), threads)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # Linux: reset the peak resident set.
    before = peak_resident_mib()
    run_once(session, feeds)
    print(peak_resident_mib() - before)


def peak_resident_mib() -> float:
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = [line for line in file if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--output", default="-", help="JSON file; - is standard output")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print_memory(*options.memory_of, options.length[0], options.threads)
        return
    report = {
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count()},
        "versions": {"onnxruntime": ort.__version__, "python": platform.python_version()},
        "settings": {"heads": HEADS, "head_dim": DIM, "batch": 1, "window": WINDOW}
        | {"threads": options.threads, "rounds": options.rounds, "seed": 0},
        "results": [
            measure(group, length, options.rounds, options.threads)
            for length in options.length
            for group in options.groups
        ],
    }
    text = json.dumps(report, indent=2)
    if options.output == "-":
        print(text)
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
