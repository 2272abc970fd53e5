"""Distillation: low-rank changes of the projections that bring the outputs back.

The rewritten graph is the student, the exact model the teacher. Each projection matrix W becomes
W + A B of small rank (Hu et al., 2021, "LoRA", https://arxiv.org/abs/2106.09685), trained together
with the learned tensors of the replacements on KL(teacher || student) of the outputs (Zhang et
al., 2024, "LoLCATs", https://arxiv.org/abs/2410.10254, train the same projections), and is merged
into W at the end. What does not lower the loss on held-out inputs is not kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.passes.repair.adapters import RepairWeights
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import OutputSpec
from subquad.runtime.metamorphic import length_axis, real_tokens
from subquad.runtime.samples import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from subquad.passes.differentiable.graph import TorchGraph

Feeds = Mapping[str, NDArray[Any]]
Teacher = Callable[[Feeds], Mapping[str, NDArray[Any]]]
Progress = Callable[[str, float | None], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistilSettings:
    """How to train.

    Attributes:
        rank: of the change of each matrix.
        steps: gradient steps, one batch each, the batches in a shuffled cycle.
        learning_rate: of Adam at its height, with a warm-up and a cosine decay.
        checks: how often the held-out loss is looked at; the best state seen is what is kept.
        seed: of initial values and order.
    """

    rank: int = 8
    steps: int = 200
    learning_rate: float = 2e-3
    checks: int = 8
    seed: int = 0

    @staticmethod
    def parse(text: str, seed: int = 0) -> DistilSettings:
        """Read ``rank=8,steps=200,learning_rate=0.002``; what is not named keeps its default.

        Raises:
            UsageError: unknown name or bad value.
        """
        kinds = {"rank": int, "steps": int, "learning_rate": float, "checks": int}
        values: dict[str, Any] = {}
        for pair in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = pair.partition("=")
            if name not in kinds:
                raise UsageError(f"distillation has no setting {name!r}; it has {', '.join(kinds)}")
            if name in values:
                raise UsageError(f"distillation: {name} is given twice")
            try:
                values[name] = kinds[name](value)
            except ValueError as error:
                raise UsageError(f"distillation: {name}={value} is no number") from error
        return DistilSettings(seed=seed, **values)

    def __post_init__(self) -> None:
        if self.rank < 1 or self.steps < 1 or self.checks < 1:
            raise UsageError(f"rank, steps and checks must be 1 or more, got {self}")
        if not 0 < self.learning_rate < 1:
            raise UsageError(f"learning_rate must be between 0 and 1, got {self.learning_rate}")


@dataclass(frozen=True)
class DistilResult:
    """What training did.

    Attributes:
        loss_before, loss_after: on held-out inputs; equal if nothing was kept.
        best_step: after which the kept state was reached; 0 = nothing kept.
        changed: initializers of the model that have new values.
        settings: as given.
    """

    loss_before: float
    loss_after: float
    best_step: int
    changed: tuple[str, ...]
    settings: DistilSettings

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"changed": list(self.changed)}


def distil(
    model: ir.Model,
    weights: RepairWeights,
    teacher: Teacher,
    outputs: Sequence[OutputSpec],
    layout: Layout,
    training: Sequence[Feeds],
    heldout: Sequence[Feeds],
    settings: DistilSettings,
    progress: Progress | None = None,
) -> DistilResult:
    """Train ``weights`` of ``model`` and put the best state into it.

    Args:
        model: the rewritten graph; its initializers get the new values, nothing else changes.
        weights: what may move.
        teacher: exact outputs for some inputs.
        outputs: of the model: logits are compared by KL divergence in nats per token, others by
            their squared error relative to the teacher's square.
        layout: tells padding, which is not compared.
        training, heldout: inputs.
        settings: how long and how fast.
        progress: called with the held-out loss and the share done.

    Raises:
        UnsupportedModelError: the graph cannot be run in torch.
        UsageError: there is nothing to train or nothing to train on.
    """
    import torch

    from subquad.passes.differentiable.graph import TorchGraph

    names = (*weights.projections, *weights.own)
    if not names:
        raise UsageError("no replaced attention has projections or tensors that could be trained")
    if not training or not heldout:
        raise UsageError("distillation needs inputs to train on and others to judge by")
    generator = torch.Generator().manual_seed(settings.seed)
    student = _Student(TorchGraph(model), model, weights, settings.rank, generator)
    loss = _Loss(teacher, outputs, layout)
    before = student.heldout_loss(loss, heldout)
    best, best_step, state = before, 0, student.state()
    optimizer = torch.optim.Adam(student.parameters)
    order = _order(len(training), settings.steps, generator)
    every = max(1, settings.steps // settings.checks)
    for step, number in enumerate(order, start=1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        value = loss(student.run(training[number]), training[number])
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters, 1.0)
        optimizer.step()
        if step % every == 0 or step == settings.steps:
            now = student.heldout_loss(loss, heldout)
            if now < best:
                best, best_step, state = now, step, student.state()
            if progress is not None:
                progress(f"distilled: loss {before:.4g} -> {now:.4g}", step / settings.steps)
    if best_step:
        student.restore(state)
        student.merge_into(model)
    return DistilResult(before, best, best_step, tuple(names) if best_step else (), settings)


class _Student:
    """The graph, its adapters and its own tensors."""

    def __init__(
        self,
        graph: TorchGraph,
        model: ir.Model,
        weights: RepairWeights,
        rank: int,
        generator: Any,
    ) -> None:
        import torch

        from subquad.passes.differentiable.graph import torch_name

        self._graph = graph
        self._base = {
            name: getattr(graph, torch_name(name)) for name in (*weights.projections, *weights.own)
        }
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name in weights.projections:
            rows, columns = self._base[name].shape
            small = min(rank, rows, columns)
            first = torch.randn(rows, small, generator=generator) / math.sqrt(rows)
            self._pairs[name] = (first, torch.zeros(small, columns))
        self._own = {name: self._base[name].clone() for name in weights.own}
        self.parameters: list[Tensor] = [
            *(tensor for pair in self._pairs.values() for tensor in pair),
            *self._own.values(),
        ]
        for tensor in self.parameters:
            tensor.requires_grad_()

    def weights(self) -> dict[str, Tensor]:
        """The present values, by initializer."""
        merged = {name: self._base[name] + a @ b for name, (a, b) in self._pairs.items()}
        return {**merged, **self._own}

    def run(self, feeds: Feeds) -> Mapping[str, Tensor]:
        import torch

        inputs = {name: torch.from_numpy(np.asarray(array)) for name, array in feeds.items()}
        outputs: dict[str, Tensor] = self._graph(inputs, weights=self.weights())
        return outputs

    def heldout_loss(self, loss: _Loss, heldout: Sequence[Feeds]) -> float:
        import torch

        with torch.no_grad():
            values = [float(loss(self.run(feeds), feeds)) for feeds in heldout]
        mean = float(np.mean(values))
        return mean if math.isfinite(mean) else math.inf

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.parameters]

    def restore(self, state: Sequence[Tensor]) -> None:
        import torch

        with torch.no_grad():
            for tensor, value in zip(self.parameters, state, strict=True):
                tensor.copy_(value)

    def merge_into(self, model: ir.Model) -> None:
        for name, tensor in self.weights().items():
            array = tensor.detach().numpy().copy()
            model.graph.initializers[name].const_value = ir.tensor(array, name=name)


class _Loss:
    """Distance to the teacher, which runs each time: its outputs are too large to keep."""

    def __init__(self, teacher: Teacher, outputs: Sequence[OutputSpec], layout: Layout) -> None:
        self._teacher = teacher
        self._outputs = [spec for spec in outputs if spec.is_logits] or list(outputs)
        self._layout = layout

    def __call__(self, student: Mapping[str, Tensor], feeds: Feeds) -> Tensor:
        import torch

        taught = self._teacher(feeds)
        total = torch.zeros(())
        for spec in self._outputs:
            wanted = torch.from_numpy(np.asarray(taught[spec.name], dtype=np.float32))
            got, wanted = self._real(spec, student[spec.name], wanted, feeds)
            if spec.is_logits:
                log_p, log_q = torch.log_softmax(wanted, -1), torch.log_softmax(got, -1)
                total = total + (log_p.exp() * (log_p - log_q)).sum(-1).mean()
            else:
                total = total + (got - wanted).square().sum() / wanted.square().sum()
        return total

    def _real(
        self, spec: OutputSpec, got: Tensor, wanted: Tensor, feeds: Feeds
    ) -> tuple[Tensor, Tensor]:
        import torch

        found = length_axis(spec.shape, wanted.numpy(), real_tokens(self._layout, feeds))
        if found is None:
            return got, wanted
        axis, mask = found
        real = torch.from_numpy(np.ascontiguousarray(mask))
        return got.movedim(axis, 1)[real], wanted.movedim(axis, 1)[real]


def _order(count: int, steps: int, generator: Any) -> list[int]:
    """Every input once in random order, then again in another."""
    import torch

    order: list[int] = []
    while len(order) < steps:
        order += torch.randperm(count, generator=generator).tolist()
    return order[:steps]


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: rises over the first tenth, falls to a tenth of it."""
    warm = max(1, steps // 10)
    if step <= warm:
        return step / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
