"""Calibration and held-out inputs: from texts, JSONL, ``.npz`` arrays, folders, or made up.

What is measured to choose a plan and what the plan is judged by never share a document; where
there is only one document, they never share a piece of it. Both have the same number of rows of
every kind of document (``groups.py``). Same seed and files, same arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.passes.calibrate.groups import DocumentGroup, document_groups
from subquad.passes.calibrate.passages import Document, passages, read_texts
from subquad.runtime.artifact import check_inputs
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.npz import read_npz
from subquad.runtime.samples import (
    Batch,
    Layout,
    is_causal_model,
    other_ids,
    random_ids,
    read_documents,
)
from subquad.runtime.text import Tokenizer

CALIBRATION_TOKENS = 8192
HELDOUT_TOKENS = 16384
"""Per length, if the data have them; at least one row of every kind in any case."""

_TOKENS_PER_BATCH = 2048
_HALVES = ("calibration", "held-out")


@dataclass(frozen=True)
class CalibrationData:
    """Two disjoint sets of inputs.

    Attributes:
        calibration, heldout: shortest length first; of one length, kinds of documents take turns.
        synthetic: whether they are made up.
        description: one sentence about where they come from.
        notes: what a reader must know, such as lengths left out.
        digest: SHA-256 over all arrays.
    """

    calibration: tuple[Batch, ...]
    heldout: tuple[Batch, ...]
    synthetic: bool
    description: str
    notes: tuple[str, ...]
    digest: str

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({batch.length for batch in self.heldout}))

    @property
    def groups(self) -> tuple[str, ...]:
        """Kinds of documents, in the order given; one without a name if the inputs are made up."""
        return tuple(dict.fromkeys(batch.group for batch in self.heldout))

    def facts(self, notes: Sequence[str]) -> dict[str, Any]:
        """What a plan says of them, with more notes."""
        return {
            "description": self.description,
            "digest": self.digest,
            "synthetic": self.synthetic,
            "groups": list(self.groups) if self.groups != ("",) else [],
            "notes": [*self.notes, *notes],
            "measured_lengths": list(self.lengths),
        }


def open_data(
    manifest: Manifest,
    folder: Path,
    *,
    paths: Sequence[Path] = (),
    lengths: Sequence[int],
    seed: int = 0,
    calibration_tokens: int = CALIBRATION_TOKENS,
    heldout_tokens: int = HELDOUT_TOKENS,
) -> CalibrationData:
    """Read ``paths`` and split them.

    Args:
        manifest: signature of the model.
        folder: of its tokenizer.
        paths: ``.npz`` files with one array per input, ``.jsonl`` files with ``{"text": ...}``
            lines, other text files, or folders of such files; none = made-up inputs.
        lengths: tokens per row; a length that the data or the model do not reach is left out, and
            said.
        seed: decides which documents are held out, and everything made up.
        calibration_tokens, heldout_tokens: per length.

    Raises:
        UsageError: files that cannot be read, too little data for a split, or kinds mixed.
    """
    rows = {_HALVES[0]: calibration_tokens, _HALVES[1]: heldout_tokens}
    sizes = sorted(set(lengths))
    if not sizes:
        raise UsageError("At least one length is needed.")
    if sizes[0] < 1:
        raise UsageError(f"Lengths must be at least 1, got {sizes[0]}.")
    notes: list[str] = []
    limit = manifest.max_length
    if limit is not None and sizes[-1] > limit:
        left = [n for n in sizes if n > limit]
        notes.append(f"lengths {left} left out: the model accepts at most {limit} tokens")
        sizes = [n for n in sizes if n <= limit]
    layout = Layout.of(manifest)
    groups, group_notes = document_groups(paths)
    notes += group_notes
    files = [file for group in groups for file in group.files]
    arrays = [file for file in files if file.suffix.lower() == ".npz"]
    if arrays and len(arrays) != len(files):
        raise UsageError("Calibration data are either .npz files or texts, not both.")
    if not sizes and not arrays:
        raise UsageError(f"The model accepts at most {limit} tokens; use shorter --lengths.")
    if arrays:
        halves, description = _arrays(manifest, layout, groups, seed, rows)
    else:
        sources = _sources(manifest, folder, groups, seed)
        description = _described({name: source.description for name, source in sources.items()})
        halves = {name: [] for name in _HALVES}
        for length in sizes:
            fit, note = _long_enough(sources, length)
            notes += note
            for half in _HALVES:
                halves[half] += _turns(manifest, layout, fit, half, length, rows[half], seed)
    if not all(halves.values()):
        raise UsageError(
            "The data are too short for these lengths: " + "; ".join(notes) + ". Give more data "
            "(--data) or shorter --lengths."
        )
    return CalibrationData(
        calibration=tuple(halves[_HALVES[0]]),
        heldout=tuple(halves[_HALVES[1]]),
        synthetic=not files,
        description=description,
        notes=tuple(notes),
        digest=_digest([*halves[_HALVES[0]], *halves[_HALVES[1]]]),
    )


@dataclass(frozen=True)
class _Source:
    """Rows of token ids.

    Attributes:
        description: for the report.
        available: (half, length) -> number of rows.
        tokens: (half, length, count, row) -> ids of that row, at most ``length``.
    """

    description: str
    available: Callable[[str, int], int]
    tokens: Callable[[str, int, int, int], NDArray[np.int64]] | None


def _sources(
    manifest: Manifest, folder: Path, groups: Sequence[DocumentGroup], seed: int
) -> dict[str, _Source]:
    """Group -> its rows."""
    if not groups:
        return {"": _synthetic(manifest, seed)}
    values = [spec.name for spec in manifest.inputs if spec.role == "values"]
    if values:
        raise UsageError(
            f"Input {values[0]!r} takes values that cannot be made from text. Pass .npz files "
            "with one array per input."
        )
    tokenizer = Tokenizer.load(folder)
    return {group.name: _text_source(manifest, tokenizer, group.files, seed) for group in groups}


def _text_source(
    manifest: Manifest, tokenizer: Tokenizer, files: Sequence[Path], seed: int
) -> _Source:
    if not is_causal_model(manifest):
        padded = bool(Layout.of(manifest).masks)
        documents = read_texts(files, tokenizer)
        encoded = [document.ids for document in documents]
        described = _size(files, encoded, "texts")
        source = _passage_source(documents, tokenizer, padded, described, seed)
    else:
        texts = [text for file in files for text in read_documents(file, split=False)]
        encoded = [np.asarray(tokenizer.encode(text), np.int64) for text in texts]
        encoded = [ids for ids in encoded if len(ids)]
        order = np.random.default_rng([seed, 1]).permutation(len(encoded))
        source = _stream_source([encoded[i] for i in order], _size(files, encoded, "documents"))
    _check_vocabulary(manifest, encoded)
    return source


def _size(files: Sequence[Path], encoded: Sequence[NDArray[np.int64]], what: str) -> str:
    return f"{_names(files)}: {len(encoded)} {what}, {sum(map(len, encoded))} tokens"


def _names(files: Sequence[Path]) -> str:
    names = ", ".join(dict.fromkeys(file.name for file in files[:5]))
    return names + (f" and {len(files) - 5} more" if len(files) > 5 else "")


def _described(descriptions: Mapping[str, str]) -> str:
    if len(descriptions) == 1:
        return next(iter(descriptions.values()))
    return "; ".join(f"{name} ({text})" for name, text in descriptions.items())


def _stream_source(documents: Sequence[NDArray[np.int64]], described: str) -> _Source:
    """Windows of two streams: for models in which no token sees a later one."""
    parts: dict[str, list[NDArray[np.int64]]] = {name: [] for name in _HALVES}
    whole = _balanced(documents)
    # One document, or one that is most of the text, is cut in the middle.
    if min(whole) < sum(whole) / 4:
        for ids in documents:
            parts[_HALVES[0]].append(ids[: len(ids) // 2])
            parts[_HALVES[1]].append(ids[len(ids) // 2 :])
        described += "; first half of each document for calibration, second half held out"
    else:
        sizes = [0, 0]
        for ids in documents:
            half = sizes.index(min(sizes))
            sizes[half] += len(ids)
            parts[_HALVES[half]].append(ids)
        described += "; split by documents"
    streams = {name: np.concatenate(part) for name, part in parts.items()}

    def tokens(half: str, length: int, count: int, row: int) -> NDArray[np.int64]:
        # Spread over the whole stream, so that every kind of text takes part.
        start = row * (len(streams[half]) // count)
        return streams[half][start : start + length]

    return _Source(described, lambda half, length: len(streams[half]) // length, tokens)


def _balanced(documents: Sequence[NDArray[np.int64]]) -> list[int]:
    sizes = [0, 0]
    for ids in documents:
        sizes[sizes.index(min(sizes))] += len(ids)
    return sizes


def _passage_source(
    documents: Sequence[Document], tokenizer: Tokenizer, padded: bool, described: str, seed: int
) -> _Source:
    """Passages; those that are short are padded where the model has a padding mask."""
    order = np.random.default_rng([seed, 1]).permutation(len(documents))
    halves = {name: set(order[index::2].tolist()) for index, name in enumerate(_HALVES)}

    @cache
    def usable(half: str, length: int) -> list[NDArray[np.int64]]:
        own = [document for i, document in enumerate(documents) if i in halves[half]]
        rows = passages(own, length, tokenizer)
        rows = [rows[i] for i in np.random.default_rng([seed, 3, length]).permutation(len(rows))]
        long = [ids for ids in rows if len(ids) >= length]
        if not padded:
            return long
        return long + sorted((ids for ids in rows if len(ids) < length), key=len, reverse=True)

    return _Source(
        f"{described}; every other one held out, neighbours of a file read as one",
        lambda half, length: len(usable(half, length)),
        lambda half, length, count, row: usable(half, length)[row],
    )


def _synthetic(manifest: Manifest, seed: int) -> _Source:
    """Random tokens; every other row repeats its first half, so that copying heads show."""
    spec = next((spec for spec in manifest.inputs if spec.role == "token_ids"), None)
    described = (
        f"SYNTHETIC inputs (random, seed {seed}): errors on real data will differ, so a budget "
        "that is kept here says nothing about them; pass --data"
    )
    if spec is None:
        return _Source(described, lambda half, length: 2**30, None)

    def tokens(half: str, length: int, count: int, row: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([seed, 2, _HALVES.index(half), length, row])
        ids = random_ids(spec, (length,), rng).astype(np.int64)
        if row % 2:
            ids[length // 2 :] = ids[: length - length // 2]
        return ids

    return _Source(described, lambda half, length: 2**30, tokens)


def _long_enough(
    sources: Mapping[str, _Source], length: int
) -> tuple[dict[str, _Source], list[str]]:
    """The groups with a row of ``length`` in both halves, and a note if that is not all."""
    fit = {
        name: source
        for name, source in sources.items()
        if all(source.available(half, length) for half in _HALVES)
    }
    reason = "the data do not have it both for calibration and held out"
    if not fit:
        return fit, [f"length {length} left out: {reason}"]
    left = ", ".join(name for name in sources if name not in fit)
    return fit, [f"length {length} left out for {left}: {reason}"] if left else []


def _turns(
    manifest: Manifest,
    layout: Layout,
    sources: Mapping[str, _Source],
    half: str,
    length: int,
    tokens: int,
    seed: int,
) -> Iterator[Batch]:
    """As many rows of each group; groups take turns, so that a run stopped early saw them all."""
    if not sources:
        return
    wanted = max(1, tokens // length // len(sources))
    by_group = [
        _batches(
            manifest,
            layout,
            source,
            (name, half),
            length,
            min(wanted, source.available(half, length)),
            seed,
        )
        for name, source in sources.items()
    ]
    for turn in zip_longest(*by_group):
        yield from (batch for batch in turn if batch is not None)


def _batches(
    manifest: Manifest,
    layout: Layout,
    source: _Source,
    place: tuple[str, str],
    length: int,
    count: int,
    seed: int,
) -> Iterator[Batch]:
    """``count`` rows of ``place``: the group and the half."""
    step = max(1, _TOKENS_PER_BATCH // length)
    fixed = None
    if layout.batch is None:
        fixed = int(next((spec.shape[0] for spec in manifest.inputs if spec.shape), 1))
        step, count = fixed, max(fixed, count - count % fixed)
    for first in range(0, count, step):
        rows = range(first, min(first + step, count))
        yield _batch(manifest, layout, source, place, length, count, rows, seed)


def _batch(
    manifest: Manifest,
    layout: Layout,
    source: _Source,
    place: tuple[str, str],
    length: int,
    count: int,
    rows: range,
    seed: int,
) -> Batch:
    group, half = place
    rng = np.random.default_rng([seed, 3, _HALVES.index(half), length, rows[0]])
    sizes = dict.fromkeys(layout.lengths, length)
    if layout.batch is not None:
        sizes[layout.batch] = len(rows)
    picked = None
    if source.tokens is not None:
        picked = [source.tokens(half, length, count, row) for row in rows]
    feeds: dict[str, NDArray[Any]] = {}
    real = np.ones((len(rows), length), np.bool_)
    if picked is not None:
        for row, ids in enumerate(picked):
            real[row, len(ids) :] = False
    for spec in manifest.inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        mask = real if real.shape == shape else None
        if spec.role == "padding_mask":
            feeds[spec.name] = (real if mask is not None else np.ones(shape)).astype(spec.dtype)
        elif spec.role == "values":
            feeds[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
        elif spec.role == "ids" or picked is None or mask is None:
            feeds[spec.name] = other_ids(spec, shape, mask, rng, random=picked is None)
        else:
            ids = np.zeros(shape, spec.dtype)
            for row, values in enumerate(picked):
                ids[row, : len(values)] = values
            feeds[spec.name] = ids
    padding = "none" if real.all() else "right"
    return Batch(length, padding, feeds, group)


def _arrays(
    manifest: Manifest,
    layout: Layout,
    groups: Sequence[DocumentGroup],
    seed: int,
    rows: Mapping[str, int],
) -> tuple[dict[str, list[Batch]], str]:
    """Rows of the arrays, shuffled and dealt to both halves."""
    if layout.batch is None:
        raise UsageError(
            "The model's batch size is fixed, so arrays cannot be split for calibration; export "
            "it with a dynamic batch."
        )
    halves: dict[str, list[Batch]] = {name: [] for name in _HALVES}
    total = 0
    files = [(group.name, file) for group in groups for file in group.files]
    for number, (group, file) in enumerate(files):
        arrays = check_inputs(manifest.inputs, read_npz(file))
        owner = next(spec for spec in manifest.inputs if spec.shape[:1] == (layout.batch,))
        count = len(arrays[owner.name])
        if count < 2:
            raise UsageError(f"{file} holds one row; a split needs two or more.")
        for name in layout.masks.values():
            empty = np.flatnonzero(~arrays[name].any(axis=1))
            if len(empty):
                raise UsageError(
                    f"{file}: row {empty[0]} of {name!r} is all 0: nothing can be measured on a "
                    "row without a real token. Leave it out."
                )
        total += count
        axis = next((a for a, dim in enumerate(owner.shape) if dim in layout.lengths), None)
        length = int(arrays[owner.name].shape[axis]) if axis is not None else 0
        order = np.random.default_rng([seed, 4, number]).permutation(count)
        for index, name in enumerate(_HALVES):
            mine = order[index::2][: max(1, rows[name] // max(1, length))]
            step = max(1, _TOKENS_PER_BATCH // max(1, length))
            for first in range(0, len(mine), step):
                picked = mine[first : first + step]
                feeds = {
                    spec.name: np.ascontiguousarray(arrays[spec.name][picked])
                    if spec.shape[:1] == (layout.batch,)
                    else arrays[spec.name]
                    for spec in manifest.inputs
                }
                halves[name].append(Batch(length, "given", feeds, group))
    names = _names([file for _, file in files])
    return halves, f"{names}: {total} rows of arrays; every other row held out"


def _check_vocabulary(manifest: Manifest, documents: Sequence[NDArray[np.int64]]) -> None:
    spec = next((spec for spec in manifest.inputs if spec.role == "token_ids"), None)
    if spec is None:
        raise UsageError("The model takes no tokens; pass .npz files with one array per input.")
    if not documents:
        raise UsageError("The texts have no tokens.")
    largest = max(int(ids.max()) for ids in documents)
    if spec.high is not None and largest >= spec.high:
        raise UsageError(
            f"The tokenizer gives token {largest}, but input {spec.name!r} takes indices below "
            f"{spec.high}: tokenizer and model do not belong together."
        )


def _digest(batches: Sequence[Batch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(f"{batch.group}\0".encode())
        for name in sorted(batch.feeds):
            array = batch.feeds[name]
            digest.update(f"{name} {array.dtype} {array.shape}\0".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
