"""Inputs to compare two models on: made up from a seed, from text, or given as arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.artifact import check_inputs
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import InputSpec, Manifest
from subquad.runtime.npz import read_npz
from subquad.runtime.past import at_start, empty_past
from subquad.runtime.text import Tokenizer

PADDINGS = ("none", "right", "left", "holes")
DEFAULT_LENGTHS = (1, 17, 128, 512)

# Rows of a batch share one run as long as they hold at most this many tokens together.
_TOKENS_PER_RUN = 2048
_SYNTHETIC_ROWS = 2
_TEXT_ROWS = 8
_UNKNOWN_VOCABULARY = 64


@dataclass(frozen=True)
class Layout:
    """Names of the dynamic dimensions of the inputs, where no tokens came before.

    Attributes:
        specs: the inputs, those that carry what came before left out.
        batch: first dimension of the inputs, ``None`` if it is fixed.
        lengths: the others, in order of appearance; the first one is *the* length.
        masks: name of a length dimension -> its padding mask input.
    """

    batch: str | None
    lengths: tuple[str, ...]
    masks: Mapping[str, str]
    specs: tuple[InputSpec, ...] = field(repr=False)

    @staticmethod
    def of(manifest: Manifest) -> Layout:
        inputs = tuple(
            replace(spec, shape=tuple(map(at_start, spec.shape)))
            for spec in manifest.inputs
            if spec.role != "past"
        )
        names = [dim for spec in inputs for dim in spec.shape if isinstance(dim, str)]
        first = [spec.shape[0] for spec in inputs if spec.shape]
        batch = next((dim for dim in first if isinstance(dim, str)), None)
        lengths = tuple(dict.fromkeys(name for name in names if name != batch))
        masks = {
            str(spec.shape[1]): spec.name
            for spec in inputs
            if spec.role == "padding_mask"
            and len(spec.shape) == 2
            and spec.shape[1] in lengths
            and (isinstance(spec.shape[0], int) or spec.shape[0] == batch)
        }
        return Layout(batch, lengths, masks, inputs)

    def token_shape(self, dim: str, feeds: Mapping[str, NDArray[Any]]) -> tuple[int, int] | None:
        """``(batch, length)`` of the first input whose second dimension is ``dim``."""
        for spec in self.specs:
            if len(spec.shape) >= 2 and spec.shape[1] == dim:
                rows, length = feeds[spec.name].shape[:2]
                return rows, length
        return None

    def sizes(self, rows: int, length: int) -> dict[str, int]:
        """Sizes of all dynamic dimensions.

        Lengths differ from each other where they can, so that no axis is taken for another.
        """
        sizes = {name: max(1, length - k) for k, name in enumerate(self.lengths)}
        return sizes if self.batch is None else sizes | {self.batch: rows}


@dataclass(frozen=True)
class Batch:
    """One run.

    Attributes:
        length: size of the first length dimension; 0 if the model has none.
        padding: one of ``PADDINGS``, or ``given``.
        feeds: input name -> array.
        group: the kind of documents it is made of; empty where kinds are not told apart.
    """

    length: int
    padding: str
    feeds: Mapping[str, NDArray[Any]]
    group: str = ""

    @property
    def rows(self) -> int:
        return max(len(array) if array.ndim else 1 for array in self.feeds.values())


@dataclass(frozen=True)
class Case:
    """One point of the lattice; its batches are made when they are needed."""

    length: int
    padding: str
    parts: tuple[tuple[int, int], ...] = field(repr=False)

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.parts)


class Samples(Protocol):
    """A source of inputs; the same call gives the same arrays."""

    @property
    def kind(self) -> str:
        """``synthetic``, ``text``, ``jsonl`` or ``npz``."""

    @property
    def description(self) -> str:
        """One sentence for the report."""

    def cases(
        self, lengths: Sequence[int], paddings: Sequence[str]
    ) -> Iterator[Case | tuple[int, str]]:
        """Points of the lattice, shortest first; ``(length, reason)`` for a length left out."""

    def default_lengths(self) -> tuple[int, ...]:
        """Lengths to use when the user names none."""

    def batches(self, case: Case) -> Iterator[Batch]:
        """The inputs of one case."""


class LatticeSamples:
    """Lengths x paddings, filled with made-up or with real tokens.

    Args:
        manifest: of the artifact.
        seed: of everything random.
        text: source of real tokens; made-up ones otherwise.
        rows: rows per case; ``None`` = 2 made-up ones, or up to 8 of text.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        seed: int,
        text: TextSource | None = None,
        rows: int | None = None,
    ) -> None:
        self._manifest = manifest
        self._seed = seed
        self._text = text
        self._rows = rows
        self._layout = Layout.of(manifest)
        values = [spec.name for spec in manifest.inputs if spec.role == "values"]
        if text is not None and values:
            raise UsageError(
                f"Input {values[0]!r} takes values that cannot be made from text. "
                "Pass a .npz file with one array per input."
            )

    @property
    def kind(self) -> str:
        return "synthetic" if self._text is None else self._text.kind

    @property
    def description(self) -> str:
        if self._text is None:
            return (
                f"SYNTHETIC inputs (random, seed {self._seed}): they show that the graphs agree, "
                "not how accurate the model is on real data"
            )
        return self._text.description

    def default_lengths(self) -> tuple[int, ...]:
        limit = self._manifest.max_length
        longest = None if self._text is None else self._text.longest
        limits = [bound for bound in (limit, longest) if bound is not None]
        lengths = [n for n in DEFAULT_LENGTHS if all(n <= bound for bound in limits)]
        if self._text is not None and limits:
            lengths.append(min([*limits, 1024]))
        return tuple(sorted(set(lengths))) or (1,)

    def cases(
        self, lengths: Sequence[int], paddings: Sequence[str]
    ) -> Iterator[Case | tuple[int, str]]:
        if not self._layout.lengths:
            yield Case(0, "none", self._parts(0, self._rows or _SYNTHETIC_ROWS))
            return
        for length in sorted(set(lengths)):
            rows = self._rows or (_SYNTHETIC_ROWS if self._text is None else _TEXT_ROWS)
            if self._text is not None:
                rows = min(rows, self._text.available(length))
                if rows == 0:
                    reason = f"the data hold at most {self._text.longest} tokens in one piece"
                    yield length, reason
                    continue
            parts = self._parts(length, rows)
            for padding in paddings:
                if padding == "none" or (self._layout.masks and length > 1):
                    yield Case(length, padding, parts)

    def batches(self, case: Case) -> Iterator[Batch]:
        for first, count in case.parts:
            # One generator per batch: a case does not depend on which cases ran before it.
            rng = np.random.default_rng(
                [self._seed, case.length, PADDINGS.index(case.padding), first]
            )
            yield Batch(case.length, case.padding, self._feeds(case, first, count, rng))

    def _parts(self, length: int, rows: int) -> tuple[tuple[int, int], ...]:
        if self._layout.batch is None:
            shape = next((spec.shape for spec in self._manifest.inputs if spec.shape), (1,))
            count = int(shape[0])
            return tuple((first, count) for first in range(0, rows, count))
        step = max(1, _TOKENS_PER_RUN // max(1, length))
        return tuple((first, min(step, rows - first)) for first in range(0, rows, step))

    def _feeds(
        self, case: Case, first: int, count: int, rng: np.random.Generator
    ) -> dict[str, NDArray[Any]]:
        sizes = self._layout.sizes(count, case.length)
        masks = {
            dim: padding_mask(case.padding, count, sizes[dim], first, rng)
            for dim in self._layout.masks
        }
        feeds = {}
        for spec in self._layout.specs:
            shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
            mask = next((masks[dim] for dim in spec.shape if dim in masks), None)
            feeds[spec.name] = self._values(spec, shape, mask, first, rng)
        return empty_past(self._manifest.inputs, count) | feeds

    def _values(
        self,
        spec: InputSpec,
        shape: tuple[int, ...],
        mask: NDArray[np.bool_] | None,
        first: int,
        rng: np.random.Generator,
    ) -> NDArray[Any]:
        if spec.role == "padding_mask":
            values = mask if mask is not None and mask.shape == shape else np.ones(shape)
            return values.astype(spec.dtype)
        if spec.role == "values":
            return rng.standard_normal(shape).astype(spec.dtype)
        if spec.role == "ids":
            return other_ids(spec, shape, mask, rng, random=self._text is None)
        if self._text is None:
            return random_ids(spec, shape, rng)
        return self._text_ids(spec, shape, mask, first)

    def _text_ids(
        self,
        spec: InputSpec,
        shape: tuple[int, ...],
        mask: NDArray[np.bool_] | None,
        first: int,
    ) -> NDArray[Any]:
        assert self._text is not None
        ids = np.zeros(shape, spec.dtype)
        real = np.ones(shape, np.bool_) if mask is None else mask
        for row in range(shape[0]):
            tokens = self._text.tokens(first + row, shape[1], int(real[row].sum()))
            if spec.high is not None and max(tokens) >= spec.high:
                raise UsageError(
                    f"The tokenizer gives token {max(tokens)}, but input {spec.name!r} takes "
                    f"indices below {spec.high}: tokenizer and model do not belong together."
                )
            ids[row, real[row]] = tokens
        return ids


class ArraySamples:
    """Arrays from a ``.npz`` file, cut along the batch axis only."""

    kind = "npz"

    def __init__(self, manifest: Manifest, path: Path) -> None:
        self._arrays = check_inputs(manifest.inputs, read_npz(path))
        self._layout = Layout.of(manifest)
        self._manifest = manifest
        self._name = path.name
        masks = [self._arrays[name] for name in self._layout.masks.values()]
        if any(not mask.any() for mask in masks):
            raise UsageError(f"{path}: the padding masks are all 0, so nothing can be compared.")

    @property
    def description(self) -> str:
        return f"arrays of {self._name}"

    def default_lengths(self) -> tuple[int, ...]:
        return (self._size(self._layout.lengths[:1]),)

    def cases(
        self, lengths: Sequence[int], paddings: Sequence[str]
    ) -> Iterator[Case | tuple[int, str]]:
        length = self._size(self._layout.lengths[:1])
        rows = self._size((self._layout.batch,) if self._layout.batch else ()) or 1
        step = max(1, _TOKENS_PER_RUN // max(1, length))
        parts = tuple((first, min(step, rows - first)) for first in range(0, rows, step))
        yield Case(length, "given", parts)

    def batches(self, case: Case) -> Iterator[Batch]:
        for first, count in case.parts:
            feeds: dict[str, NDArray[Any]] = {}
            for spec in self._manifest.inputs:
                array = self._arrays[spec.name]
                if self._layout.batch is not None and spec.shape[:1] == (self._layout.batch,):
                    array = array[first : first + count]
                feeds[spec.name] = array
            yield Batch(case.length, case.padding, feeds)

    def _size(self, dims: Sequence[str]) -> int:
        for spec in self._layout.specs:
            for dim, size in zip(spec.shape, self._arrays[spec.name].shape, strict=True):
                if dim in dims:
                    return int(size)
        return 0


class TextSource:
    """Tokens from documents.

    A causal model reads consecutive windows of all documents in one stream. Any other model
    reads each document on its own, cut to the length, with the special tokens of the tokenizer.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, *, causal: bool) -> None:
        self.kind = "jsonl" if path.suffix.lower() == ".jsonl" else "text"
        documents = read_documents(path, split=not causal)
        self._tokenizer = tokenizer
        self._stream: list[int] | None = None
        self._documents: list[tuple[int, str]] = []
        if causal:
            self._stream = [t for text in documents for t in tokenizer.encode(text)]
            count = len(self._stream)
        else:
            # Longest first: a length then uses the first documents that reach it.
            sized = [(len(tokenizer.encode(text)), text) for text in documents]
            self._documents = sorted(sized, key=lambda item: -item[0])
            count = sum(size for size, _ in sized)
        if count == 0:
            raise UsageError(f"{path}: the text has no tokens.")
        self.longest = self._documents[0][0] if self._documents else count
        self.description = f"{path.name}: {len(documents)} documents, {count} tokens"

    def available(self, length: int) -> int:
        """Rows of ``length`` real tokens."""
        if self._stream is not None:
            return len(self._stream) // length
        return sum(1 for size, _ in self._documents if size >= length)

    def tokens(self, row: int, length: int, count: int) -> list[int]:
        """``count`` tokens of row ``row`` of the rows of ``length``."""
        if self._stream is not None:
            start = row * length
            return self._stream[start : start + count]
        return self._tokenizer.encode(self._documents[row][1], limit=count)


def padding_mask(
    padding: str, rows: int, length: int, first_row: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """``[rows, length]``, true = real token; every row has at least one.

    Every other row of a padded batch is full, so that a mask that is read across rows shows.
    """
    mask = np.ones((rows, length), np.bool_)
    if length < 2:
        return mask
    for row in range(rows):
        if padding == "none" or ((first_row + row) % 2 == 0 and rows > 1):
            continue
        real = int(rng.integers(max(1, length // 3), length))
        if padding == "right":
            mask[row, real:] = False
        elif padding == "left":
            mask[row, : length - real] = False
        else:
            mask[row] = rng.random(length) < 0.7
            mask[row, rng.integers(length)] = False
            mask[row, 0] = True
    return mask


def random_ids(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Uniform valid indices."""
    return np.asarray(rng.integers(0, spec.high or _UNKNOWN_VOCABULARY, shape), spec.dtype)


def other_ids(
    spec: InputSpec,
    shape: tuple[int, ...],
    mask: NDArray[np.bool_] | None,
    rng: np.random.Generator,
    *,
    random: bool,
) -> NDArray[Any]:
    """Indices that are no tokens: real-token positions, segments, ..."""
    if "position" in spec.name:
        real = np.ones(shape, np.bool_) if mask is None or mask.shape != shape else mask
        positions = np.maximum(np.cumsum(real, axis=-1) - 1, 0)
        limit = (spec.high or positions.max() + 1) - 1
        return np.asarray(np.minimum(positions, limit), spec.dtype)
    if not random or spec.high is None:
        return np.zeros(shape, spec.dtype)
    return random_ids(spec, shape, rng)


def is_causal_model(manifest: Manifest) -> bool:
    """Whether no token can see a later one: every self-attention is causal."""
    own = [record.site["mask"] for record in manifest.sites if record.site["is_self"]]
    return bool(own) and all(mask["window_right"] == 0 for mask in own)


def open_samples(
    manifest: Manifest,
    folder: Path,
    *,
    data: Path | None,
    seed: int,
    rows: int | None = None,
) -> Samples:
    """The inputs a user asked for: ``data`` is ``.npz``, ``.jsonl``, any other text, or none."""
    if data is None:
        return LatticeSamples(manifest, seed=seed, rows=rows)
    if not data.is_file():
        raise UsageError(f"No such file: {data}")
    if data.suffix.lower() == ".npz":
        return ArraySamples(manifest, data)
    source = TextSource(data, Tokenizer.load(folder), causal=is_causal_model(manifest))
    return LatticeSamples(manifest, seed=seed, text=source, rows=rows)


def read_documents(path: Path, *, split: bool) -> list[str]:
    """The documents of a text file or of a JSONL file with ``{"text": ...}`` lines.

    Args:
        path: the file, UTF-8.
        split: whether a plain text is cut into paragraphs (or lines, if it has only one).
    """
    try:
        # With or without a byte order mark.
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a readable UTF-8 text: {error}") from error
    if "\0" in text:
        raise UsageError(
            f"{path} is not a readable UTF-8 text: it has NUL characters, as binary files and "
            "UTF-16 do. Convert it to UTF-8, or leave it out."
        )
    if path.suffix.lower() == ".jsonl":
        documents = [
            _json_text(line, f"{path}:{number}")
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
    elif split:
        documents = [part.strip() for part in text.split("\n\n")]
        if len([part for part in documents if part]) < 2:
            documents = [line.strip() for line in text.splitlines()]
    else:
        documents = [text]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise UsageError(f"{path} holds no text.")
    return documents


def _json_text(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f'{where}: expected a JSON object with a "text" field.') from error
    if not isinstance(text, str):
        raise UsageError(f'{where}: "text" must be a string, got {type(text).__name__}.')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f'{where}: "text" holds what is no character: {error}.') from error
    return text
