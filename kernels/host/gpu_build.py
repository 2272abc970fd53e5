"""Compile the GPU kernels of an artifact: one library per variant and target, no GPU needed.

As ``build.py``, in the same child process and cache. The libraries are for ``tvm_ffi.load_module``,
not for ONNX Runtime: the model's graph stays as it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.kernels.gpu import CUDA_TARGETS, GpuTarget
from subquad.kernels.host.build import (
    KERNEL_SECONDS,
    Job,
    VariantKey,
    cache_folder,
    compile_jobs,
    missing_tools,
    object_key,
    run_tool,
    variant_key,
)
from subquad.kernels.kernel import GPU_TEMPLATES, kernel_symbol, load_template
from subquad.kernels.operator import Dim, OperatorVariant, TensorSpec
from subquad.runtime.errors import Rejection, UsageError

COMPILER = "nvcc"


@dataclass(frozen=True)
class GpuLibrary:
    """One kernel for one target; the file lies in the cache.

    Attributes:
        description: what its caller must know, and what the compiler says of it, as JSON.
    """

    path: Path
    symbol: str
    description: Mapping[str, Any]


@dataclass(frozen=True)
class GpuBuild:
    """What was built for one target.

    Attributes:
        libraries: one per variant of ``served``.
        served: variants with a kernel -> the template that made it.
        declined: variants without, each with its reason.
    """

    target: GpuTarget
    libraries: tuple[GpuLibrary, ...] = ()
    served: Mapping[VariantKey, str] = field(default_factory=dict)
    declined: Mapping[VariantKey, Rejection] = field(default_factory=dict)


def parse_target(text: str) -> GpuTarget:
    """``cuda:sm_90``.

    Raises:
        UsageError: another text, or a GPU for which kernels were never compiled.
    """
    kind, _, arch = text.partition(":")
    if kind != "cuda" or arch not in CUDA_TARGETS:
        known = ", ".join(f"cuda:{name}" for name in CUDA_TARGETS)
        raise UsageError(f"unknown target {text!r}; known: {known}")
    return CUDA_TARGETS[arch]


def missing_gpu_tools() -> Rejection | None:
    """Why no GPU kernel can be compiled on this machine; ``None`` if all tools are there."""
    missing = missing_tools()
    if missing is not None:
        return missing
    if shutil.which(COMPILER) is None:
        return Rejection(f"{COMPILER} was not found: install the CUDA toolkit, no GPU is needed")
    return None


def build_gpu_kernels(
    variants: Sequence[OperatorVariant],
    target: GpuTarget,
    *,
    templates: Mapping[str, str] = GPU_TEMPLATES,
    params: Mapping[VariantKey, Mapping[str, int]] | None = None,
    kernel_seconds: float = KERNEL_SECONDS,
) -> GpuBuild:
    """Compile what can be compiled; never raises for what cannot.

    Args:
        variants: of the artifact's nodes; duplicates are built once.
        target: the GPU.
        templates: operator -> ``module:attribute``.
        params: tuning parameters of some variants; the others take their template's defaults.
        kernel_seconds: time limit of one compilation.
    """
    unique = {variant_key(variant): variant for variant in variants}
    missing = missing_gpu_tools()
    if missing is not None:
        return GpuBuild(target, declined={key: missing for key in unique})
    cache = cache_folder()
    release = run_tool([COMPILER, "--version"], Path())
    declined: dict[VariantKey, Rejection] = {}
    jobs: list[Job] = []
    for key, variant in sorted(unique.items()):
        template = load_template(variant.op_type, templates)
        refusal = template if isinstance(template, Rejection) else template.supports(variant)
        if refusal is not None:
            declined[key] = refusal
            continue
        place, chosen = templates[variant.op_type], (params or {}).get(key, {})
        name = object_key(variant, place, target, chosen, release)
        jobs.append(Job(variant, place, target, chosen, cache / f"{name}.json"))
    failed = compile_jobs([job for job in jobs if not job.object.exists()], kernel_seconds)
    declined |= {job.key: failed[job.object] for job in jobs if job.object in failed}
    good = [job for job in jobs if job.key not in declined]
    libraries = tuple(_library(job) for job in good)
    return GpuBuild(target, libraries, {job.key: job.template for job in good}, declined)


def _library(job: Job) -> GpuLibrary:
    variant = job.variant
    symbol = kernel_symbol(variant)
    description = {
        "op_type": variant.op_type,
        "overload": variant.overload,
        "symbol": symbol,
        "template": job.template,
        "params": dict(job.params),
        "inputs": [_spec(spec) for spec in variant.inputs if spec is not None],
        "outputs": [_spec(spec) for spec in variant.outputs],
        **json.loads(job.object.read_text("utf-8")),
    }
    return GpuLibrary(job.object.with_suffix(".so"), symbol, description)


def _spec(spec: TensorSpec) -> dict[str, Any]:
    def size(dim: Dim) -> str | int:
        return dim if isinstance(dim, str | int) else f"ceil({dim.dim} / {dim.size})"

    return {"name": spec.name, "dtype": spec.dtype, "dims": [size(dim) for dim in spec.dims]}
