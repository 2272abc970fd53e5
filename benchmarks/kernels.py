"""Times CPU kernels, called through TVM directly, against torch and ONNX Runtime.

    python benchmarks/kernels.py --rounds 20 --output kernels.json
    python benchmarks/kernels.py --workloads linear_elu --params chunk=96 --params rows=6,vectors=2

Candidates of a workload and a square GEMM run round-robin, so that a busy machine slows all alike;
what counts are medians over rounds of ratios within a round. With one thread CPU time is measured,
with more wall time. Each ``--params`` adds a candidate, our kernel with those parameters. A
workload's FLOPs are what its formula needs at least (half of the square where causal, real keys
only), so GF/s of different methods on one workload compare like their times.

Nothing is timed unless it agrees with the kernel's float64 reference on a shorter input first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.kernel import (
    CPU_TEMPLATES,
    CpuTarget,
    kernel_symbol,
    load_template,
)
from subquad.kernels.operator import OperatorVariant, present_inputs

GEMM = 768
CHECK_LENGTH, TOLERANCE = 200, 1e-5
TARGETS = {"x86-64-v3": CpuTarget("x86-64-v3", "x86-64-v3")}

Feeds = dict[str, NDArray[Any]]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """One shape and the candidates for it.

    Attributes:
        real: fraction of the keys that are real; the others are padding on the right.
        flops: from (queries, real keys) per head and batch row.
        rivals: name -> (feeds, threads) -> call.
    """

    variant: Any
    batch: int
    length: int
    flops: Callable[[int, float], float]
    rivals: Mapping[str, Callable[[Any, Feeds, int], Call]] = field(default_factory=dict)
    real: float = 1.0

    def feeds(self, length: int) -> Feeds:
        rng = np.random.default_rng(0)
        heads = self.variant.heads
        mask = np.ones((self.batch, length), dtype=np.bool_)
        mask[:, max(1, int(length * self.real)) :] = False
        positions = np.tile(np.arange(length, dtype=np.int64), (self.batch, 1))

        def normal(num_heads: int, dim: int) -> NDArray[np.float32]:
            shape = (self.batch, num_heads, length, dim)
            return rng.standard_normal(shape).astype(np.float32)

        return {
            "query": normal(heads.num_heads, heads.head_dim),
            "key": normal(heads.num_kv_heads, heads.head_dim),
            "value": normal(heads.num_kv_heads, heads.value_dim),
            "key_mask": mask,
            "query_positions": positions,
            "key_positions": positions,
        }

    @property
    def total_flops(self) -> float:
        pairs = self.flops(self.length, self.length * self.real)
        return self.batch * self.variant.num_heads * pairs


def torch_sdpa(variant: Any, feeds: Feeds, threads: int) -> Call:
    """Scaled dot product attention, with torch's own causal flag or a key mask."""
    import torch

    torch.set_num_threads(threads)
    q, k, v = (torch.from_numpy(feeds[name]) for name in ("query", "key", "value"))
    options: dict[str, Any] = {"scale": variant.scale}
    if getattr(variant, "window_right", -1) == 0 or getattr(variant, "allowed_right", -1) == 0:
        options["is_causal"] = True
    elif variant.has_key_mask:
        options["attn_mask"] = torch.from_numpy(feeds["key_mask"])[:, None, None]
    if variant.heads.group > 1:
        options["enable_gqa"] = True

    def call() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return call


def onnxruntime_op(op_type: str, **attributes: Any) -> Callable[[Any, Feeds, int], Call]:
    """A com.microsoft attention on inputs already packed as it wants them."""

    def prepare(variant: Any, feeds: Feeds, threads: int) -> Call:
        heads = variant.heads
        own: dict[str, Any] = dict(attributes)
        if op_type == "GroupQueryAttention":
            own |= {"num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads}
        elif op_type == "MultiHeadAttention":
            own |= {"num_heads": heads.num_heads}
        else:
            own |= {"q_num_heads": heads.num_heads, "kv_num_heads": heads.num_kv_heads}
        batch, _, length, _ = feeds["query"].shape
        packed = {
            name: np.ascontiguousarray(feeds[name].transpose(0, 2, 1, 3)).reshape(batch, length, -1)
            for name in ("query", "key", "value")
        }
        inputs = ["query", "key", "value"]
        outputs = ["output"]
        if op_type == "GroupQueryAttention":
            inputs += ["", "", "last", "total"]
            outputs += ["present_key", "present_value"]
            packed["last"] = np.full(batch, length - 1, dtype=np.int32)
            packed["total"] = np.array(length, dtype=np.int32)
        elif op_type == "MultiHeadAttention" and variant.has_key_mask:
            inputs += ["", "lengths"]
            packed["lengths"] = feeds["key_mask"].sum(axis=1).astype(np.int32)
        elif op_type == "LinearAttention":
            outputs += ["state"]
        node = helper.make_node(op_type, inputs, outputs, domain="com.microsoft", **own)
        types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
        formal = [
            helper.make_tensor_value_info(name, types[array.dtype], array.shape)
            for name, array in packed.items()
        ]
        result = helper.make_tensor_value_info("output", TensorProto.FLOAT, [None, None, None])
        graph = helper.make_graph([node], "rival", formal, [result])
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return lambda: session.run(["output"], packed)

    return prepare


def softmax_flops(head_dim: int, causal: bool) -> Callable[[int, float], float]:
    return lambda queries, keys: 4.0 * queries * keys * head_dim * (0.5 if causal else 1.0)


def linear_flops(head_dim: int, chunk: int = 64) -> Callable[[int, float], float]:
    """Half a chunk of near keys, the product with the state, and its update."""
    return lambda queries, keys: queries * (2.0 * chunk * head_dim + 4.0 * head_dim**2)


def hybrid_flops(head_dim: int, window: int) -> Callable[[int, float], float]:
    linear = linear_flops(head_dim)
    return lambda queries, keys: linear(queries, keys) + 4.0 * queries * window * head_dim


SDPA = {"torch SDPA": torch_sdpa}
SIZES = (12, 12, 64, 64, 0.125)


def workloads(length: int) -> dict[str, Workload]:
    gqa = {"ORT GroupQueryAttention": onnxruntime_op("GroupQueryAttention", scale=0.125)}
    mha = {"ORT MultiHeadAttention": onnxruntime_op("MultiHeadAttention", scale=32**-0.5)}
    linear = {
        "ORT LinearAttention (core only)": onnxruntime_op(
            "LinearAttention", update_rule="linear", scale=1.0
        )
    }
    window = HybridVariant(*SIZES, 63, 0, 4, allowed_right=0, feature_map="elu")
    return {
        "dense_causal": Workload(
            AttentionVariant(*SIZES, window_right=0), 1, length, softmax_flops(64, True), SDPA | gqa
        ),
        "dense_full": Workload(
            AttentionVariant(*SIZES), 1, min(length, 2048), softmax_flops(64, False), SDPA
        ),
        "dense_causal_gqa": Workload(
            AttentionVariant(9, 3, 64, 64, 0.125, window_right=0),
            1,
            min(length, 2048),
            softmax_flops(64, True),
            SDPA | gqa,
        ),
        "dense_padded": Workload(
            AttentionVariant(12, 12, 32, 32, 32**-0.5, has_key_mask=True),
            8,
            512,
            softmax_flops(32, False),
            SDPA | mha,
            real=0.5,
        ),
        "linear_elu": Workload(
            HybridVariant(*SIZES, allowed_right=0, feature_map="elu"),
            1,
            length,
            linear_flops(64),
            linear,
        ),
        "hybrid_elu": Workload(window, 1, length, hybrid_flops(64, 64), SDPA),
        "window": Workload(
            HybridVariant(*SIZES, 255, 0, 4, allowed_right=0),
            1,
            length,
            lambda queries, keys: 4.0 * queries * 256 * 64,
            SDPA,
        ),
    }


class Kernel:
    """Our kernel, compiled once and called on any feeds."""

    def __init__(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]):
        import tvm

        template = load_template(variant.op_type, CPU_TEMPLATES)
        assert not hasattr(template, "reason"), template
        self.variant: Any = variant
        function = template.build(variant, target, params)  # type: ignore[union-attr]
        self._executable = tvm.compile(function, target=target.tvm_target())
        self._function = self._executable.mod[kernel_symbol(variant)]

    def prepare(self, feeds: Feeds) -> tuple[Call, NDArray[np.float32]]:
        import tvm_ffi

        output = np.empty((*feeds["query"].shape[:3], self.variant.value_dim), dtype=np.float32)
        arrays = [*(feeds[name] for name in present_inputs(self.variant)), output]
        tensors = [tvm_ffi.from_dlpack(array) for array in arrays]
        return lambda: self._function(*tensors), output

    def check(self, feeds: Feeds) -> None:
        call, output = self.prepare(feeds)
        call()
        want = self.variant.reference(**{n: feeds[n] for n in present_inputs(self.variant)})
        error = float(np.linalg.norm(output - want) / np.linalg.norm(want))
        if not error < TOLERANCE:
            raise SystemExit(f"{self.variant.overload}: relative error {error}; nothing timed")


def measure(
    name: str, workload: Workload, options: argparse.Namespace, target: CpuTarget
) -> dict[str, Any]:
    feeds = workload.feeds(workload.length)
    calls: dict[str, Call] = {}
    for params in [{}, *options.params]:
        kernel = Kernel(workload.variant, target, params)
        kernel.check(workload.feeds(min(CHECK_LENGTH, workload.length)))
        label = ",".join(f"{key}={value}" for key, value in params.items())
        calls[f"subquad {label}".strip()], _ = kernel.prepare(feeds)
    for rival, prepare in workload.rivals.items():
        calls[rival] = prepare(workload.variant, feeds, options.threads)
    calls["GEMM"] = gemm(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {candidate: [] for candidate in calls}
    for call in calls.values():
        call()
    for _ in range(options.rounds):
        for candidate, call in calls.items():
            start = clock()
            call()
            times[candidate].append(clock() - start)
    flops = {candidate: workload.total_flops for candidate in calls} | {"GEMM": 2.0 * GEMM**3}
    rates = {key: flops[key] / np.array(values) / 1e9 for key, values in times.items()}
    ours = np.array(times["subquad"])
    return {
        "workload": name,
        "overload": workload.variant.overload,
        "batch": workload.batch,
        "length": workload.length,
        "real_keys": workload.real,
        "candidates": {
            candidate: {
                "median_ms": float(np.median(values)) * 1e3,
                "best_ms": min(values) * 1e3,
                "gflops": float(np.median(rates[candidate])),
                "share_of_gemm_rate": float(np.median(rates[candidate] / rates["GEMM"])),
                "subquad_over_this": float(np.median(ours / np.array(values))),
                "quartiles": [float(x) for x in np.quantile(ours / np.array(values), [0.25, 0.75])],
            }
            for candidate, values in times.items()
        },
    }


def gemm(threads: int) -> Call:
    import torch

    torch.set_num_threads(threads)
    left, right = torch.rand(GEMM, GEMM), torch.rand(GEMM, GEMM)
    return lambda: left @ right


def parse_params(text: str) -> dict[str, int]:
    pairs = (item.split("=") for item in text.split(","))
    return {key: int(value) for key, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", choices=list(TARGETS), default="x86-64-v3")
    parser.add_argument("--workloads", nargs="+", choices=list(workloads(1)), default=None)
    parser.add_argument("--params", type=parse_params, action="append", default=[])
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output")
    options = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "TVM_NUM_THREADS"):
        os.environ[variable] = str(options.threads)
    # Threads that wait for work of one candidate must not spin on the next one's cores.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch
    import tvm

    known = workloads(options.length)
    results = []
    for name in options.workloads or known:
        results.append(measure(name, known[name], options, TARGETS[options.target]))
        print(f"{name}:", file=sys.stderr)
        for candidate, row in results[-1]["candidates"].items():
            print(
                f"  {candidate:40} {row['best_ms']:9.2f} ms best, {row['gflops']:6.1f} GF/s, "
                f"{row['share_of_gemm_rate']:5.2f} of GEMM, "
                f"subquad / this {row['subquad_over_this']:5.2f}",
                file=sys.stderr,
            )
    report = {
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count()},
        "versions": {
            "onnxruntime": ort.__version__,
            "torch": torch.__version__,
            "tvm": tvm.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            "threads": options.threads,
            "rounds": options.rounds,
            "clock": "CPU time" if options.threads == 1 else "wall time",
            "target": options.target,
            "seed": 0,
        },
        "results": results,
    }
    text = json.dumps(report, indent=2)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
