"""What is known, with proof, about one attention in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from subquad.kernels.attention.semantics import SCALAR, ScoreFunction
from subquad.kernels.operator import UNLIMITED

Form: TypeAlias = Literal[
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "com.microsoft Attention",
    "LinearAttention",
    "decomposed",
]


@dataclass(frozen=True)
class MaskPredicate:
    """Which keys a query may see, as a predicate over positions.

    Query slot ``i`` sees key slot ``j`` iff ``-window_right <= (i + offset) - j <= window_left``
    and, with ``key_padding``, key ``j`` of that batch row is a real token. ``offset`` is
    ``kv_len - query_len`` for alignment ``"end"`` (cached decoding) and 0 for ``"start"``.

    Attributes:
        window_left: positions visible before the query, itself not counted; -1 = unlimited.
        window_right: positions visible after the query; -1 = unlimited, 0 = causal.
        key_padding: whether a 0/1 padding input takes part.
        alignment: where the last query stands among the keys.
    """

    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    key_padding: bool = False
    alignment: Literal["start", "end"] = "end"

    @property
    def is_causal(self) -> bool:
        return self.window_right == 0

    @property
    def is_banded(self) -> bool:
        """Whether positions matter at all."""
        return self.window_left != UNLIMITED or self.window_right != UNLIMITED

    def describe(self) -> str:
        """Short form for tables: ``causal, window 128, key padding``."""
        parts = []
        if self.is_causal:
            parts.append("causal")
            if self.window_left != UNLIMITED:
                parts.append(f"window {self.window_left + 1}")
        elif self.is_banded:
            left, right = (
                "inf" if limit == UNLIMITED else limit
                for limit in (self.window_left, self.window_right)
            )
            parts.append(f"band -{left}..+{right}")
        else:
            parts.append("full")
        if self.key_padding:
            parts.append("key padding")
        return ", ".join(parts)


@dataclass(frozen=True)
class Proof:
    """How a site's claims were established.

    Attributes:
        mask: one sentence: the derivation of the mask predicate.
        mask_probes: number of (batch, length, padding) points where predicate and graph agreed.
        node_probes: number of random inputs on which raised node and source subgraph agreed.
        max_error: largest relative error seen in the node probes.
        empty_rows: what the source has for queries that see no key, where the site gives zeros:
            ``zeros``, ``other`` (means over hidden keys, or NaN), or "" where none was seen.
    """

    mask: str
    mask_probes: int
    node_probes: int
    max_error: float
    empty_rows: Literal["", "zeros", "other"] = ""


@dataclass(frozen=True)
class LinearForm:
    """Weights that are products of features: fields as in ``HybridVariant``.

    ``log_decay``: of each key/value head, per position of distance; empty: weights do not decay.
    """

    feature_map: str
    normaliser: Literal["sum", "none"]
    epsilon: float = 0.0
    least: float = 0.0
    log_decay: tuple[float, ...] = ()

    def describe(self) -> str:
        parts = [f"linear ({self.feature_map})"]
        if self.normaliser == "none":
            parts.append("no normaliser")
        if self.epsilon:
            parts.append(f"epsilon {self.epsilon:g}")
        if self.least:
            parts.append(f"divided by {self.least:g} at least")
        if self.log_decay:
            parts.append("decay")
        return ", ".join(parts)


@dataclass(frozen=True)
class SiteBias:
    """A term added to the scores, handed to the node as it is.

    Attributes:
        kind: what its values come from.
        axes: of ``bhqk``, those along which it varies.
        reason: why it is not part of the mask predicate.
    """

    kind: str
    axes: str
    reason: str


@dataclass(frozen=True)
class SiteCache:
    """Where keys and values of earlier calls come from and go: names of the graph as traced.

    Attributes:
        past_key, past_value: inputs ``[batch, num_kv_heads, past, dim]``.
        present_key, present_value: outputs; the same with those of this call behind them.
    """

    past_key: str
    past_value: str
    present_key: str
    present_value: str


@dataclass(frozen=True)
class AttentionSite:
    """One raised attention.

    Attributes:
        name: name of the raised node, stable across runs of the same source.
        index: 0-based, in graph order.
        source_form: the spelling it was found in.
        num_heads, num_kv_heads, head_dim, value_dim: static sizes.
        scale: multiplies query . key.
        softcap: ``softcap * tanh(scores / softcap)``; 0 = none.
        mask: proved visibility predicate.
        is_self: query and key come from the same sequence.
        source_output: value in ``reference.onnx`` that equals this site's output.
        output: value in ``model.onnx`` produced by this site (``[B, H, query_len, value_dim]``).
        biases: terms added to the scores besides the mask.
        alibi: how positions enter the scores, as in ``AttentionVariant``.
        slopes: of ALiBi, one for each head.
        has_sinks: the denominator has one more term per head.
        score_function: what makes weights of scores.
        score_offset: added to all scores before a sigmoid.
        linear: weights are products of features; ``None``: they are not.
        cache: where keys of earlier calls are; ``None``: every call has all keys.
    """

    name: str
    index: int
    source_form: Form
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float
    mask: MaskPredicate
    is_self: bool
    source_output: str
    output: str
    proof: Proof
    biases: tuple[SiteBias, ...] = ()
    alibi: Literal["none", "signed", "absolute"] = "none"
    slopes: tuple[float, ...] = ()
    has_sinks: bool = False
    score_function: ScoreFunction = "softmax"
    score_offset: float = 0.0
    linear: LinearForm | None = None
    cache: SiteCache | None = None

    @property
    def score_bias(self) -> str:
        """Axes of ``bhqk`` along which the sum of all biases varies, as in ``AttentionVariant``."""
        axes = "".join(a for a in "bhqk" if any(a in bias.axes for bias in self.biases))
        alone = self.biases and self.score_function == "sigmoid" and not axes
        return SCALAR if alone else axes

    @property
    def adds_to_scores(self) -> bool:
        """Whether scores get more than a mask: only exact attention keeps that."""
        return bool(self.biases) or self.alibi != "none" or self.has_sinks

    def describe(self) -> str:
        """Short form for tables: the mask, and what else is added."""
        parts = [self.mask.describe()]
        if self.score_function == "sigmoid":
            parts.append("sigmoid")
        if self.linear is not None:
            parts.append(self.linear.describe())
        if self.score_offset:
            parts.append(f"offset {self.score_offset:g}")
        parts += dict.fromkeys(bias.kind for bias in self.biases)
        if self.alibi != "none":
            parts.append("ALiBi" if self.alibi == "signed" else "ALiBi of both sides")
        parts += ["cached"] if self.cache else []
        return ", ".join([*parts, "sinks"] if self.has_sinks else parts)

    def to_json(self) -> dict[str, Any]:
        from dataclasses import asdict

        return asdict(self) | {"mask_text": self.describe()}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> AttentionSite:
        """What :meth:`to_json` wrote, from a manifest that was read with its checks."""
        fields = {key: value for key, value in raw.items() if key != "mask_text"}
        fields["mask"] = MaskPredicate(**raw["mask"])
        fields["proof"] = Proof(**raw["proof"])
        fields["slopes"] = tuple(raw.get("slopes", ()))
        fields["biases"] = tuple(SiteBias(**bias) for bias in raw.get("biases", ()))
        linear = raw.get("linear")
        if linear:
            linear = LinearForm(**{**linear, "log_decay": tuple(linear.get("log_decay", ()))})
        fields["linear"] = linear or None
        fields["cache"] = SiteCache(**raw["cache"]) if raw.get("cache") else None
        return AttentionSite(**fields)
