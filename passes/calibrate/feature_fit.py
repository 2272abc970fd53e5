"""Fit feature maps to the softmax attention that they replace.

Every key/value head, with the query heads that read it, is fitted on its own: on sampled queries
against all keys, so that memory grows with the length and not with its square. In order:

1. both maps are copies of the dims, at a size that is tried out; with it the gain of the window has
   a closed form: the mean over queries of what gives the window the mass it has under softmax;
2. gradient steps on the cross-entropy between softmax's weights and the replacement's (Zhang et
   al., 2024, "Hedgehog", https://arxiv.org/abs/2402.04347, eq. 7) and, with a weight that takes
   over, on the relative squared error of the head's output (Zhang et al., 2024, "LoLCATs",
   https://arxiv.org/abs/2410.10254, eq. 8);
3. in some of these steps, fewer and fewer, there is no exact window: all keys count by features.
   Otherwise the window alone may do, and the linear part learns nothing;
4. the maps with the least error on queries held back are kept, and a head stops when looking again
   and again found none better.

Same inputs and settings, same maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.feature_maps import HEDGEHOG, LEAST_FEATURE, SOFTMAX_PAIR
from subquad.kernels.hybrid.semantics import HeadPart, HybridVariant
from subquad.kernels.visibility import allowed_keys, in_band
from subquad.passes.calibrate.fitted import Fitted, Sample
from subquad.passes.recognise.site import AttentionSite

if TYPE_CHECKING:
    from torch import Tensor

_SIZES = (0.5, 1.0, 2.0, 4.0)
"""Typical sizes of the projections that are tried to start from."""

_GAINS = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Changes of the log of a fitted gain that are tried at the end: with the last, windows alone."""

MANY_ROWS = 8
"""From so many on, a quarter of the rows is held back; of fewer, a quarter of each."""

_MASKED = -1e30
_TINY = 1e-20


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast.

    Attributes:
        steps: gradient steps of a head, at most.
        queries: of one step, all from one row.
        judged: queries held back, over all rows.
        rate: of Adam, for inputs of size 1; falls to a tenth of it.
        every: steps between looks at the error on queries held back.
        patience: looks without a gain of 1 % after which a head stops.
        hopeless: relative squared error above which a head stops after that many looks.
        dropout: share of steps without window at the start; falls to 0.
        longest: tokens of a row that are looked at, from its start.
        seed: of the sampling.
    """

    steps: int = 100
    queries: int = 32
    judged: int = 96
    rate: float = 0.07
    every: int = 20
    patience: int = 2
    hopeless: float = 0.4
    dropout: float = 0.5
    longest: int = 2048
    seed: int = 0


def fit_feature_maps(
    site: AttentionSite,
    variant: HybridVariant,
    start: Mapping[str, NDArray[np.generic]],
    samples: Sequence[Sample],
    settings: FitSettings | None = None,
) -> Fitted:
    """Fit ``query_map``, ``key_map`` and, in the shared mix, ``window_gain``.

    Args:
        site: tells how queries and keys are aligned.
        variant: with a feature map that has weights, and without decay.
        start: tensors as the method starts with.
        samples: inputs of the exact attention.
        settings: default: ``FitSettings()``.
    """
    import torch

    assert variant.feature_map in (HEDGEHOG.name, SOFTMAX_PAIR.name) and not variant.has_decay
    settings = settings or FitSettings()
    generator = np.random.default_rng(settings.seed)
    rows = [row for sample in samples for row in _rows(site, sample, settings.longest)]
    training, judged = _split(rows, settings, generator)
    plan = list(_steps(training, settings, generator))
    tensors = {name: np.array(array, np.float32) for name, array in start.items()}
    before, after = np.zeros((2, variant.num_heads))
    group = variant.heads.group
    noise = torch.Generator().manual_seed(settings.seed)
    for kv_head in range(variant.num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        if not any(part.linear for part in variant.parts[heads]):
            continue
        judge = [_Batch.of(variant, kv_head, *item) for item in judged]
        maps = _Maps(variant, kv_head, tensors, judge, noise)
        before[heads] = maps.errors(judge)
        maps.start(judge)
        batches = (_Batch.of(variant, kv_head, row, chosen) for row, chosen, _ in plan)
        _train(maps, batches, [bare for _, _, bare in plan], judge, settings)
        maps.adjust_gain(judge)
        after[heads] = maps.errors(judge)
        if after[heads].mean() < before[heads].mean():
            maps.write(tensors)
        else:
            after[heads] = before[heads]
    return Fitted(tensors, tuple(map(float, before)), tuple(map(float, after)))


# --- rows and queries ---


@dataclass(frozen=True)
class _Row:
    """One row of a batch.

    Attributes:
        query, key, value: ``[heads, length, dim]``.
            Padding is left out of keys and values.
        query_positions, key_positions: of real tokens.
        real: numbers of the queries that are no padding.
    """

    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    query_positions: NDArray[np.int64]
    key_positions: NDArray[np.int64]
    real: NDArray[np.int64]


_Chosen = tuple[_Row, NDArray[np.int64]]
"""A row and numbers of some of its queries."""


def _rows(site: AttentionSite, sample: Sample, longest: int) -> Iterator[_Row]:
    query, key, value = (np.asarray(sample[name], np.float32) for name in ("query", "key", "value"))
    query_len, kv_len = query.shape[2], key.shape[2]
    offset = kv_len - query_len if site.mask.alignment == "end" else 0
    for row in range(len(query)):
        mask = np.ones(kv_len, np.bool_)
        if "key_mask" in sample:
            mask = np.array(sample["key_mask"][row], np.bool_)
        if not mask.any():
            continue
        first = int(mask.argmax())
        slots = np.arange(query_len) + offset
        counted = slots < first + longest
        if site.is_self:
            counted &= (slots < kv_len) & mask[np.minimum(slots, kv_len - 1)]
        real = np.flatnonzero(counted)
        mask[first + longest :] = False
        positions = [slots - first, np.arange(kv_len) - first]
        for place, name in enumerate(("query_positions", "key_positions")):
            if name in sample:
                positions[place] = np.asarray(sample[name][row], np.int64)
        if len(real):
            kept = key[row][:, mask], value[row][:, mask]
            yield _Row(query[row], *kept, positions[0], positions[1][mask], real)


def _split(
    rows: Sequence[_Row], settings: FitSettings, generator: np.random.Generator
) -> tuple[list[_Chosen], list[_Chosen]]:
    """Queries to fit on, and some to judge by: of other rows where there are many.

    A few rows can differ so much that maps which suit one are useless for the others, so then all
    of them take part in both.
    """
    assert rows, "no row with a real token"
    if len(rows) >= MANY_ROWS:
        held = len(rows) // 4
        training = [(row, row.real) for row in rows[:-held]]
        kept = [(row, row.real) for row in rows[-held:]]
    else:
        cuts = [np.arange(len(row.real)) % 4 == 3 for row in rows]
        for cut in cuts:
            cut[-1] = True  # a single query is fitted on and judged
        both = list(zip(rows, cuts, strict=True))
        training = [(row, row.real if cut.all() else row.real[~cut]) for row, cut in both]
        kept = [(row, row.real[cut]) for row, cut in both]
    each = max(1, settings.judged // len(kept))
    return training, [(row, _some(real, each, generator)) for row, real in kept]


def _steps(
    training: Sequence[_Chosen], settings: FitSettings, generator: np.random.Generator
) -> Iterator[tuple[_Row, NDArray[np.int64], bool]]:
    """Row, queries, and whether the window is left out, for every step."""
    for step in range(settings.steps):
        row, real = training[step % len(training)]
        share = settings.dropout * (1 - step / settings.steps)
        yield row, _some(real, settings.queries, generator), bool(generator.random() < share)


def _some(
    numbers: NDArray[np.int64], count: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    if len(numbers) <= count:
        return numbers
    return np.sort(generator.choice(numbers, count, replace=False))


@dataclass(frozen=True)
class _Batch:
    """Some queries of the heads that read one key/value head.

    Attributes:
        query: ``[heads, queries, dim]``; key, value: ``[kv_len, dim]``.
        allowed: ``[queries, kv_len]``; exact: ``[heads, queries, kv_len]``, a part of it.
        scores: scaled, ``[heads, queries, kv_len]``.
        weights: softmax of the allowed ones.
        target: what the exact heads give.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor
    exact: Tensor
    scores: Tensor
    weights: Tensor
    target: Tensor

    @staticmethod
    def of(variant: HybridVariant, kv_head: int, row: _Row, chosen: NDArray[np.int64]) -> _Batch:
        import torch

        group = variant.heads.group
        parts = variant.parts[kv_head * group : (kv_head + 1) * group]
        allowed, exact = _pairs(variant, parts, row, chosen)
        query = torch.from_numpy(row.query[kv_head * group : (kv_head + 1) * group][:, chosen])
        key, value = (torch.from_numpy(x[kv_head]) for x in (row.key, row.value))
        seen = torch.from_numpy(allowed)
        scores = torch.where(seen, variant.scale * (query @ key.T), _MASKED)
        weights = torch.softmax(scores, -1)
        return _Batch(
            query, key, value, seen, torch.from_numpy(exact), scores, weights, weights @ value
        )


def _pairs(
    variant: HybridVariant, parts: Sequence[HeadPart], row: _Row, chosen: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    positions = row.query_positions[None, chosen], row.key_positions[None]
    shape = (1, len(chosen), len(row.key_positions))
    limits = variant.allowed_left, variant.allowed_right
    allowed = allowed_keys(shape, *limits, None, *positions)[0]
    exact = []
    for part in parts:
        inside = np.full(allowed.shape, part.is_dense)
        if part.has_window:
            inside |= in_band(*positions, part.window_left, part.window_right)[0]
        inside |= (positions[1] >= 0) & (positions[1] < part.sinks)
        exact.append(inside & allowed)
    return allowed, np.stack(exact)


# --- maps ---


class _Maps:
    """The maps of one key/value head and its query heads, for inputs of size 1."""

    def __init__(
        self,
        variant: HybridVariant,
        kv_head: int,
        tensors: Mapping[str, NDArray[np.float32]],
        judge: Sequence[_Batch],
        noise: Any,
    ) -> None:
        import torch

        group = variant.heads.group
        self._heads = slice(kv_head * group, (kv_head + 1) * group)
        self._kv_head = kv_head
        self._pair = variant.feature_map == SOFTMAX_PAIR.name
        self._shared = variant.mix == "shared"
        self._noise = noise
        square = sum(batch.query.square().mean((1, 2)) for batch in judge) / len(judge)
        self._query_size = torch.as_tensor(square).sqrt().clamp_min(_TINY)[:, None, None]
        size = sum(batch.key.square().mean() for batch in judge) / len(judge)
        self._key_size = torch.as_tensor(size).sqrt().clamp_min(_TINY)
        query, key = (torch.from_numpy(tensors[name]) for name in ("query_map", "key_map"))
        self.query_map = _sized(query[self._heads], self._query_size)
        self.key_map = _sized(key[kv_head], self._key_size)
        self.log_gain = torch.zeros(group)
        if self._shared:
            self.log_gain = torch.from_numpy(tensors["window_gain"])[self._heads].log()

    @property
    def parameters(self) -> list[Tensor]:
        return [self.query_map, self.key_map, *([self.log_gain] if self._shared else [])]

    def log_weights(self, batch: _Batch, *, bare: bool = False) -> Tensor:
        """Of all keys, before the normaliser; ``bare``: as if there were no exact keys."""
        import torch

        query = self._features(batch.query / self._query_size, self.query_map)
        key = self._features(batch.key / self._key_size, self.key_map)
        linear = (query @ key.T + _TINY).log()
        if not bare:
            scores = batch.scores
            if self._shared:
                most = torch.where(batch.exact, scores, _MASKED).amax(-1, keepdim=True)
                scores = scores - most + self.log_gain[:, None, None]
            linear = torch.where(batch.exact, scores, linear)
        return torch.where(batch.allowed, linear, _MASKED)

    def _features(self, x: Tensor, weights: Tensor) -> Tensor:
        import torch

        u = x @ weights[..., :-1, :] + weights[..., -1:, :]
        if not self._pair:
            return torch.softmax(torch.cat([u, -u], -1), -1)
        pair = torch.cat([torch.softmax(u, -1), torch.softmax(-u, -1)], -1)
        return pair.clamp_min(LEAST_FEATURE)

    def errors(self, batches: Sequence[_Batch]) -> NDArray[np.float64]:
        """Squared error of each head's output, relative to the exact one's."""
        import torch

        with torch.no_grad():
            found = [_relative(torch.softmax(self.log_weights(b), -1), b) for b in batches]
        return np.asarray(torch.stack(found).double().mean(0).numpy())

    def start(self, judge: Sequence[_Batch]) -> None:
        """Copies of the dims at the best of some sizes, with the gain that belongs to them."""
        import torch

        best, state = float(self.errors(judge).mean()), self.state()
        spread = torch.randn(self.key_map.shape, generator=self._noise)
        copies = _copies(*self.key_map.shape)
        for size in _SIZES:
            # Outputs past the dims would stay equal to those before them for ever.
            self.key_map = size * (copies + 0.02 * spread)
            self.query_map = self.key_map.expand_as(self.query_map).clone()
            if self._shared:
                self.log_gain = self._balance(judge)
            error = float(self.errors(judge).mean())
            if error < best:
                best, state = error, self.state()
        self.restore(state)

    def _balance(self, judge: Sequence[_Batch]) -> Tensor:
        """Log of the gain with which the window has the mass it has under softmax."""
        import torch

        found = []
        with torch.no_grad():
            for batch in judge:
                log_weights = self.log_weights(batch) - torch.where(
                    batch.exact, self.log_gain[:, None, None], 0.0
                )
                within = torch.where(batch.exact, log_weights, _MASKED).logsumexp(-1)
                beyond = torch.where(batch.exact, _MASKED, log_weights).logsumexp(-1)
                mass = (batch.weights * batch.exact).sum(-1).clamp(1e-3, 1 - 1e-3)
                both = (within > _MASKED / 2) & (beyond > _MASKED / 2)
                wanted = torch.where(both, torch.logit(mass) + beyond - within, 0.0)
                found.append(wanted.sum(-1) / both.sum(-1).clamp_min(1))
        return torch.stack(found).mean(0)

    def adjust_gain(self, judge: Sequence[_Batch]) -> None:
        """Each head's best of some gains around its own: what was learned weighs weights, too."""
        import torch

        if not self._shared:
            return
        fitted, best = self.log_gain, self.errors(judge)
        chosen = fitted
        for shift in _GAINS:
            self.log_gain = fitted + shift
            errors = self.errors(judge)
            chosen = torch.where(torch.from_numpy(errors < best), self.log_gain, chosen)
            best = np.minimum(errors, best)
        self.log_gain = chosen

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.parameters]

    def restore(self, state: Sequence[Tensor]) -> None:
        self.query_map, self.key_map, *rest = [tensor.clone() for tensor in state]
        self.log_gain = rest[0] if rest else self.log_gain

    def write(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Into the whole tensors, for inputs as they come."""
        tensors["query_map"][self._heads] = _sized(self.query_map, 1 / self._query_size).numpy()
        tensors["key_map"][self._kv_head] = _sized(self.key_map, 1 / self._key_size).numpy()
        if self._shared:
            tensors["window_gain"][self._heads] = self.log_gain.exp().numpy()


def _sized(weights: Tensor, size: Tensor) -> Tensor:
    """Weights, without the bias in the last row, times ``size``."""
    import torch

    return torch.cat([weights[..., :-1, :] * size, weights[..., -1:, :]], -2)


def _copies(rows: int, outputs: int) -> Tensor:
    import torch

    weights = torch.zeros(rows, outputs)
    places = torch.arange(outputs)
    weights[places % (rows - 1), places] = 1.0
    return weights


def _relative(weights: Tensor, batch: _Batch) -> Tensor:
    error = (weights @ batch.value - batch.target).square().sum((1, 2))
    return error / batch.target.square().sum((1, 2)).clamp_min(_TINY)


def _train(
    maps: _Maps,
    batches: Iterator[_Batch],
    bare: Sequence[bool],
    judge: Sequence[_Batch],
    settings: FitSettings,
) -> None:
    """Gradient steps; leaves the best state in ``maps``."""
    import torch

    best, state, tired = float(maps.errors(judge).mean()), maps.state(), 0
    for tensor in maps.parameters:
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(maps.parameters, lr=settings.rate)
    for step, batch in enumerate(batches):
        progress = step / settings.steps
        optimizer.param_groups[0]["lr"] = settings.rate * (1 - 0.9 * progress)
        log_weights = torch.log_softmax(maps.log_weights(batch, bare=bare[step]), -1)
        entropy = -(batch.weights * log_weights).sum(-1).mean(-1)
        error = _relative(log_weights.exp(), batch)
        # The weights first: errors of outputs alone leave the linear part unused.
        loss = ((1 - progress) * entropy + (0.1 + progress) * error).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % settings.every and step + 1 != settings.steps:
            continue
        now = float(maps.errors(judge).mean())
        tired = 0 if now < 0.99 * best else tired + 1
        if now < best:
            best, state = now, maps.state()
        hopeless = best > settings.hopeless and step + 1 >= settings.patience * settings.every
        if tired >= settings.patience or hopeless:
            break
    maps.restore(state)
