"""One run of an artifact for a person: arrays or text in, a summary out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.artifact import Artifact, load
from subquad.runtime.errors import UsageError
from subquad.runtime.jsonable import json_ready
from subquad.runtime.kernel_library import KernelMode
from subquad.runtime.manifest import InputSpec
from subquad.runtime.metamorphic import length_axis, real_tokens, select
from subquad.runtime.npz import read_npz, write_npz
from subquad.runtime.samples import Layout, is_causal_model, other_ids
from subquad.runtime.text import Tokenizer

Progress = Callable[[str, float | None], None]
Values = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class TokenScore:
    """A likely token: its text, index and probability."""

    text: str
    index: int
    probability: float


@dataclass(frozen=True)
class Summary:
    """One output, for one text or for all arrays.

    Attributes:
        output: its name.
        shape: ``[batch, ...]`` of the whole output, or what remains of it for one text.
        text: the text, if it came from one.
        next_tokens: most likely ones after the last real token, for language models.
        embedding: mean over real tokens, for other outputs of text models.
        mean, low, high: over all values.
    """

    output: str
    shape: tuple[int, ...]
    mean: float
    low: float
    high: float
    text: str | None = None
    next_tokens: tuple[TokenScore, ...] = ()
    embedding: tuple[float, ...] = ()

    def describe(self) -> str:
        """One or a few lines for a terminal."""
        size = " x ".join(map(str, self.shape)) or "scalar"
        line = (
            f"{self.output} [{size}]: mean {self.mean:.4g}, from {self.low:.4g} to {self.high:.4g}"
        )
        if self.text is not None:
            line = f"{self.text!r}\n  {line}"
        for token in self.next_tokens:
            line += f"\n  {token.probability:7.2%}  {token.text!r}"
        if self.embedding:
            norm = float(np.linalg.norm(self.embedding))
            first = ", ".join(f"{value:.4f}" for value in self.embedding[:5])
            line += f"\n  mean over tokens: norm {norm:.4f}, begins with {first}"
        return line


@dataclass(frozen=True)
class RunResult:
    """Summaries in order of texts and outputs; ``execution`` as of the artifact."""

    summaries: tuple[Summary, ...]
    execution: dict[str, Any]
    output: str | None

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json_ready(self)
        return result


def run(
    path: Path,
    *,
    arrays: Path | None = None,
    texts: Sequence[str] = (),
    output: Path | None = None,
    top: int = 5,
    provider: str = "cpu",
    threads: int | None = None,
    kernels: KernelMode = "auto",
    progress: Progress | None = None,
) -> RunResult:
    """Run the artifact ``path`` on a ``.npz`` file or on texts.

    Args:
        path: artifact directory.
        arrays: ``.npz`` with one array per input.
        texts: run as one batch; the artifact needs a tokenizer.
        output: written as ``.npz`` with one array per output, complete or not at all.
        top: number of likely tokens to show.
        provider, threads, kernels: as ``load``.
        progress: called with a message.

    Raises:
        UsageError: neither or both of ``arrays`` and ``texts``; bad inputs.
        OutputError: ``output`` cannot be written.
    """
    if (arrays is None) == (not texts):
        raise UsageError("Pass either --input FILE.npz or --text TEXT (which may repeat).")
    report = progress or (lambda message, share: None)
    report("loading", None)
    artifact = load(path, provider=provider, threads=threads, kernels=kernels)
    tokenizer = Tokenizer.load(artifact.path) if texts else None
    if arrays is not None:
        feeds: Values = read_npz(arrays)
    else:
        assert tokenizer is not None
        feeds = text_feeds(artifact, tokenizer, texts)
    report("running", None)
    values = artifact.run(feeds)
    if output is not None:
        write_npz(output, values)
    if tokenizer is None:
        summaries = [_summary(name, array) for name, array in values.items()]
    else:
        summaries = _text_summaries(artifact, tokenizer, texts, feeds, values, top)
    return RunResult(
        tuple(summaries), json_ready(artifact.execution), None if output is None else str(output)
    )


def text_feeds(
    artifact: Artifact, tokenizer: Tokenizer, texts: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """The inputs of one batch of texts, padded on the right.

    Raises:
        UsageError: an empty text, texts of unequal length without a padding mask, or inputs that
            text cannot fill.
    """
    manifest = artifact.manifest
    layout = Layout.of(manifest)
    tokens = [tokenizer.encode(text) for text in texts]
    for text, ids in zip(texts, tokens, strict=True):
        if not ids:
            raise UsageError(f"The text {text!r} has no tokens.")
    length = max(map(len, tokens))
    if manifest.max_length is not None and length > manifest.max_length:
        raise UsageError(
            f"A text has {length} tokens, but the model accepts at most {manifest.max_length}."
        )
    if len({len(ids) for ids in tokens}) > 1 and not layout.masks:
        raise UsageError(
            "The model has no padding mask input, so texts of different length cannot share a "
            "run. Pass one --text."
        )
    mask = np.array([[slot < len(ids) for slot in range(length)] for ids in tokens])
    filled = np.array([ids + [0] * (length - len(ids)) for ids in tokens])
    return {spec.name: _text_input(spec, filled, mask) for spec in layout.specs}


def _text_input(spec: InputSpec, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[Any]:
    if spec.role == "values":
        raise UsageError(f"Input {spec.name!r} takes values, not text. Pass --input FILE.npz.")
    if len(spec.shape) != 2:
        raise UsageError(
            f"Input {spec.name!r} of shape {list(spec.shape)} cannot be made from text. "
            "Pass --input FILE.npz."
        )
    if spec.role == "padding_mask":
        return np.asarray(mask, spec.dtype)
    if spec.role == "token_ids":
        return np.asarray(ids, spec.dtype)
    return other_ids(spec, ids.shape, mask, np.random.default_rng(0), random=False)


def _text_summaries(
    artifact: Artifact,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    feeds: Values,
    values: Values,
    top: int,
) -> list[Summary]:
    manifest = artifact.manifest
    real = real_tokens(Layout.of(manifest), feeds)
    summaries = []
    for row, text in enumerate(texts):
        own = {dim: mask[row : row + 1] for dim, mask in real.items()}
        for spec in manifest.outputs:
            if spec.past:
                continue  # of use to the next call only
            array = values[spec.name][row : row + 1]
            found = length_axis(spec.shape, array, own)
            # The values of the real tokens only: [tokens, everything else].
            rows = array.reshape(1, -1) if found is None else select(array, *found)
            if spec.is_logits and is_causal_model(manifest):
                tokens = _top_tokens(tokenizer, rows[-1], top)
                summaries.append(_summary(spec.name, rows, text, next_tokens=tokens))
            elif spec.is_logits:
                summaries.append(_summary(spec.name, rows, text))
            else:
                mean = tuple(float(value) for value in rows.mean(axis=0, dtype=np.float64))
                summaries.append(_summary(spec.name, rows, text, embedding=mean))
    return summaries


def _summary(
    name: str,
    array: NDArray[Any],
    text: str | None = None,
    *,
    next_tokens: tuple[TokenScore, ...] = (),
    embedding: tuple[float, ...] = (),
) -> Summary:
    return Summary(
        output=name,
        shape=array.shape,
        mean=float(array.mean(dtype=np.float64)),
        low=float(array.min()),
        high=float(array.max()),
        text=text,
        next_tokens=next_tokens,
        embedding=embedding,
    )


def _top_tokens(tokenizer: Tokenizer, logits: NDArray[Any], count: int) -> tuple[TokenScore, ...]:
    scores = np.asarray(logits, np.float64)
    weights = np.exp(scores - scores.max())
    probabilities = weights / weights.sum()
    order = np.argsort(-probabilities, kind="stable")[:count]
    return tuple(
        TokenScore(tokenizer.token(int(index)), int(index), float(probabilities[index]))
        for index in order
    )
