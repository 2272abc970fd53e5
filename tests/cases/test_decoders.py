"""Decoders behind publicly reported failures: spellings, padding, positions, caches.

``docs/cases.md`` lists all of them and where each is tested.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from case_models import (
    HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    DecoderStep,
    EncoderOnly,
    FirstOutput,
    PositionsOfMask,
    Read,
    WithPast,
    build,
    eager,
    export,
    past_names,
    relative,
    tensors,
)

TEXT = ("input_ids", "attention_mask")
TEXT_AXES = {name: {0: "batch", 1: "length"} for name in TEXT}
# float32 through two sharp layers; a 1 % error of the scale gives over 1e-2.
TOLERANCE = 1e-4
# Of each kind: a plain window, one with a linear branch, and linear attention alone.
REPLACEMENTS = ("window:size=4", "lolcats:size=3", "elu")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("opt", "codegen")]


def text(rng: np.random.Generator, rows: int, length: int) -> dict[str, NDArray[np.int64]]:
    ids = rng.integers(3, VOCABULARY, (rows, length))
    return {"input_ids": ids, "attention_mask": np.ones((rows, length), np.int64)}


@cache
def rng_free_example() -> dict[str, Tensor]:
    feeds = text(np.random.default_rng(1), 2, 11)
    feeds["attention_mask"][1, :4] = 0
    return tensors(feeds)


# --- spelling ----------------------------------------------------------------------------------


class TableMask(nn.Module):
    """Attention as GPT-2 once spelled it: a causal table of some type, cut to the length."""

    def __init__(self, table: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS)])
        self.register_buffer("table", torch.tril(torch.ones(64, 64)).to(table)[None, None])

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        batch, length, _ = x.shape
        for layer in self.qkv:
            q, k, v = (
                part.view(batch, length, HEADS, -1).transpose(1, 2)
                for part in layer(x).split(WIDTH, dim=-1)
            )
            scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
            seen = self.get_buffer("table")[:, :, :length, :length]
            if seen.dtype != torch.bool:
                seen = seen.to(torch.bool)
            scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
            x = x + 2 * mixed
        return x


@pytest.mark.parametrize(
    "table",
    [torch.bool, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.uint8, torch.float32))],
)
def test_spelling_of_a_causal_table(table: torch.dtype) -> None:
    """Whether the usual Cast is there or not, every site is found, and is causal."""
    module = TableMask(table)
    read = export(
        module,
        {"input_ids": rng_free_example()["input_ids"]},
        {"input_ids": {0: "batch", 1: "length"}},
    )
    assert read.meanings() == ["causal"] * LAYERS and not read.result.rejections
    feeds = {"input_ids": text(np.random.default_rng(2), 3, 17)["input_ids"]}
    assert relative(read.run()(feeds)[0], eager(module, feeds)[0]) <= TOLERANCE


@pytest.mark.parametrize("spelling", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_spelling_of_gpt2(spelling: str) -> None:
    read = decoder("gpt2", spelling)
    assert read.meanings() == ["causal, key padding"] * LAYERS and not read.result.rejections


# --- left padding, and what may not be seen ----------------------------------------------------


@cache
def decoder(name: str, spelling: str = "eager") -> Read:
    """OPT counts its positions along the mask by itself; the others are told them."""
    return export(source_of(name, spelling), rng_free_example(), TEXT_AXES)


@cache
def source_of(name: str, spelling: str = "eager") -> nn.Module:
    model = build(name, spelling)
    model.config.use_cache = False
    return FirstOutput(model, TEXT) if name == "opt" else PositionsOfMask(model)


def padded(feeds: dict[str, NDArray[np.int64]], pads: int) -> dict[str, NDArray[np.int64]]:
    return {name: np.pad(array, ((0, 0), (pads, 0))) for name, array in feeds.items()}


@pytest.mark.parametrize("name", ["gpt2", *SLOW])
@pytest.mark.parametrize("force", ["", *REPLACEMENTS])
def test_left_padding_moves_nothing(name: str, force: str) -> None:
    """The same six tokens behind 0, 3 and 7 pads: the same logits, replaced or not."""
    feeds = text(np.random.default_rng(3), 2, 6)
    run = decoder(name).run(*filter(None, [force]))
    bare = run(feeds)[0]
    if not force:
        assert relative(bare, eager(source_of(name), feeds)[0]) <= TOLERANCE
    for pads in (3, 7):
        assert relative(run(padded(feeds, pads))[0][:, pads:], bare) <= TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", *SLOW])
@pytest.mark.parametrize("force", ["", *REPLACEMENTS])
def test_hidden_tokens_move_nothing(name: str, force: str) -> None:
    """A later token, and one behind the mask: outputs that may not see it stay as they are."""
    feeds = text(np.random.default_rng(4), 2, 13)
    feeds["attention_mask"][1, :3] = 0
    run = decoder(name).run(*filter(None, [force]))
    before = run(feeds)[0]
    later = {**feeds, "input_ids": feeds["input_ids"].copy()}
    later["input_ids"][:, 9] = (later["input_ids"][:, 9] + 5) % VOCABULARY
    after = run(later)[0]
    assert np.array_equal(after[:, :9], before[:, :9])
    assert not np.array_equal(after[:, 9:], before[:, 9:])
    pads = {**feeds, "input_ids": feeds["input_ids"].copy()}
    pads["input_ids"][1, :3] = (pads["input_ids"][1, :3] + 5) % VOCABULARY
    assert np.array_equal(run(pads)[0][1, 3:], before[1, 3:])


# --- steps with a past -------------------------------------------------------------------------


def heads_of(name: str) -> tuple[int, int]:
    """Key/value heads and their dimension."""
    return (2, 12) if name in ("gemma3", "llama") else (HEADS, WIDTH // HEADS)


@cache
def step_of(name: str) -> tuple[nn.Module, Read]:
    """A decoding step of any length over any past."""
    module = WithPast(build(name))
    rng = np.random.default_rng(5)
    past = past_feeds(rng, 2, 5, *heads_of(name))
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": rng.integers(3, VOCABULARY, (2, 3)),
        "attention_mask": np.ones((2, 8), np.int64),
        **past,
    }
    feeds["attention_mask"][1, :2] = 0
    axes = {
        "input_ids": {0: "batch", 1: "length"},
        "attention_mask": {0: "batch", 1: "past + length"},
        **{name: {0: "batch", 2: "past"} for name in past},
    }
    return module, export(module, tensors(feeds), axes)


def past_feeds(
    rng: np.random.Generator, rows: int, length: int, heads: int, dim: int, *kinds: str
) -> dict[str, NDArray[np.float32]]:
    return {
        name: rng.standard_normal((rows, heads, length, dim)).astype(np.float32)
        for name in past_names(LAYERS, *kinds)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_alibi_with_a_past(name: str) -> None:
    """Five tokens in the cache and one new: the distances of the new one to each of them."""
    module, read = step_of(name)
    assert len(read.result.sites) == LAYERS
    run, rng = read.run(), np.random.default_rng(6)
    for past, new, padding in ((5, 1, 0), (5, 1, 2), (1, 1, 0), (9, 4, 3)):
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": rng.integers(3, VOCABULARY, (2, new)),
            "attention_mask": np.ones((2, past + new), np.int64),
            **past_feeds(rng, 2, past, *heads_of(name)),
        }
        feeds["attention_mask"][1, :padding] = 0
        for got, want in zip(run(feeds), eager(module, feeds), strict=True):
            assert relative(got, want) <= TOLERANCE


@pytest.mark.slow
def test_alibi_conventions_differ() -> None:
    """BLOOM's distances count real tokens, MPT's the slots: what pads hold in between shows."""
    for name, counts_real_tokens in (("bloom", True), ("mpt", False)):
        _, read = step_of(name)
        rng = np.random.default_rng(7)
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": rng.integers(3, VOCABULARY, (1, 1)),
            "attention_mask": np.ones((1, 6), np.int64),
            **past_feeds(rng, 1, 5, *heads_of(name)),
        }
        feeds["attention_mask"][0, 2] = 0
        # Without the hidden slot at all: only the slots' numbers change.
        other = {**feeds, "attention_mask": np.ones((1, 5), np.int64)}
        for key in past_names(LAYERS):
            other[key] = np.delete(feeds[key], 2, axis=2)
        run = read.run()
        same = relative(run(feeds)[0], run(other)[0]) <= TOLERANCE
        assert same is counts_real_tokens, name


@pytest.mark.slow
def test_windowed_cache_over_many_steps() -> None:
    """Window 8 and full layers: 24 single steps give the logits of one pass."""
    module, read = step_of("gemma3")
    masks = [site.mask.describe() for site in read.result.sites]
    assert masks == ["causal, window 8, key padding", "causal, key padding"]
    run, steps = read.run(), 24
    feeds = text(np.random.default_rng(8), 2, steps + 2)
    past = {n: np.zeros((2, 2, 0, 12), np.float32) for n in past_names(LAYERS)}
    whole = run({**feeds, **past})
    start = {
        name: array[:, :, :2] for name, array in zip(past_names(LAYERS), whole[1:], strict=True)
    }
    for position in range(2, steps + 2):
        got = run(
            {
                "input_ids": feeds["input_ids"][:, position : position + 1],
                "attention_mask": feeds["attention_mask"][:, : position + 1],
                **start,
            }
        )
        assert relative(got[0][:, 0], whole[0][:, position]) <= TOLERANCE
        start = dict(zip(past_names(LAYERS), got[1:], strict=True))
    want = eager(source_of_gemma3(), feeds)[0]
    assert relative(whole[0], want) <= TOLERANCE
    assert module is not None


@cache
def source_of_gemma3() -> nn.Module:
    model = build("gemma3")
    model.config.use_cache = False
    return FirstOutput(model, TEXT)


# --- encoder and decoder -----------------------------------------------------------------------

STATES_AXES = {
    "decoder_input_ids": {0: "batch", 1: "decoder_length"},
    "states": {0: "batch", 1: "length"},
    "attention_mask": {0: "batch", 1: "length"},
}


def step_feeds(
    name: str, rng: np.random.Generator, *, past: int, new: int, length: int
) -> dict[str, NDArray[Any]]:
    """A decoder step; no pasts at all for the first."""
    dim = 10 if name == "t5" else WIDTH // HEADS
    feeds: dict[str, NDArray[Any]] = {
        "decoder_input_ids": rng.integers(3, VOCABULARY, (2, new)),
        "states": rng.standard_normal((2, length, WIDTH)).astype(np.float32),
        "attention_mask": np.ones((2, length), np.int64),
    }
    feeds["attention_mask"][1, length - 2 :] = 0
    if past:
        feeds |= past_feeds(rng, 2, past, HEADS, dim, "self")
        feeds |= past_feeds(rng, 2, length, HEADS, dim, "cross")
    return feeds


@cache
def decoder_step(name: str, *, past: bool) -> tuple[nn.Module, Read]:
    module = DecoderStep(build(name))
    feeds = step_feeds(name, np.random.default_rng(9), past=4 if past else 0, new=3, length=9)
    axes: dict[str, dict[int, str]] = {key: dict(dims) for key, dims in STATES_AXES.items()}
    for key in feeds:
        if key.startswith(("self", "cross")):
            axes[key] = {0: "batch", 2: "past" if key.startswith("self") else "length"}
    return module, export(module, tensors(feeds), axes)


def test_three_parts_of_an_encoder_decoder() -> None:
    """BART's encoder, first decoder step and step with past: every site labelled for what it is."""
    encoder = EncoderOnly(build("bart"))
    read = export(encoder, rng_free_example(), TEXT_AXES)
    assert read.meanings() == ["full, key padding"] * LAYERS
    feeds = text(np.random.default_rng(10), 2, 17)
    feeds["attention_mask"][1, 11:] = 0
    real = feeds["attention_mask"] == 1
    assert relative(read.run()(feeds)[0][real], eager(encoder, feeds)[0][real]) <= TOLERANCE
    for past in (False, True):
        module, step = decoder_step("bart", past=past)
        masks = [site.mask.describe() for site in step.result.sites]
        assert masks == ["causal", "full, key padding"] * LAYERS
        assert [site.is_self for site in step.result.sites][1::2] == [False] * LAYERS
        for number, new in ((1, 1), (6, 1), (6, 3)):
            given = step_feeds(
                "bart", np.random.default_rng(number), past=number * past, new=new, length=12
            )
            for got, want in zip(step.run()(given), eager(module, given), strict=True):
                assert relative(got, want) <= TOLERANCE


@pytest.mark.parametrize("force", ["", "elu"])
def test_padding_of_the_encoder_does_not_reach_the_decoder(force: str) -> None:
    """The same source text padded to 8 and to 16."""
    _, step = decoder_step("bart", past=False)
    rng = np.random.default_rng(11)
    run = step.run(*filter(None, [force]))
    states = rng.standard_normal((1, 6, WIDTH)).astype(np.float32)
    ids = rng.integers(3, VOCABULARY, (1, 5))
    outputs = []
    for length in (8, 16):
        # What lies in the padding must not matter either.
        wide = rng.standard_normal((1, length, WIDTH)).astype(np.float32)
        wide[:, :6] = states
        mask = (np.arange(length) < 6).astype(np.int64)[None]
        outputs.append(run({"decoder_input_ids": ids, "states": wide, "attention_mask": mask})[0])
    assert relative(outputs[1], outputs[0]) <= 1e-6


def test_relative_bias_with_a_past() -> None:
    """T5: the bias of the newest position, shared by both layers; scores are not scaled."""
    module, step = decoder_step("t5", past=True)
    assert [site.scale for site in step.result.sites] == [1.0] * (2 * LAYERS)
    run = step.run()
    for past, new in ((3, 1), (1, 1), (40, 1), (4, 6)):
        # More encoder positions than the table of relative positions has rows.
        feeds = step_feeds("t5", np.random.default_rng(past), past=past, new=new, length=45)
        for got, want in zip(run(feeds), eager(module, feeds), strict=True):
            assert relative(got, want) <= TOLERANCE
