"""The contract between kernel templates and the host that builds and calls them.

A kernel is compiled per operator variant, all static choices baked in. A template turns a variant
into a TVM function; the host (``kernels/host/``) compiles it in a child process and links it into
one ONNX Runtime custom-op library per target.

What a template's function must do:

* its ``global_symbol`` is ``kernel_symbol(variant)``;
* arguments are the inputs the variant has, in the operator's order, then its outputs; shapes and
  dtypes are those of the specs (``templates/function.py`` declares them), symbols never 0;
* buffers are compact but aligned to their elements only: ``T.match_buffer(..., align=4)`` for
  float32 and int32, 8 for int64, 1 for bool;
* it writes every element of its outputs;
* it is parallel by ``T.parallel`` only, and nothing in it waits for another iteration: the host
  gives the iterations to ONNX Runtime's thread pool, in any number of contiguous runs and in any
  order. A parallel loop inside a parallel loop runs serially;
* buffers it allocates come from the host (``TVMBackendAllocWorkspace``) or the stack.

Templates import TVM inside ``build`` only; ``supports`` runs where TVM is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class CpuTarget:
    """One instruction set to compile for.

    Attributes:
        name: part of the artifact's paths, e.g. ``x86-64-v3``.
        mcpu: LLVM's name of it.
        features: LLVM attributes on top, e.g. ``-prefer-256-bit``.
        flags: what a processor must have to run it, as in ``/proc/cpuinfo``.
    """

    name: str
    mcpu: str
    features: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def tvm_target(self) -> Any:
        """The ``tvm.target.Target``."""
        from tvm.target import Target

        spec: dict[str, Any] = {"kind": "llvm", "mcpu": self.mcpu}
        if self.features:
            spec["mattr"] = list(self.features)
        return Target(spec)


class KernelTemplate(Protocol):
    """Builds the kernels of one operator on one kind of device."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        """Why this variant has no kernel; ``None`` if it has one. Must not import TVM."""

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        """The kernel as a TVM ``PrimFunc`` or ``IRModule``; see the module docstring.

        Args:
            variant: one that ``supports`` accepts.
            target: for choices that depend on the instruction set.
            params: tuning parameters; those not named take the template's defaults.

        Raises:
            ValueError: unknown parameter or value.
        """


class TunableTemplate(KernelTemplate, Protocol):
    """A template whose parameters can be searched; see ``kernels/tuning``."""

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        """The parameters worth trying for a supported ``variant``. Must not import TVM."""


CPU_TEMPLATES: Mapping[str, str] = {
    "Attention": "subquad.kernels.attention.cpu:TEMPLATE",
    "BlockSelect": "subquad.kernels.block_select.cpu:TEMPLATE",
    "BlockSparseAttention": "subquad.kernels.block_sparse.cpu:TEMPLATE",
    "HybridAttention": "subquad.kernels.hybrid.cpu:TEMPLATE",
    "HybridDecode": "subquad.kernels.hybrid_decode.cpu:TEMPLATE",
    "HybridState": "subquad.kernels.hybrid_decode.cpu:TEMPLATE",
}
"""Operator -> ``module:attribute`` of its CPU template."""

GPU_TEMPLATES: Mapping[str, str] = {
    "Attention": "subquad.kernels.attention.cuda:TEMPLATE",
    "HybridAttention": "subquad.kernels.hybrid.cuda:TEMPLATE",
}
"""Operator -> ``module:attribute`` of its GPU template, whose ``build`` takes a ``GpuTarget``."""


def load_template(op_type: str, templates: Mapping[str, str]) -> KernelTemplate | Rejection:
    """The template of an operator, imported; or why there is none."""
    place = templates.get(op_type)
    if place is None:
        return Rejection(f"operator {op_type} has no kernel template for this target")
    module, _, attribute = place.partition(":")
    if importlib.util.find_spec(module) is None:
        return Rejection(f"operator {op_type} has no kernel template yet ({module})")
    template: KernelTemplate = getattr(importlib.import_module(module), attribute)
    return template


def kernel_symbol(variant: OperatorVariant) -> str:
    """``global_symbol`` of the kernel of ``variant``."""
    return "subquad_" + re.sub(r"\W", "_", variant.overload, flags=re.ASCII)
