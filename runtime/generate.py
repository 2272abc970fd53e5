"""Text from a language model with a cache: prompts in, continuations out."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.artifact import Artifact, load
from subquad.runtime.decoding import Decoding, decoding_reason
from subquad.runtime.errors import IntegrityError, UsageError
from subquad.runtime.jsonable import json_ready
from subquad.runtime.kernel_library import KernelMode
from subquad.runtime.npz import read_npz
from subquad.runtime.pair import encode, is_pair, load_pair
from subquad.runtime.past import rows_of
from subquad.runtime.run import text_feeds
from subquad.runtime.sampling import Sampler, Sampling
from subquad.runtime.text import TOKENIZER_NAME, Tokenizer

Progress = Callable[[str, float | None], None]
OnText = Callable[[str], None]

PREFILL_CHUNK = 512
"""Tokens of a prompt per call: logits of all of them are held at a time."""

_CONFIGS = ("generation_config.json", "config.json")
_NO_CHARACTER_YET = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Continuation:
    """What follows one prompt.

    Attributes:
        prompt_tokens: how many.
        ids: the new tokens, the one that ends the text included.
        text: of the new tokens, where there is a tokenizer.
        stopped: ``end`` (a token that ends the text), ``max_new_tokens``, or ``max_length`` (the
            model has no more positions).
    """

    prompt_tokens: int
    ids: tuple[int, ...]
    text: str | None
    stopped: str


@dataclass(frozen=True)
class GenerationResult:
    """All rows, and what it took.

    Attributes:
        prefill_seconds: for all prompts.
        step_seconds: median of one step, which gives each unfinished row a token; ``None``: there
            was none.
        cache_bytes: what was kept at the end for the next step.
    """

    rows: tuple[Continuation, ...]
    prefill_seconds: float
    step_seconds: float | None
    cache_bytes: int
    execution: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json_ready(self)
        return result


def generate(
    path: Path,
    *,
    texts: Sequence[str] = (),
    ids: Sequence[Sequence[int]] = (),
    arrays: Path | None = None,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    ends: Sequence[int] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    provider: str = "cpu",
    threads: int | None = None,
    kernels: KernelMode = "auto",
    on_text: OnText | None = None,
    progress: Progress | None = None,
) -> GenerationResult:
    """Continue prompts by the artifact ``path``.

    Args:
        path: artifact directory of a model that was converted with a cache.
        texts: prompts; the artifact needs a tokenizer.
        ids: or prompts as token numbers; of an encoder-decoder, how its decoder begins (by
            default as the source's configuration says).
        arrays: of an encoder-decoder, ``.npz`` with the inputs of the encoder; ``texts`` are
            these inputs where it reads tokens.
        max_new_tokens: per row.
        sampling: the likeliest token by default.
        ends: tokens that end a row; ``None`` = those of the source's configuration.
        prefill_chunk: tokens of the prompts per call.
        provider, threads, kernels: as ``load``.
        on_text: called with each piece of the text of the only row, as it comes.
        progress: called with a message.

    Raises:
        UsageError: neither or both of ``texts`` and ``ids``, an empty prompt, bad tokens or limits,
            or an artifact that generates no text.
        and what ``load`` raises.
    """
    if max_new_tokens < 1 or prefill_chunk < 1:
        raise UsageError("max_new_tokens and prefill_chunk must be at least 1.")
    report = progress or (lambda message, share: None)
    report("loading", None)
    options: dict[str, Any] = {"provider": provider, "threads": threads, "kernels": kernels}
    start = _open_pair if is_pair(path) else _open_decoder
    task = start(path, texts, ids, arrays, options, report)
    for prompt in task.prompts:
        if not prompt:
            raise UsageError("A prompt has no tokens.")
    artifact, tokenizer, prompts = task.artifact, task.tokenizer, task.prompts
    sampler = Sampler(sampling or Sampling(), len(prompts))
    run = _Generation(task, max_new_tokens, sampler)
    report("reading the prompt", None)
    started = time.perf_counter()
    logits = run.prefill(prefill_chunk)
    prefill_seconds = time.perf_counter() - started
    report("writing", None)
    stream = _Stream(tokenizer, on_text) if tokenizer and on_text and len(prompts) == 1 else None
    run.ends = frozenset(token_setting(artifact.path, "eos_token_id") if ends is None else ends)
    steps = run.steps(logits, stream)
    return GenerationResult(
        rows=tuple(
            Continuation(
                prompt_tokens=len(prompt),
                ids=tuple(new),
                text=None if tokenizer is None else tokenizer.decode(new),
                stopped=stopped,
            )
            for prompt, new, stopped in zip(prompts, run.new, run.stopped, strict=True)
        ),
        prefill_seconds=prefill_seconds,
        step_seconds=statistics.median(steps) if steps else None,
        cache_bytes=run.decoding.nbytes(),
        execution=json_ready(artifact.execution),
    )


@dataclass(frozen=True)
class _Task:
    """What is continued.

    Attributes:
        artifact: of the decoder.
        prompts: tokens of each row.
        tokenizer: where text goes in or out.
        fixed: what an encoder made.
    """

    artifact: Artifact
    prompts: list[list[int]]
    tokenizer: Tokenizer | None
    fixed: Mapping[str, NDArray[Any]]


def _open_decoder(
    path: Path,
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    arrays: Path | None,
    options: Mapping[str, Any],
    report: Progress,
) -> _Task:
    if bool(texts) == bool(ids):
        raise UsageError("Pass either --text TEXT or --ids N,N,... (each may repeat).")
    if arrays is not None:
        raise UsageError("--input is for encoder-decoders; this artifact has no encoder.")
    artifact = load(path, **options)
    reason = decoding_reason(artifact.manifest)
    if reason:
        raise UsageError(reason)
    if not texts:
        return _Task(artifact, [list(row) for row in ids], None, {})
    tokenizer = Tokenizer.load(artifact.path)
    return _Task(artifact, [tokenizer.encode(text) for text in texts], tokenizer, {})


def _open_pair(
    path: Path,
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    arrays: Path | None,
    options: Mapping[str, Any],
    report: Progress,
) -> _Task:
    if bool(texts) == (arrays is not None):
        raise UsageError("Pass what the encoder reads: either --input FILE.npz or --text TEXT.")
    encoder, decoder = load_pair(path, **options)
    has_text = (decoder.path / TOKENIZER_NAME).is_file()
    tokenizer = Tokenizer.load(decoder.path) if has_text or texts else None
    if arrays is not None:
        feeds = read_npz(arrays)
    else:
        assert tokenizer is not None
        feeds = text_feeds(encoder, tokenizer, texts)
    report("encoding", None)
    fixed = encode(encoder, decoder, feeds)
    rows = rows_of(feeds)
    starts = [list(row) for row in ids] or [list(start_tokens(decoder.path))]
    if len(starts) == 1:
        starts *= rows
    if len(starts) != rows:
        raise UsageError(f"--ids is given {len(starts)} times for {rows} rows.")
    return _Task(decoder, starts, tokenizer, fixed)


def start_tokens(folder: Path) -> tuple[int, ...]:
    """How the decoder of an encoder-decoder begins, as the source's configuration says.

    Of speech models, without times and in the language they have by default.

    Raises:
        UsageError: it does not say.
    """
    start = token_setting(folder, "decoder_start_token_id")
    if not start:
        raise UsageError(f"{folder} does not say how its decoder begins; pass --ids N,N,...")
    return start + token_setting(folder, "no_timestamps_token_id")


def token_setting(folder: Path, key: str) -> tuple[int, ...]:
    """Tokens that the source's configuration names under ``key``; none where it does not."""
    for name in _CONFIGS:
        try:
            raw = json.loads((folder / name).read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise IntegrityError(f"{folder / name} is not readable JSON: {error}.") from error
        found = raw.get(key) if isinstance(raw, dict) else None
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and all(isinstance(token, int) for token in found):
            return tuple(found)
    return ()


class _Generation:
    """Rows on their way; the methods are its phases, in order."""

    def __init__(self, task: _Task, max_new_tokens: int, sampler: Sampler) -> None:
        artifact, prompts = task.artifact, task.prompts
        self.decoding = Decoding(artifact, len(prompts), task.fixed)
        # As transformers has it: of speech models, tokens that are no words.
        self._never = list(token_setting(artifact.path, "suppress_tokens"))
        self._not_first = list(token_setting(artifact.path, "begin_suppress_tokens"))
        self.ends: frozenset[int] = frozenset()
        self.new: list[list[int]] = [[] for _ in prompts]
        self.stopped = [""] * len(prompts)
        self._prompts = prompts
        self._limit = artifact.manifest.max_length
        self._max_new_tokens = max_new_tokens
        self._sampler = sampler
        longest = max(map(len, prompts))
        if self._limit is not None and longest > self._limit:
            raise UsageError(
                f"A prompt has {longest} tokens, but the model accepts at most {self._limit}."
            )

    def prefill(self, chunk: int) -> NDArray[np.float32]:
        """Read the prompts, padded in front; returns the logits after the last token."""
        longest = max(map(len, self._prompts))
        tokens = np.zeros((len(self._prompts), longest), np.int64)
        real = np.zeros(tokens.shape, np.bool_)
        for row, prompt in enumerate(self._prompts):
            tokens[row, longest - len(prompt) :] = prompt
            real[row, longest - len(prompt) :] = True
        for start in range(0, longest, chunk):
            piece = slice(start, start + chunk)
            logits = self.decoding.advance(tokens[:, piece], real[:, piece])
        return logits[:, -1]

    def steps(self, logits: NDArray[np.float32], stream: _Stream | None) -> list[float]:
        """Write until every row has stopped; returns the seconds of each step."""
        seconds: list[float] = []
        while True:
            tokens = self._sampler.choose(self._allowed(logits))
            open_rows = np.array([not why for why in self.stopped])
            for row in np.flatnonzero(open_rows):
                self._take(int(row), int(tokens[row]))
            if stream is not None:
                stream.show(self.new[0], last=bool(self.stopped[0]))
            if all(self.stopped):
                return seconds
            started = time.perf_counter()
            # A finished row goes on as padding, which the others do not see.
            going_on = np.array([not why for why in self.stopped])
            logits = self.decoding.advance(
                np.where(going_on, tokens, 0)[:, None], self._padding(going_on)
            )[:, -1]
            seconds.append(time.perf_counter() - started)

    def _allowed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        never = self._never + (self._not_first if not any(self.new) else [])
        if never:
            logits = logits.copy()
            logits[:, never] = -np.inf
        return logits

    def _padding(self, going_on: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        return going_on[:, None] if self.decoding.is_masked else None

    def _take(self, row: int, token: int) -> None:
        self.new[row].append(token)
        length = len(self._prompts[row]) + len(self.new[row])
        if token in self.ends:
            self.stopped[row] = "end"
        elif len(self.new[row]) >= self._max_new_tokens:
            self.stopped[row] = "max_new_tokens"
        elif self._limit is not None and length >= self._limit:
            self.stopped[row] = "max_length"


class _Stream:
    """Shows the text of one row as it grows, whole characters only."""

    def __init__(self, tokenizer: Tokenizer, on_text: OnText) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._shown = ""

    def show(self, ids: Sequence[int], *, last: bool) -> None:
        text = self._tokenizer.decode(ids)
        # The bytes of one character may be several tokens.
        if text.endswith(_NO_CHARACTER_YET) and not last:
            return
        if len(text) > len(self._shown) and text.startswith(self._shown):
            self._on_text(text[len(self._shown) :])
            self._shown = text
