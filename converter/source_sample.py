"""What a torch source itself computes on one small input, to check the written artifact against.

``reference.onnx`` is the same trace as the model, so an error of the exporter is in both; only the
module's own output shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.converter.torch_export import TRACE_ERRORS, quiet
from subquad.runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

MAX_ERROR = 1e-3
"""Of an output, relative to its largest entry: some hundred times what float32 sums in another
order give through thirty layers, far below what any wrong node does."""

_SHORT = 9

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceSample:
    """Inputs by name, and the tensors the module returned for them, in order."""

    inputs: Mapping[str, NDArray[Any]]
    outputs: tuple[NDArray[Any], ...]

    def named(self, model: ir.Model) -> dict[str, NDArray[Any]]:
        """The outputs by the names that ``model``, as traced, gives them."""
        names = [value.name or "" for value in model.graph.outputs]
        if len(names) != len(self.outputs):
            logger.warning(
                "the source returns %d tensors and its trace %d: not compared with each other",
                len(self.outputs),
                len(names),
            )
            return {}
        return dict(zip(names, self.outputs, strict=True))


def run_source(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], bundle: str = ""
) -> SourceSample:
    """Run ``module`` once; with ``bundle``, its one argument of this name takes all inputs."""
    import torch
    import torch.utils._pytree as pytree

    given = {name: _copy(tensor) for name, tensor in inputs.items()}
    with quiet(), torch.no_grad():
        result = module(**({bundle: dict(inputs)} if bundle else inputs))
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return SourceSample(given, tuple(_copy(leaf) for leaf in leaves))


def run_source_on_random(
    module: torch.nn.Module,
    example: Mapping[str, torch.Tensor],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    vocabulary: int,
) -> SourceSample:
    """Run ``module`` on random tokens and numbers of the kind of ``example``.

    Sequences are shortened to another length than the traced one; the last row of a mask ends in
    padding. A module that refuses such inputs is run on ``example`` itself, with a warning.
    """
    inputs = {
        name: _randomised(name, tensor, dynamic_axes.get(name, {}), vocabulary)
        for name, tensor in example.items()
    }
    try:
        return run_source(module, inputs)
    except TRACE_ERRORS as error:
        logger.warning("the source refuses random inputs (%s); its trace inputs are used", error)
        return run_source(module, example)


def compare(folder: Path, reference: str, sample: Path) -> float:
    """Largest relative error of the reference model in ``folder`` on a saved sample.

    Raises:
        UnsupportedModelError: an output differs by more than ``MAX_ERROR``.
    """
    import onnxruntime

    stored = np.load(sample, allow_pickle=False)
    session = onnxruntime.InferenceSession(
        str(folder / reference), providers=["CPUExecutionProvider"]
    )
    wanted = {key[4:]: stored[key] for key in stored.files if key.startswith("out:")}
    given = {value.name for value in session.get_inputs()}
    feeds = {key[3:]: stored[key] for key in stored.files if key[:3] == "in:" and key[3:] in given}
    worst = 0.0
    for name, got in zip(wanted, session.run(list(wanted), feeds), strict=True):
        error = _relative_error(got, wanted[name])
        if not error <= MAX_ERROR:
            raise UnsupportedModelError(
                f"output {name!r} of the traced model is not what the source computes: relative "
                f"error {error:.2g}, at most {MAX_ERROR:g} allowed. The tracer or the exporter got "
                "it wrong; please report the model."
            )
        worst = max(worst, error)
    return worst


def save(
    path: Path, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
) -> None:
    """Write a sample for ``compare``."""
    arrays = {f"in:{name}": array for name, array in inputs.items()}
    arrays |= {f"out:{name}": array for name, array in outputs.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted)) if got.size else np.array(True)
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        error = np.max(np.abs(got.astype(np.float64) - wanted), where=~same, initial=0.0)
    finite = np.abs(wanted[np.isfinite(wanted)]).astype(np.float64)
    scale = float(finite.max()) if finite.size else 0.0
    return float(error) / scale if scale else float("inf")


def _randomised(
    name: str, tensor: torch.Tensor, axes: Mapping[int, str], vocabulary: int
) -> torch.Tensor:
    import torch

    for axis, dim in axes.items():
        if dim != "batch" and not tensor.is_floating_point():
            tensor = tensor.narrow(axis, 0, min(_SHORT, tensor.shape[axis]))
    generator = torch.Generator().manual_seed(len(name))
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    if name.endswith("input_ids"):
        return torch.randint(vocabulary, tensor.shape, generator=generator, dtype=tensor.dtype)
    tensor = tensor.clone()
    if name.endswith("attention_mask") and tensor.dim() == 2:
        tensor[-1, -(tensor.shape[1] // 3) or tensor.shape[1] :] = 0
    return tensor


def _copy(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy().copy()
    return array
