"""A plan made with whole sequences, carried out in a model with a cache.

With an empty past such a model is a function of whole sequences, the same as without a cache, and
its attentions have the same names and weights: a plan, its fitted tensors and refitted weights fit
both. What serves no single steps is excluded while the plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.converter.budget_texts import Runner
from subquad.converter.pipeline import is_encoder_decoder_folder
from subquad.passes.plan import DENSE, Assignment
from subquad.passes.plan_file import PlanFile
from subquad.passes.repair.distil import DistilSettings
from subquad.runtime.artifact import Artifact
from subquad.runtime.errors import ReplacementError, UsageError

if TYPE_CHECKING:
    from subquad.converter.pipeline import Source


def refuse_cached(source: Source, distil: DistilSettings | None) -> None:
    """What cannot be planned for a model with a cache.

    Raises:
        UsageError: it is asked for.
    """
    if distil is not None:
        raise UsageError(
            "--cache goes not with --distil: training runs the graph without a cache. Convert "
            "without --cache, or drop --distil."
        )
    if is_encoder_decoder_folder(source):
        raise UsageError(
            "an encoder-decoder with a cache stays exact so far; drop --budget, or convert it "
            "without --cache"
        )


def require_all_planned(plan: PlanFile, assignments: Sequence[Assignment]) -> None:
    """The model must become what was planned: its accuracy was measured so.

    Raises:
        ReplacementError: a site declines its method.
    """
    for wanted, assignment in zip(plan.sites, assignments, strict=True):
        if wanted.method != DENSE and assignment.declined is not None:
            raise ReplacementError(
                f"The plan has {wanted.method} for {wanted.name}, which declines it: "
                f"{assignment.declined.reason}."
            )


def replace_weights(model: ir.Model, weights: Mapping[str, NDArray[np.float32]]) -> None:
    """Give initializers other values.

    Raises:
        ReplacementError: the model has none of that name and shape.
    """
    for name, values in weights.items():
        known = model.graph.initializers.get(name)
        if known is None or known.shape != values.shape:
            raise ReplacementError(
                f"The refitted weight {name!r} of shape {values.shape} is not in the graph that is "
                "converted. Plan with --no-refit."
            )
        known.const_value = ir.tensor(values, name=name)


def whole_sequences(artifact: Artifact) -> Runner:
    """An artifact as a function of whole sequences, whether it has a cache or not.

    Positions, which only a model with a cache takes, count the slots: so does the model without.
    """
    positions = [
        spec
        for spec in artifact.manifest.inputs
        if spec.role == "ids" and "position" in spec.name and len(spec.shape) == 2
    ]

    def run(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        feeds = dict(inputs)
        for spec in positions:
            if spec.name not in feeds:
                rows, length = next(iter(inputs.values())).shape[:2]
                counted = np.broadcast_to(np.arange(length, dtype=spec.dtype), (rows, length))
                feeds[spec.name] = np.ascontiguousarray(counted)
        return artifact.run(feeds)

    return run
