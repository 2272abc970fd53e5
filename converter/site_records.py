"""What the manifest says of every attention, and of the inputs and outputs that carry its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subquad.converter.traced import TracedModel
from subquad.kernels.host.build import KernelBuild, fields_of, variant_key
from subquad.kernels.tuning.choose import TunedParameters
from subquad.passes.carry_state import StateCarrier
from subquad.passes.lower import LoweredSite
from subquad.passes.plan import Assignment
from subquad.passes.replace import SiteVariants
from subquad.runtime.manifest import InputSpec, OutputSpec, SiteRecord


def describe_variants(
    variants: SiteVariants, built: KernelBuild, parameters: TunedParameters
) -> tuple[dict[str, Any], ...]:
    """The operators of one site for the manifest; see ``SiteRecord.variants``."""
    return tuple(
        {
            "operator": variant.op_type,
            "fields": fields_of(variant),
            "tuning": {
                library.target.name: parameters.choose(variant, library.target).to_json()
                for library in built.libraries
                if variant_key(variant) in built.served
            },
        }
        for variant in variants
    )


def site_record(
    assignment: Assignment,
    lowered: LoweredSite | None = None,
    variants: tuple[dict[str, Any], ...] = (),
    gpu_kernels: Mapping[str, str] | None = None,
    keeps: str = "",
) -> SiteRecord:
    """The manifest's entry for one site; see ``SiteRecord``."""
    reasons = [] if assignment.declined is None else [assignment.declined.reason]
    if assignment.method.learns and assignment.fitted is None:
        reasons.append("not calibrated: its tensors are as the method starts with them")
    if lowered is not None and lowered.reason:
        reasons.append(f"no kernel: {lowered.reason}")
    return SiteRecord(
        site=assignment.site.to_json(),
        method=assignment.method.name,
        params=assignment.params.to_json(),
        operator="" if lowered is None else lowered.operator,
        kernel="" if lowered is None else lowered.kernel,
        reason="; ".join(reasons),
        prepared=() if lowered is None else lowered.prepared,
        causal_granularity=assignment.method.causal_granularity(assignment.params),
        piece_granularity=assignment.method.piece_granularity(assignment.params),
        variants=variants,
        gpu_kernels=dict(gpu_kernels or {}),
        keeps=keeps,
    )


def carried_signature(
    traced: TracedModel, carrier: StateCarrier | None
) -> tuple[tuple[InputSpec, ...], tuple[OutputSpec, ...]]:
    """Inputs and outputs of the model, in its order, after sites got states for their pasts."""
    carried = [] if carrier is None else carrier.carried
    if not carried:
        return traced.inputs, traced.outputs
    removed = {name for state in carried for name in state.removed}
    inputs = {spec.name: spec for spec in traced.inputs if spec.name not in removed}
    outputs = {spec.name: spec for spec in traced.outputs if spec.name not in removed}
    for state in carried:
        inputs |= {spec.name: spec for spec in state.inputs}
        outputs |= {spec.name: spec for spec in state.outputs}
    graph = traced.model.graph
    return (
        tuple(inputs[str(value.name)] for value in graph.inputs if value.name in inputs),
        tuple(outputs[str(value.name)] for value in graph.outputs),
    )
