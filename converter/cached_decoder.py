"""A transformers decoder with its cache as flat inputs and outputs: prefill and step in one graph.

Names are those of Optimum and ONNX Runtime GenAI:

| input | shape | output | shape |
|---|---|---|---|
| ``input_ids`` | ``[batch, length]`` | ``logits`` | ``[batch, length, vocabulary]`` |
| ``attention_mask`` | ``[batch, past + length]`` | | |
| ``position_ids``, where the source takes them | ``[batch, length]`` | | |
| ``past_key_values.N.key``, ``.value`` | ``[batch, kv heads, past, dim]`` | ``present.N.key``, ``.value`` | ``[batch, kv heads, past + length, dim]`` |

``past`` may be 0. Every layer keeps all tokens here, those with a sliding window too: what a layer
may see is in its mask, and what it need not keep is decided later.
"""  # noqa: E501

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from subquad.runtime.errors import UnsupportedModelError
from subquad.runtime.past import PAST, TOTAL

BUNDLE = "inputs"
"""The one argument of the traced ``forward``: names with dots are no Python arguments."""

_BATCH = 2
# No layer size equals them, nor their sum.
_LENGTH, _PAST = 23, 19


@dataclass(frozen=True)
class CachedDecoder:
    """What is traced.

    Attributes:
        module: takes all inputs as one dict, returns a dict of outputs.
        inputs, dynamic_axes: for the trace.
        sample: random inputs of other lengths; the last row begins with padding.
    """

    module: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    dynamic_axes: dict[str, dict[int, str]]
    sample: dict[str, torch.Tensor]


class FlatLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of the cache that begins with given keys and values, maybe of no token."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        # The parent asks whether there is any element, which would fix the size while tracing.
        return self.keys.shape[-2]


CACHE_ARGUMENTS = ("cache", "past_key_values")
"""What ``forward`` calls it; the second in older releases of transformers."""


def cache_argument(accepted: Iterable[str]) -> str | None:
    """The name of the cache among the arguments of a ``forward``."""
    return next((name for name in CACHE_ARGUMENTS if name in accepted), None)


def past_name(layer: int, part: str) -> str:
    """``part`` is ``key`` or ``value``."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    return f"present.{layer}.{part}"


def cached_decoder(model: Any, what: str, longest: int | None, vocabulary: int) -> CachedDecoder:
    """``model`` with its cache as inputs and outputs.

    Args:
        model: a loaded transformers decoder.
        what: how error messages call it.
        longest: positions it has, where known.
        vocabulary: how many token numbers are valid.

    Raises:
        UnsupportedModelError: it keeps no cache of keys and values, or something else besides.
    """
    accepted = inspect.signature(model.forward).parameters
    missing = {"input_ids", "attention_mask"} - set(accepted)
    if (
        missing
        or cache_argument(accepted) is None
        or getattr(model.config, "is_encoder_decoder", False)
    ):
        raise UnsupportedModelError(
            f"{what}: a cache needs a decoder that takes input_ids, attention_mask and the cache "
            "of earlier tokens; this one is no such decoder. Convert it without --cache."
        )
    sizes = _layer_sizes(model, what)
    length, past = _LENGTH, _PAST
    if longest is not None and longest < length + past:
        length, past = max(2, longest // 2), max(2, longest // 2 - 1)
    inputs, axes = _inputs(sizes, length, past, positions="position_ids" in accepted)
    generator = torch.Generator().manual_seed(0)
    sample, _ = _inputs(sizes, min(9, length), min(5, past), positions="position_ids" in accepted)
    for name, tensor in sample.items():
        if tensor.is_floating_point():
            sample[name] = torch.randn(tensor.shape, generator=generator)
    ids = sample["input_ids"]
    sample["input_ids"] = torch.randint(vocabulary, ids.shape, generator=generator)
    sample["attention_mask"][-1, :2] = 0
    if "position_ids" in sample:
        sample["position_ids"] = _positions(sample["attention_mask"], ids.shape[1])
    return CachedDecoder(_with_flat_cache(model, len(sizes)), inputs, axes, sample)


def _layer_sizes(model: Any, what: str) -> list[dict[str, tuple[int, int]]]:
    """Of each layer's keys and values: heads and dim, as the model itself makes them."""
    ids = torch.ones(1, 2, dtype=torch.int64)
    with torch.no_grad():
        result = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
    cache = next((result[name] for name in CACHE_ARGUMENTS if result.get(name) is not None), None)
    layers = getattr(cache, "layers", None)
    if not layers:
        raise UnsupportedModelError(f"{what}: the model returns no cache of keys and values.")
    sizes = []
    for number, layer in enumerate(layers):
        tensors: dict[str, Any] = {
            "key": getattr(layer, "keys", None),
            "value": getattr(layer, "values", None),
        }
        state = any(hasattr(layer, name) for name in ("conv_states", "recurrent_states"))
        if state or any(tensor is None or tensor.dim() != 4 for tensor in tensors.values()):
            raise UnsupportedModelError(
                f"{what}: layer {number} caches something else than keys and values "
                f"({type(layer).__name__}). Convert it without --cache."
            )
        sizes.append({part: (t.shape[1], t.shape[3]) for part, t in tensors.items()})
    return sizes


def _inputs(
    sizes: Sequence[Mapping[str, tuple[int, int]]], length: int, past: int, *, positions: bool
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    ids = torch.ones(_BATCH, length, dtype=torch.int64)
    mask = torch.ones(_BATCH, past + length, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": mask}
    axes = {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: TOTAL}}
    if positions:
        inputs["position_ids"] = _positions(mask, length)
        axes["position_ids"] = {0: "batch", 1: "length"}
    for name, (heads, dim) in _parts(sizes):
        inputs[name] = torch.zeros(_BATCH, heads, past, dim)
        axes[name] = {0: "batch", 2: PAST}
    return inputs, axes


def _parts(
    sizes: Sequence[Mapping[str, tuple[int, int]]],
) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer, parts in enumerate(sizes):
        for part, size in parts.items():
            yield past_name(layer, part), size


def _positions(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Of the last ``length`` tokens, counting real tokens only."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -length:]


def _with_flat_cache(model: Any, layers: int) -> torch.nn.Module:
    """``model`` with another ``forward``.

    A subclass, not a module around it: parameters and nodes keep their names, so that sites are
    called the same with and without a cache, and a plan fits both.
    """
    original = type(model)
    argument = cache_argument(inspect.signature(model.forward).parameters)
    assert argument is not None

    def forward(self: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = ("key", "value")
        pasts = [[inputs[past_name(layer, part)] for part in parts] for layer in range(layers)]
        given = {name: x for name, x in inputs.items() if not name.startswith("past_key_values.")}
        cache = Cache(layers=[FlatLayer(keys, values) for keys, values in pasts])
        result = original.forward(self, **given, **{argument: cache}, use_cache=True)
        outputs = {name: x for name, x in result.items() if isinstance(x, torch.Tensor)}
        for layer, kept in enumerate(cache.layers):
            outputs[present_name(layer, "key")] = kept.keys
            outputs[present_name(layer, "value")] = kept.values
        return outputs

    cached: torch.nn.Module = copy.copy(model)
    cached.__class__ = type(original.__name__, (original,), {"forward": forward})
    return cached
