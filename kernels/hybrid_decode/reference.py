"""Hybrid attention one token after another, by the definition of its state, float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.feature_maps import get_feature_map
from subquad.kernels.operator import UNLIMITED

if TYPE_CHECKING:
    from subquad.kernels.hybrid_decode.semantics import HybridDecodeVariant, StateVariant

Arrays = dict[str, NDArray[Any]]


def decode_steps(
    variant: HybridDecodeVariant, inputs: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.float64], Arrays]:
    """Output and state after the new tokens; inputs by name as ``HybridDecode`` has them."""
    batch, _, length, _ = inputs["query"].shape
    output = np.zeros((batch, variant.num_heads, length, variant.value_dim))
    rows = []
    for b in range(batch):
        machine = _Machine(variant, b, inputs)
        for t in range(length):
            machine.take(t)
            for head in range(variant.num_heads):
                output[b, head, t] = machine.attend(head, inputs["query"][b, head, t])
            machine.settle()
        rows.append(machine.state())
    return output, {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def state_of(variant: StateVariant, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """The state after a first piece: inputs by name as ``HybridState`` has them."""
    rows = []
    for b in range(inputs["key"].shape[0]):
        machine = _Machine(variant, b, inputs)
        for t in range(inputs["key"].shape[2]):
            machine.take(t)
            machine.settle()
        rows.append(machine.state())
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


class _Machine:
    """One batch row: what it remembers, and the token it is at."""

    def __init__(self, variant: StateVariant, b: int, inputs: Mapping[str, NDArray[Any]]) -> None:
        self.variant, self.b, self.inputs = variant, b, inputs
        self.map = get_feature_map(variant.feature_map)
        first = int(inputs["positions"][b, 0])

        def past(name: str, *shape: int) -> NDArray[np.float64]:
            given = inputs.get(f"past_{name}")
            return np.zeros(shape) if given is None else np.array(given[b], dtype=np.float64)

        heads, slots, sinks = variant.num_kv_heads, variant.window_len, variant.sinks
        dims = {"keys": variant.head_dim, "values": variant.value_dim}
        # Lists of tokens, oldest first: (position, real, keys of all heads, values of all heads).
        self.window: list[tuple[int, bool, NDArray[np.float64], NDArray[np.float64]]] = []
        keys = past("window_keys", heads, slots, dims["keys"])
        values = past("window_values", heads, slots, dims["values"])
        for i in range(slots):
            position = first - slots + i
            mask = inputs.get("past_window_mask")
            real = "past_window_keys" in inputs and position >= 0
            real = real and (mask is None or mask[b, i] > 0)
            self.window.append((position, real, keys[:, i], values[:, i]))
        self.sink_keys = past("sink_keys", heads, sinks, dims["keys"])
        self.sink_values = past("sink_values", heads, sinks, dims["values"])
        given = inputs.get("past_sink_mask")
        if given is not None:
            self.sink_real = np.array(given[b] > 0)
        else:
            self.sink_real = (np.arange(sinks) < first) & ("past_sink_keys" in inputs)
        features = variant.feature_dim
        self.sums = past("linear_state", heads, features, dims["values"])
        self.normaliser = past("linear_normaliser", heads, features)

    def take(self, t: int) -> None:
        """The next token arrives; without a window it is linear or a sink at once."""
        position = int(self.inputs["positions"][self.b, t])
        mask = self.inputs.get("key_mask")
        real = True if mask is None else bool(mask[self.b, t])
        key = np.asarray(self.inputs["key"][self.b, :, t], dtype=np.float64)
        value = np.asarray(self.inputs["value"][self.b, :, t], dtype=np.float64)
        self.position = position
        if 0 <= position < self.variant.sinks:
            self.sink_keys[:, position], self.sink_values[:, position] = key, value
            self.sink_real[position] = real
        self.window.append((position, real, key, value))
        if self.variant.window_left == UNLIMITED:
            self._forget_oldest()

    def settle(self) -> None:
        """After the token's queries: what the next token no longer has in its window goes."""
        if self.variant.window_left != UNLIMITED:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        position, real, key, value = self.window.pop(0)
        if real and self.map is not None and position >= self.variant.sinks:
            features = self.map.apply(key[:, None], self.inputs.get("key_map"))[:, 0]
            self.sums += features[:, :, None] * value[:, None, :]
            self.normaliser += features

    def attend(self, head: int, query: NDArray[Any]) -> NDArray[np.float64]:
        variant = self.variant
        h = head // variant.heads.group
        query = np.asarray(query, dtype=np.float64)
        scores, values = [], []
        for _, real, key, value in self.window:
            if real:
                scores.append(variant.scale * float(query @ key[h]))
                values.append(value[h])
        for s in range(variant.sinks):
            distance = self.position - s
            allowed = variant.allowed_left == UNLIMITED or distance <= variant.allowed_left
            if self.sink_real[s] and distance > variant.window_left and allowed:
                scores.append(variant.scale * float(query @ self.sink_keys[h, s]))
                values.append(self.sink_values[h, s])
        linear = 0.0
        numerator = np.zeros(variant.value_dim)
        if self.map is not None:
            weights = self.inputs.get("query_map")
            weights = None if weights is None else weights[head : head + 1]
            features = self.map.apply(query[None, None], weights)[0, 0]
            linear = float(features @ self.normaliser[h])
            numerator = features @ self.sums[h]
        shift = max([*scores, np.log(linear) if linear else -np.inf])
        if not np.isfinite(shift):
            return np.zeros(variant.value_dim)
        weights = np.exp(np.array(scores) - shift)
        total = weights.sum() + linear * np.exp(-shift)
        sums = numerator * np.exp(-shift)
        if values:
            sums = sums + weights @ np.array(values)
        result: NDArray[np.float64] = sums / total
        return result

    def state(self) -> Arrays:
        """The parts by name, in the order of ``StateVariant.state``."""
        whole: Arrays = {
            "sink_keys": self.sink_keys,
            "sink_values": self.sink_values,
            "sink_mask": self.sink_real.astype(np.float64),
            "linear_state": self.sums,
            "linear_normaliser": self.normaliser,
        }
        if self.window:
            whole["window_keys"] = np.stack([key for _, _, key, _ in self.window], axis=1)
            whole["window_values"] = np.stack([value for *_, value in self.window], axis=1)
            whole["window_mask"] = np.array([1.0 * real for _, real, *_ in self.window])
        return {spec.name: whole[spec.name] for spec in self.variant.state}
