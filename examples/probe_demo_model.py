"""Measure what the demo model knows and how far back it looks.

    python examples/probe_demo_model.py

Three probes, printed as Markdown tables:

1. Loss on held-out files at several context lengths. All lengths are judged on the same last 256
   tokens of each window, so the differences are due to the context alone.
2. Copying: random tokens, then the same tokens again. The second copy can only be predicted by
   looking back by exactly the length of the first.
3. A repeated passage of held-out code, with other held-out code between the two copies.

``--window W`` restricts attention to the last W tokens, to show what is lost without the rest.
"""

import argparse
import json
import logging
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from train_demo_model import (
    MODEL_DIR,
    VOCAB_SIZE,
    corpus_digest,
    encode_corpus,
    read_corpus,
    stdlib_root,
)
from transformers import LlamaForCausalLM

logger = logging.getLogger("probe_demo_model")

JUDGED_TOKENS = 256
LOSS_LENGTHS = (512, 1024, 2048, 4096, 8192)
COPY_LENGTHS = (256, 600, 1024, 2000, 3500)
PASSAGE_TOKENS = 192
PASSAGE_DISTANCES = (600, 1024, 2000, 3500, 6000)


@dataclass(frozen=True)
class LossAtLength:
    """Mean natural-log losses per token with a context of ``length`` tokens."""

    length: int
    windows: int
    loss_last: float
    loss_overall: float
    perplexity_last: float
    perplexity_overall: float
    bits_per_byte_overall: float


@dataclass(frozen=True)
class CopyScore:
    """Share of the second copy's tokens predicted, ``distance`` tokens after the first."""

    distance: int
    predictions: int
    accuracy: float


@dataclass(frozen=True)
class PassageScore:
    """Accuracy and loss on a passage of code when first seen and when repeated."""

    distance: int
    predictions: int
    accuracy_first: float
    accuracy_repeated: float
    loss_first: float
    loss_repeated: float


@torch.inference_mode()
def next_token_losses(
    model: LlamaForCausalLM, tokens: NDArray[np.int64], window: int | None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Loss and correctness of each prediction.

    Args:
        model: the model.
        tokens: ``[seq_len]``.
        window: keys visible to a query, itself included; all when ``None``.

    Returns:
        Two arrays ``[seq_len - 1]``; entry ``i`` judges the prediction of token ``i + 1``.
    """
    ids = torch.from_numpy(tokens)[None]
    inputs, targets = ids[:, :-1], ids[0, 1:]
    mask = None
    if window is not None:
        position = torch.arange(inputs.shape[1])
        distance = position[:, None] - position[None, :]
        mask = ((distance >= 0) & (distance < window))[None, None]
    logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return losses.numpy(), (logits.argmax(-1) == targets).numpy()


def probe_losses(
    model: LlamaForCausalLM,
    stream: NDArray[np.int64],
    bytes_per_token: float,
    window: int | None,
) -> list[LossAtLength]:
    """Loss per context length, over windows that end at the same places."""
    longest = max(LOSS_LENGTHS)
    ends = range(longest + 1, len(stream) + 1, longest)
    scores = []
    for length in LOSS_LENGTHS:
        losses = np.stack(
            [next_token_losses(model, stream[end - length - 1 : end], window)[0] for end in ends]
        ).astype(np.float64)
        last, overall = float(losses[:, -JUDGED_TOKENS:].mean()), float(losses.mean())
        scores.append(
            LossAtLength(
                length=length,
                windows=len(ends),
                loss_last=last,
                loss_overall=overall,
                perplexity_last=math.exp(last),
                perplexity_overall=math.exp(overall),
                bits_per_byte_overall=overall / math.log(2) / bytes_per_token,
            )
        )
        logger.info("%s", scores[-1])
    return scores


def probe_copying(
    model: LlamaForCausalLM, seed: int, trials: int, window: int | None
) -> list[CopyScore]:
    """Accuracy on the second copy of uniform random tokens; its first token is not judged."""
    rng = np.random.default_rng(seed)
    scores = []
    for length in COPY_LENGTHS:
        correct = []
        for _ in range(trials):
            once = rng.integers(1, VOCAB_SIZE, size=length)
            _, hits = next_token_losses(model, np.concatenate([once, once]), window)
            correct.append(hits[length:])
        hits = np.concatenate(correct)
        scores.append(CopyScore(length, len(hits), float(hits.mean())))
        logger.info("%s", scores[-1])
    return scores


def probe_passages(
    model: LlamaForCausalLM,
    stream: NDArray[np.int64],
    seed: int,
    trials: int,
    window: int | None,
) -> list[PassageScore]:
    """Passages at random places of the held-out code, repeated after other code."""
    rng = np.random.default_rng(seed)
    scores = []
    for distance in PASSAGE_DISTANCES:
        losses_of: tuple[list[NDArray[np.float32]], ...] = ([], [])
        hits_of: tuple[list[NDArray[np.bool_]], ...] = ([], [])
        for _ in range(trials):
            start = int(rng.integers(0, len(stream) - distance))
            first = stream[start : start + distance]
            tokens = np.concatenate([first, first[:PASSAGE_TOKENS]])
            losses, hits = next_token_losses(model, tokens, window)
            for copy, begin in enumerate((0, distance)):
                judged = slice(begin, begin + PASSAGE_TOKENS - 1)
                losses_of[copy].append(losses[judged])
                hits_of[copy].append(hits[judged])
        scores.append(
            PassageScore(
                distance=distance,
                predictions=trials * (PASSAGE_TOKENS - 1),
                accuracy_first=float(np.mean(hits_of[0])),
                accuracy_repeated=float(np.mean(hits_of[1])),
                loss_first=float(np.mean(losses_of[0])),
                loss_repeated=float(np.mean(losses_of[1])),
            )
        )
        logger.info("%s", scores[-1])
    return scores


def format_tables(
    losses: list[LossAtLength], copies: list[CopyScore], passages: list[PassageScore]
) -> str:
    """The scores as three Markdown tables."""
    lines = [
        f"| Context | Loss, last {JUDGED_TOKENS} | Perplexity, last {JUDGED_TOKENS} "
        "| Loss, all | Perplexity, all | Bits per byte, all |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {s.length} | {s.loss_last:.3f} | {s.perplexity_last:.2f} "
        f"| {s.loss_overall:.3f} | {s.perplexity_overall:.2f} | {s.bits_per_byte_overall:.3f} |"
        for s in losses
    ]
    lines += ["", "| Copy distance | Accuracy | Predictions |", "|--:|--:|--:|"]
    lines += [f"| {s.distance} | {s.accuracy:.1%} | {s.predictions} |" for s in copies]
    lines += [
        "",
        "| Passage distance | Accuracy, first | Accuracy, again | Loss, first | Loss, again |",
        "|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {s.distance} | {s.accuracy_first:.1%} | {s.accuracy_repeated:.1%} "
        f"| {s.loss_first:.3f} | {s.loss_repeated:.3f} |"
        for s in passages
    ]
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--window", type=int, help="restrict attention to this many last tokens")
    parser.add_argument("--trials", type=int, default=8, help="sequences per distance")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )

    torch.set_num_threads(args.threads)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    texts = read_corpus(stdlib_root(), held_out=True)
    stream = encode_corpus(tokenizer, texts)
    bytes_per_token = sum(len(text.encode()) for text in texts.values()) / len(stream)
    logger.info(
        "held out: %d files, %d tokens, %.3f bytes per token", len(texts), len(stream),
        bytes_per_token,
    )  # fmt: skip

    losses = probe_losses(model, stream, bytes_per_token, args.window)
    copies = probe_copying(model, args.seed, args.trials, args.window)
    passages = probe_passages(model, stream, args.seed, args.trials, args.window)
    print(format_tables(losses, copies, passages))
    if args.json is not None:
        scores = {
            "held_out": {
                "files": len(texts),
                "tokens": len(stream),
                "sha256": corpus_digest(texts),
                "bytes_per_token": bytes_per_token,
            },
            "window": args.window,
            "seed": args.seed,
            "trials": args.trials,
            "losses": [asdict(score) for score in losses],
            "copying": [asdict(score) for score in copies],
            "passages": [asdict(score) for score in passages],
        }
        args.json.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
