"""Whether an artifact gets kernels for CPUs, and what its report says of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

from subquad.kernels.host.build import KernelBuild
from subquad.runtime.errors import UsageError
from subquad.runtime.kernel_tools import missing_kernel_tools
from subquad.runtime.manifest import SiteRecord

KernelKind = Literal["none", "cpu"]

KERNELS_VARIABLE = "SUBQUAD_KERNELS"
DEFAULT_KERNELS: KernelKind = "cpu"


def chosen_kernels(asked: str | None) -> KernelKind:
    """What is asked for, else what ``$SUBQUAD_KERNELS`` says, else kernels for this processor.

    Raises:
        UsageError: neither ``none`` nor ``cpu``.
    """
    wanted, source = asked, "kernels"
    if wanted is None:
        wanted, source = os.environ.get(KERNELS_VARIABLE) or DEFAULT_KERNELS, KERNELS_VARIABLE
    for kind in get_args(KernelKind):
        if wanted == kind:
            return kind  # type: ignore[no-any-return]
    raise UsageError(f"{source} must be none or cpu, got {wanted!r}")


def will_have_kernels(asked: str | None) -> bool:
    """Whether what is converted here with this choice gets kernels."""
    return chosen_kernels(asked) == "cpu" and not missing_kernel_tools()


def kernel_facts(
    kind: KernelKind, built: KernelBuild, records: Sequence[SiteRecord]
) -> dict[str, Any]:
    """The entry ``kernels`` of a report.

    ``asked`` (none, cpu), ``targets`` of the libraries, ``attentions`` that have a kernel, and
    ``missing``: why nothing was compiled, "" if something was or nothing was asked for.
    """
    return {
        "asked": kind,
        "targets": [library.target.name for library in built.libraries],
        "attentions": sum(bool(record.kernel) for record in records),
        "missing": missing_kernel_tools() if kind == "cpu" and not built.libraries else "",
    }


def join_kernel_facts(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the graphs of one source."""
    return {
        "asked": facts[0]["asked"],
        "targets": list(dict.fromkeys(target for each in facts for target in each["targets"])),
        "attentions": sum(each["attentions"] for each in facts),
        "missing": next((each["missing"] for each in facts if each["missing"]), ""),
    }
