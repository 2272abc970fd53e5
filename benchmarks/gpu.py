"""The CUDA kernels on a GPU: errors against float64, times against torch SDPA.

``--compile-only`` needs no GPU: it prints what the compiler says of the kernels, for each target.

Exit codes: 0 measured; 3 a kernel is wrong, which ends the run; 6 no GPU here or a tool is missing.

Every kernel is checked against its float64 reference first, at lengths that are no multiple of a
tile; what is wrong is not timed. Then candidates take turns, CUDA events around each call; reported
are medians, and the median of the ratios of neighbouring calls with its quartiles. A run takes no
longer than ``--seconds`` (200).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.gpu import CUDA_TARGETS, GpuTarget
from subquad.kernels.host.build import run_tool
from subquad.kernels.host.gpu_build import COMPILER, GpuLibrary, build_gpu_kernels
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.operator import OperatorVariant, present_inputs
from subquad.runtime.errors import TargetUnavailableError
from subquad.runtime.gpu_kernels import GpuKernel, compute_capability, load_kernel
from subquad.runtime.machine import versions

WRONG, UNAVAILABLE = 3, 6
TOLERANCE = 1e-6
"""Relative error in the 2-norm: float32 sums of some 1000 terms."""
CHECK_LENGTHS = (1, 65, 1000)
WARM_UP = 3

Call = Callable[[], Any]
Feeds = Mapping[str, NDArray[Any]]
SIZES = (12, 12, 64, 64, 0.125)


@dataclass(frozen=True)
class Workload:
    """``real``: share of the keys that are not padding, on the right."""

    variant: Any
    batch: int
    length: int
    real: float = 1.0

    def feeds(self, length: int) -> dict[str, NDArray[Any]]:
        rng = np.random.default_rng(0)
        heads = self.variant.heads
        mask = np.ones((self.batch, length), dtype=np.bool_)
        mask[:, max(1, int(length * self.real)) :] = False
        positions = np.tile(np.arange(length, dtype=np.int64), (self.batch, 1))

        def normal(num_heads: int, dim: int) -> NDArray[np.float32]:
            shape = (self.batch, num_heads, length, dim)
            return rng.standard_normal(shape).astype(np.float32)

        every = {
            "query": normal(heads.num_heads, heads.head_dim),
            "key": normal(heads.num_kv_heads, heads.head_dim),
            "value": normal(heads.num_kv_heads, heads.value_dim),
            "key_mask": mask,
            "query_positions": positions,
            "key_positions": positions,
        }
        return {name: every[name] for name in present_inputs(self.variant)}


WORKLOADS = {
    "dense_causal": Workload(AttentionVariant(*SIZES, window_right=0), 1, 8192),
    "dense_causal_gqa": Workload(AttentionVariant(32, 8, 128, 128, 0.088, window_right=0), 1, 4096),
    "dense_causal_wide": Workload(
        AttentionVariant(8, 2, 256, 256, 0.0625, window_right=0), 1, 4096
    ),
    "dense_padded": Workload(
        AttentionVariant(12, 12, 32, 32, 0.177, has_key_mask=True), 8, 512, real=0.5
    ),
    "linear_elu": Workload(HybridVariant(*SIZES, allowed_right=0, feature_map="elu"), 1, 8192),
    "hybrid_elu": Workload(
        HybridVariant(*SIZES, 63, 0, 4, allowed_right=0, feature_map="elu"), 1, 8192
    ),
    "window": Workload(HybridVariant(*SIZES, 255, 0, 4, allowed_right=0), 1, 8192),
}


class Kernel:
    """A loaded kernel on tensors that stay on the GPU."""

    def __init__(self, workload: Workload, library: GpuLibrary) -> None:
        self.workload = workload
        self.kernel: GpuKernel = load_kernel(library.path, library.description)

    def prepare(self, feeds: Feeds) -> tuple[Call, Any]:
        import torch

        tensors = {name: torch.from_numpy(array).cuda() for name, array in feeds.items()}
        heads = self.workload.variant.heads
        shape = (*feeds["query"].shape[:3], heads.value_dim)
        output = torch.full(shape, float("nan"), device="cuda")
        return lambda: self.kernel(**tensors, output=output), output

    def error(self, length: int) -> float:
        """Relative error against float64."""
        feeds = self.workload.feeds(length)
        call, output = self.prepare(feeds)
        call()
        want = self.workload.variant.reference(**feeds)
        return float(np.linalg.norm(output.cpu().numpy() - want) / np.linalg.norm(want))


def torch_sdpa(workload: Workload, feeds: Feeds) -> Call:
    """Exact attention over the same keys, causal where the workload is; float32 without TF32."""
    import torch

    q, k, v = (torch.from_numpy(feeds[name]).cuda() for name in ("query", "key", "value"))
    variant = workload.variant
    options: dict[str, Any] = {"scale": variant.scale, "enable_gqa": variant.heads.group > 1}
    if variant.has_positions:
        options["is_causal"] = True
    elif "key_mask" in feeds:
        options["attn_mask"] = torch.from_numpy(feeds["key_mask"]).cuda()[:, None, None]
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def milliseconds(call: Call) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(kernel: Kernel, rounds: int, until: float) -> dict[str, Any]:
    workload = kernel.workload
    feeds = workload.feeds(workload.length)
    calls = {"subquad": kernel.prepare(feeds)[0], "torch SDPA": torch_sdpa(workload, feeds)}
    for _ in range(WARM_UP):
        for call in calls.values():
            milliseconds(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        if time.monotonic() > until:
            break
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    ratios = np.array(times["subquad"]) / np.array(times["torch SDPA"])
    return {
        "rounds": len(ratios),
        "median_ms": {name: float(np.median(values)) for name, values in times.items() if values},
        "subquad_over_torch": float(np.median(ratios)) if len(ratios) else None,
        "quartiles": [float(x) for x in np.quantile(ratios, [0.25, 0.75])] if len(ratios) else [],
    }


def target_of(capability: tuple[int, int]) -> GpuTarget:
    """The target whose machine code this GPU runs."""
    major, minor = capability
    able = [t for t in CUDA_TARGETS.values() if int(t.arch[3:-1]) == major]
    able = [t for t in able if int(t.arch[-1]) <= minor]
    if not able:
        known = ", ".join(CUDA_TARGETS)
        raise TargetUnavailableError(f"This GPU is sm_{major}{minor}; kernels exist for {known}.")
    return able[-1]


def machine(target: GpuTarget) -> dict[str, Any]:
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "cuda": torch.version.cuda,
        "target": target.name,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(("torch", "apache-tvm", "apache-tvm-ffi", "numpy")),
    }


def build(
    variants: Sequence[OperatorVariant], target: GpuTarget
) -> dict[tuple[str, str], GpuLibrary]:
    """Operator and overload -> library.

    Raises:
        TargetUnavailableError: a kernel cannot be compiled.
    """
    built = build_gpu_kernels(variants, target)
    for key, refusal in built.declined.items():
        raise TargetUnavailableError(f"{key[1]}: {refusal.reason}")
    return {(i.description["op_type"], i.description["overload"]): i for i in built.libraries}


@dataclass(frozen=True)
class Usage:
    """What the largest launch of a function uses; sizes in bytes."""

    registers: int
    spilled: int
    shared_memory: int
    blocks: int


def usage_of(library: GpuLibrary, target: GpuTarget) -> Usage:
    """Of the launch with most shared memory; ``spilled`` is the sum over all launches.

    ``blocks``: how many blocks of threads a multiprocessor holds at a time, by registers, shared
    memory and threads.
    """
    kernels = library.description["kernels"].values()

    def shared(kernel: Mapping[str, Any]) -> int:
        return int(kernel["static_shared_memory"]) + int(kernel["dynamic_shared_memory"])

    kernel = max(kernels, key=shared)
    tags = zip(kernel["parameters"], kernel["values"], strict=True)
    threads = math.prod(int(value) for tag, value in tags if tag.startswith("threadIdx"))
    registers = int(kernel["registers"])
    blocks = min(
        target.blocks_by_registers(threads, registers),
        target.blocks_by_shared_memory(shared(kernel)),
        target.blocks_by_threads(threads),
    )
    spilled = sum(k["spill_stores"] + k["spill_loads"] for k in kernels)
    return Usage(registers, spilled, shared(kernel), blocks)


def compiled_table(names: Sequence[str]) -> str:
    """What the compiler says of the kernels of these workloads, a Markdown table.

    Raises:
        TargetUnavailableError: a kernel cannot be compiled.
    """
    variants = {name: WORKLOADS[name].variant for name in names}
    targets = sorted(CUDA_TARGETS.values(), key=lambda target: target.arch, reverse=True)
    libraries = {target.arch: build(list(variants.values()), target) for target in targets}
    release = run_tool([COMPILER, "--version"], Path()).partition("release ")[2].partition(",")[0]
    lines = [
        f"Largest launch of each kernel, {COMPILER} {release}, {' / '.join(libraries)}:",
        "",
        "| workload | head dim | registers | spilled bytes | shared memory per block "
        "| blocks at a time |",
        "|---|---|---|---|---|---|",
    ]
    for name, variant in variants.items():
        key = variant.op_type, variant.overload
        usages = [usage_of(libraries[target.arch][key], target) for target in targets]
        cells = [
            [str(usage.registers) for usage in usages],
            [str(usage.spilled) for usage in usages],
            [f"{usage.shared_memory / 1000:.1f} kB" for usage in usages],
            [str(usage.blocks) for usage in usages],
        ]
        columns = [name, str(variant.head_dim), *(" / ".join(cell) for cell in cells)]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All results.

    Raises:
        TargetUnavailableError: no GPU, or kernels cannot be compiled or loaded.
        ArithmeticError: a kernel is wrong.
    """
    began = time.monotonic()
    target = target_of(compute_capability())
    import torch

    if not torch.cuda.is_available():
        raise TargetUnavailableError("This torch has no CUDA; the comparison needs it.")
    torch.backends.cuda.matmul.allow_tf32 = False
    chosen = {name: WORKLOADS[name] for name in options.workloads or WORKLOADS}
    libraries = build([w.variant for w in chosen.values()], target)
    kernels = {}
    results: dict[str, dict[str, Any]] = {}
    for name, workload in chosen.items():
        variant = workload.variant
        library = libraries[variant.op_type, variant.overload]
        kernels[name] = Kernel(workload, library)
        errors = {str(length): kernels[name].error(length) for length in CHECK_LENGTHS}
        print(f"{name}: errors {errors}", file=sys.stderr)
        if not max(errors.values()) < TOLERANCE:
            raise ArithmeticError(f"{name}: {errors}; tolerance {TOLERANCE}; nothing timed")
        results[name] = {"overload": variant.overload, "length": workload.length, "errors": errors}
    for done, (name, kernel) in enumerate(kernels.items()):
        left = options.seconds - (time.monotonic() - began)
        until = time.monotonic() + left / (len(kernels) - done)
        results[name] |= measure(kernel, options.rounds, until)
        print(f"{name}: {results[name]}", file=sys.stderr)
    settings = {"rounds": options.rounds, "seconds": options.seconds, "seed": 0, "tf32": False}
    return {"machine": machine(target), "settings": settings, "results": results}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--output", type=Path, help="JSON file; default: standard output")
    parser.add_argument("--compile-only", action="store_true", help="print registers and memory")
    options = parser.parse_args(arguments)
    try:
        if options.compile_only:
            print(compiled_table(options.workloads or list(WORKLOADS)))
            return 0
        report = run(options)
    except TargetUnavailableError as error:
        print(f"nothing measured: {error}", file=sys.stderr)
        return UNAVAILABLE
    except ArithmeticError as error:
        print(f"wrong result: {error}", file=sys.stderr)
        return WRONG
    text = json.dumps(report, indent=2) + "\n"
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
