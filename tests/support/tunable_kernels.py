"""A kernel template with one parameter that decides what goes wrong, for tests of tuning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import slow_kernels
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.kernel import CpuTarget, kernel_symbol
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection

RIGHT, SKIPS, DIES, ALSO_RIGHT, HANGS, REFUSES, COMPILER_DIES = range(7)
"""Values of the parameter ``mode``; see ``TunableTemplate.build``."""

TEMPLATES = {"Attention": "tunable_kernels:TEMPLATE"}
QUICK = {"Attention": "tunable_kernels:QUICK_TEMPLATE"}
"""Only what compiles, and does not hang."""


@dataclass(frozen=True)
class TunableTemplate:
    """Slow kernels, ``RIGHT`` unless the parameter says otherwise."""

    modes: tuple[int, ...]

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        return slow_kernels.TEMPLATE.supports(variant)

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        return Space(
            {"mode": self.modes}, {"mode": RIGHT}, lambda params: params["mode"] in self.modes
        )

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        """``SKIPS``: the last query stays unwritten. ``REFUSES``: the template raises.
        ``COMPILER_DIES``: the compiler process does. ``DIES``, ``HANGS``: the kernel does.
        """
        assert isinstance(variant, AttentionVariant)
        mode = params.get("mode", RIGHT)
        if mode == REFUSES:
            raise ValueError("refused")
        if mode == COMPILER_DIES:
            os.abort()
        if mode in (DIES, HANGS):
            return _calling(variant, "abort" if mode == DIES else "pause")
        return slow_kernels._attention(variant, skip=int(mode == SKIPS), fails=False)


TEMPLATE = TunableTemplate(tuple(range(7)))
QUICK_TEMPLATE = TunableTemplate((RIGHT, SKIPS, DIES, ALSO_RIGHT))


def _calling(variant: AttentionVariant, function: str) -> Any:
    """A kernel that calls a function of the C library and does nothing else."""
    from tvm.script.ir_builder import tirx as T

    from subquad.kernels.templates.function import attention_function

    def body(buffers: Any) -> None:
        T.evaluate(T.call_extern("int32", function))

    kernel = attention_function(variant, body)
    assert str(kernel.attrs["global_symbol"]) == kernel_symbol(variant)
    return kernel
