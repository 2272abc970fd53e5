"""Train the small causal language model in ``examples/demo_model``.

The data are the ``.py`` sources of the running interpreter's standard library and synthetic
copy tasks, so nothing is downloaded. The model is a Llama-style decoder with grouped queries,
small enough to train on one CPU thread, and made to *use* long context: a large share of the
loss can only be lowered by looking up something seen hundreds or thousands of tokens ago.

    python examples/train_demo_model.py

The plan (sequence lengths and steps) is fixed and every batch depends only on the seed and the
step, so a stopped run continues where its last checkpoint left it and sees the same data.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()
logger = logging.getLogger("train_demo_model")

EXAMPLES = Path(__file__).resolve().parent
MODEL_DIR = EXAMPLES / "demo_model"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1024
MAX_LEN = 8192

# Test suites and generated tables: the first are missing from some distributions, the second are
# long runs of numbers.
EXCLUDED_DIRS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages"}
    | {"test", "tests"}
)
# A file is held out when the first byte of the SHA-256 of its path is below this: about 5 %.
HELD_OUT_BELOW = 13

# RoPE pairs of a head that the seeded heads use.
FAST_PAIRS = 5

IGNORED, NATURAL, COPIED = 0, 1, 2


@dataclass(frozen=True)
class Phase:
    """Steps at one sequence length; ``synthetic`` is the share of rows that are copy tasks."""

    length: int
    rows: int
    steps: int
    synthetic: float


PLAN = (
    Phase(length=128, rows=32, steps=150, synthetic=0.5),
    Phase(length=256, rows=16, steps=180, synthetic=0.5),
    Phase(length=512, rows=8, steps=90, synthetic=0.5),
    Phase(length=1024, rows=4, steps=80, synthetic=0.5),
    Phase(length=2048, rows=2, steps=60, synthetic=0.5),
    Phase(length=4096, rows=1, steps=60, synthetic=0.5),
    Phase(length=8192, rows=1, steps=2, synthetic=0.5),
)


@dataclass(frozen=True)
class Recipe:
    """Everything besides the plan that decides the weights."""

    seed: int = 20240
    matrix_lr: float = 0.02
    vector_lr: float = 0.004
    weight_decay: float = 0.01
    warmup_steps: int = 30
    decay_share: float = 0.4
    clip_norm: float = 1.0
    copied_weight: float = 2.0


def model_config() -> LlamaConfig:
    """Architecture: 6 query and 2 key-value heads of 32, so heads * head_dim != hidden size.

    A large RoPE base leaves several dimensions of each head almost unrotated over 8192 positions,
    which is what matching by content at long distance needs.
    """
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=144,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        hidden_act="silu",
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        initializer_range=0.02,
        dtype="float32",
    )


def is_held_out(name: str) -> bool:
    """Whether the file is never trained on.

    Args:
        name: path relative to the standard library, with forward slashes.
    """
    return hashlib.sha256(name.encode()).digest()[0] < HELD_OUT_BELOW


def read_corpus(root: Path, *, held_out: bool) -> dict[str, str]:
    """Sources below ``root`` of one split, by relative path, in sorted order.

    Files that are not UTF-8 are skipped.
    """
    texts = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not EXCLUDED_DIRS.isdisjoint(relative.parts) or relative.name.startswith("_sysconfig"):
            continue
        if is_held_out(relative.as_posix()) != held_out:
            continue
        try:
            texts[relative.as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            logger.info("skipped, not UTF-8: %s", relative)
    return texts


def corpus_digest(texts: dict[str, str]) -> str:
    """SHA-256 over names and contents, to tell whether two corpora are the same."""
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def stdlib_root() -> Path:
    """The running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def train_tokenizer(texts: dict[str, str]) -> Tokenizer:
    """Byte-level BPE of ``VOCAB_SIZE`` tokens; id 0 is the end of a text."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.values(), trainer)
    return tokenizer


def encode_corpus(
    tokenizer: Tokenizer, texts: dict[str, str], order_seed: int | None = None
) -> NDArray[np.int64]:
    """All files as one stream, each led by the end-of-text token; shuffled if a seed is given."""
    names = list(texts)
    if order_seed is not None:
        np.random.default_rng(order_seed).shuffle(names)
    stream: list[int] = []
    for name in names:
        stream.append(0)
        stream.extend(tokenizer.encode(texts[name]).ids)
    return np.asarray(stream, dtype=np.int64)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    return int(math.exp(rng.uniform(math.log(low), math.log(high))))


def natural_row(
    rng: np.random.Generator, stream: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """A stretch of code; in every third row a passage is repeated further on."""
    start = int(rng.integers(0, len(stream) - length))
    tokens = stream[start : start + length].copy()
    kinds = np.full(length, NATURAL, np.uint8)
    if rng.random() < 1 / 3:
        span = _log_uniform(rng, 16, length // 3)
        source = int(rng.integers(0, length - 2 * span))
        target = int(rng.integers(source + span, length - span + 1))
        tokens[target : target + span] = tokens[source : source + span]
        kinds[target : target + span] = COPIED
        kinds[target : target + 4] = IGNORED
    return tokens, kinds


def synthetic_row(
    rng: np.random.Generator, stream: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Segments of random tokens, then the same segments in another order, between filler.

    Segments of two tokens are associative recall (key, value), one long segment is plain copying.
    A small alphabet makes single tokens ambiguous, so that longer matches pay. Only what can be
    known counts for the loss: the repeated tokens after a segment's first, and code in the filler.
    """
    span = min(_log_uniform(rng, 2, length // 2 + 1), length // 2)
    count = max(1, int(rng.uniform(0.5, 1.0) * length / (2 * span)))
    alphabet_size = VOCAB_SIZE - 1
    if span > 4:
        alphabet_size = max(32, _log_uniform(rng, min(span, 512), VOCAB_SIZE))
    count = min(count, alphabet_size)
    alphabet = 1 + rng.permutation(VOCAB_SIZE - 1)[:alphabet_size]
    if rng.random() < 0.25 and span > 4:
        start = int(rng.integers(0, len(stream) - length))
        alphabet = rng.permutation(stream[start : start + length])
    segments = rng.choice(alphabet, size=(count, span))
    if span <= 4:
        # Keys occur once; values may repeat, but are no keys where the alphabet allows it.
        segments[:, 0] = alphabet[:count]
        if 2 * count <= alphabet_size:
            segments[:, 1:] = rng.choice(alphabet[count:], size=(count, span - 1))

    free = length - 2 * count * span
    cuts = np.sort(rng.integers(0, free + 1, size=2))
    if rng.random() < 0.5:
        start = int(rng.integers(0, len(stream) - length))
        filler, filler_kind = stream[start : start + free], NATURAL
    else:
        filler, filler_kind = rng.choice(alphabet, size=free), IGNORED

    repeat_kinds = np.full((count, span), COPIED, np.uint8)
    repeat_kinds[:, : 1 if span < 16 else 2] = IGNORED
    once_kinds = np.full(count * span, IGNORED, np.uint8)
    repeated = segments[rng.permutation(count)].ravel()
    lead, middle, tail = np.split(filler, cuts)
    tokens = np.concatenate([lead, segments.ravel(), middle, repeated, tail])
    kinds = np.concatenate(
        [
            np.full(len(lead), filler_kind, np.uint8),
            once_kinds,
            np.full(len(middle), filler_kind, np.uint8),
            repeat_kinds.ravel(),
            np.full(len(tail), filler_kind, np.uint8),
        ]
    )
    return tokens, kinds


def make_batch(
    phase: Phase, stream: NDArray[np.int64], *, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch of one step, a function of its arguments only.

    Returns:
        Token ids and their kinds, both ``[rows, length + 1]`` int64.
    """
    rng = np.random.default_rng([seed, step])
    rows = []
    for row in range(phase.rows):
        # Stratified, so that a batch of one row alternates between the two sources.
        position = (step * phase.rows + row + 0.5) * phase.synthetic
        synthetic = position % 1.0 + 1e-9 >= 1.0 - phase.synthetic
        make = synthetic_row if synthetic else natural_row
        rows.append(make(rng, stream, phase.length + 1))
    tokens = torch.from_numpy(np.stack([tokens for tokens, _ in rows]))
    kinds = torch.from_numpy(np.stack([kinds for _, kinds in rows]).astype(np.int64))
    return tokens, kinds


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximate polar factor of each matrix by a quintic Newton-Schulz iteration.

    Jordan et al., 2024, "Muon" (https://kellerjordan.github.io/posts/muon/).

    Args:
        matrices: ``[count, rows, columns]``, float32.
        steps: iterations.

    Returns:
        Same shape, singular values roughly between 0.7 and 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Momentum whose update is orthogonalized, for the matrices inside the blocks."""

    def __init__(self, params: list[torch.nn.Parameter], weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for param in params:
            by_shape.setdefault(param.shape, []).append(param)
        self.groups = list(by_shape.values())
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self.groups]
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float, momentum: float = 0.95) -> None:
        """Update all matrices from their gradients."""
        for group, momenta in zip(self.groups, self.momenta, strict=True):
            grads = torch.stack([param.grad for param in group if param.grad is not None])
            momenta.lerp_(grads, 1 - momentum)
            update = orthogonalize(grads.lerp(momenta, momentum))
            rows, columns = group[0].shape
            gain = max(1.0, rows / columns) ** 0.5
            for param, delta in zip(group, update, strict=True):
                param.mul_(1 - lr * self.weight_decay).add_(delta, alpha=-lr * gain)


@torch.no_grad()
def seed_lookup_heads(model: LlamaForCausalLM) -> None:
    """Start some heads near "find an earlier occurrence, copy what followed it".

    Such induction heads (Olsson et al., 2022, https://arxiv.org/abs/2209.11895) form by
    themselves, but from plain noise that takes many times the tokens of this plan. So the noise
    gets a faint structure, and everything is trained from there:

    1. The first hidden dimension is the same in every embedding. Queries and keys of block 0 that
       read only this dimension ignore content; with RoPE's fast frequencies their score,
       ``sum_i cos(f_i * (distance - offset))``, points ``offset`` tokens back. The values are a
       projection of the token there, written to a subspace of its own per head.
    2. In block 1 one head compares its token with the token before each key, another its previous
       token with the token two before each key, in the dimensions that RoPE hardly rotates.
       Their values are written back unchanged, which raises the copied token's logit.
    """
    config = model.config
    head_dim, hidden, noise = config.head_dim, config.hidden_size, config.initializer_range
    half = head_dim // 2
    frequencies = config.rope_parameters["rope_theta"] ** (-torch.arange(FAST_PAIRS) / half)
    model.model.embed_tokens.weight[:, 0] = 4 * noise
    basis = torch.zeros(hidden - 1, hidden)
    basis[:, 1:] = torch.linalg.qr(torch.randn(hidden - 1, hidden - 1))[0]
    token, *before = torch.split(basis[: 4 * head_dim], head_dim)

    def blocks(layer: int) -> tuple[torch.Tensor, ...]:
        attention = model.model.layers[layer].self_attn
        attention.o_proj.weight.mul_(0.1)  # else the noise drowns what is written below
        weights = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        return (
            *(weight.view(-1, head_dim, hidden) for weight in weights),
            attention.o_proj.weight.view(hidden, -1, head_dim),
        )

    queries, keys, values, outputs = blocks(0)
    keys[:, :FAST_PAIRS, 0] = 2.0
    for query, offset in zip(queries, (1, 2, 3, 1, 2, 4), strict=True):
        query[:FAST_PAIRS, 0] = 2.0 * torch.cos(offset * frequencies)
        query[half : half + FAST_PAIRS, 0] = -2.0 * torch.sin(offset * frequencies)
    values[0] += token
    for head, subspace in enumerate(before):
        outputs[:, head] += 3 * noise * subspace.T

    queries, keys, values, outputs = blocks(1)
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, head_dim)])
    for pair, (head, query, key) in enumerate([(0, token, before[0]), (3, before[0], before[1])]):
        queries[head, slow] += 1.5 * query[: len(slow)]
        keys[pair, slow] += 1.5 * key[: len(slow)]
        copied = basis[pair * head_dim : (pair + 1) * head_dim]
        values[pair] += copied
        outputs[:, head] += 3 * noise * copied.T


def lr_factor(step: int, total: int, recipe: Recipe) -> float:
    """Warm-up, constant, then linear decay to zero over the last ``decay_share`` of the steps."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    decay = min(1.0, (total - step) / (recipe.decay_share * total))
    return min(warm, decay)


def phase_of(step: int, plan: tuple[Phase, ...]) -> Phase:
    """The phase that a step, counted from 0, belongs to."""
    for phase in plan:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise IndexError("step lies behind the plan")


def write_atomically(path: Path, write: Any) -> None:
    """Call ``write(temporary_path)`` and rename the result, so ``path`` is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def export(
    model: LlamaForCausalLM, tokenizer: Tokenizer, facts: dict[str, Any], output: Path
) -> None:
    """Write the Hugging Face layout and ``training.json`` into ``output``, file by file."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as folder:
        staged = Path(folder)
        model.save_pretrained(staged)
        tokenizer.save(str(staged / "tokenizer.json"))
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_LEN,
        }
        for name, content in (
            ("tokenizer_config.json", tokenizer_config),
            ("training.json", facts),
        ):
            (staged / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for path in sorted(staged.iterdir()):
            path.chmod(0o644)
            os.replace(path, output / path.name)
    logger.info("exported to %s", output)


def train(args: argparse.Namespace) -> int:
    """Run the plan from the last checkpoint on; returns the process's exit status."""
    recipe = Recipe(seed=args.seed)
    total = sum(phase.steps for phase in PLAN)
    torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)

    texts = read_corpus(stdlib_root(), held_out=False)
    tokenizer_path = args.work_dir / "tokenizer.json"
    if not tokenizer_path.exists():
        write_atomically(tokenizer_path, lambda path: train_tokenizer(texts).save(str(path)))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    stream = encode_corpus(tokenizer, texts, order_seed=recipe.seed)
    logger.info("%d files, %d tokens to train on", len(texts), len(stream))

    model = LlamaForCausalLM._from_config(model_config(), attn_implementation="sdpa")
    seed_lookup_heads(model)
    model.train()
    params = sum(param.numel() for param in model.parameters())
    logger.info("%d parameters, %d steps", params, total)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    muon = Muon(matrices, recipe.weight_decay)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)

    # What a checkpoint must agree on to be continued.
    facts: dict[str, Any] = {
        "recipe": asdict(recipe),
        "plan": [asdict(phase) for phase in PLAN],
        "corpus_sha256": corpus_digest(texts),
        "corpus_files": len(texts),
        "corpus_tokens": len(stream),
        "parameters": params,
    }
    checkpoint = args.work_dir / "checkpoint.pt"
    first, seconds, tokens_seen = 0, 0.0, 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["facts"] != facts:
            logger.error(
                "%s comes from another recipe, plan or corpus. Remove %s to start afresh.",
                checkpoint,
                args.work_dir,
            )
            return 1
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        muon.momenta = state["muon"]
        first, seconds, tokens_seen = state["step"], state["seconds"], state["tokens_seen"]
        logger.info("continuing at step %d", first)

    def save(step: int) -> None:
        state = {
            "facts": facts,
            "model": model.state_dict(),
            "adam": adam.state_dict(),
            "muon": muon.momenta,
            "step": step,
            "seconds": seconds,
            "tokens_seen": tokens_seen,
        }
        write_atomically(checkpoint, lambda path: torch.save(state, path))
        progress = {
            "steps": step,
            "planned_steps": total,
            "tokens_seen": tokens_seen,
            "seconds": round(seconds, 1),
            "threads": args.threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        }
        export(model, tokenizer, facts | progress, args.output)

    started = last_save = time.monotonic()
    weight_of_kind = torch.tensor([0.0, 1.0, recipe.copied_weight])
    sums = torch.zeros(3)
    counts = torch.zeros(3)
    for step in range(first, total):
        step_started = time.monotonic()
        phase = phase_of(step, PLAN)
        tokens, kinds = make_batch(phase, stream, seed=recipe.seed, step=step)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        kind = kinds[:, 1:].flatten()
        weight = weight_of_kind[kind]
        torch.autograd.backward((losses * weight).sum() / weight.sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        factor = lr_factor(step, total, recipe)
        muon.step(recipe.matrix_lr * factor)
        for group in adam.param_groups:
            group["lr"] = recipe.vector_lr * factor
        adam.step()
        model.zero_grad(set_to_none=True)

        sums.index_add_(0, kind, losses.detach())
        counts.index_add_(0, kind, torch.ones_like(losses))
        tokens_seen += phase.rows * phase.length
        seconds += time.monotonic() - step_started
        if (step + 1) % 20 == 0:
            means = (sums / counts).tolist()
            logger.info(
                "step %d/%d, length %d, loss on code %.3f, on copies %.3f, lr x%.2f, %.0f s",
                step + 1, total, phase.length, means[NATURAL], means[COPIED], factor, seconds,
            )  # fmt: skip
            sums.zero_()
            counts.zero_()
        now = time.monotonic()
        out_of_time = args.minutes is not None and now - started > 60 * args.minutes
        if now - last_save > args.checkpoint_seconds or out_of_time or step + 1 == total:
            save(step + 1)
            last_save = now
        if out_of_time:
            logger.warning("stopped by --minutes at step %d; run again to continue", step + 1)
            return 0
    shutil.copyfile(args.output / "training.json", args.work_dir / "training.json")
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=MODEL_DIR, help="folder of the export")
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=EXAMPLES.parent / "build" / "demo_model",
        help="folder of the checkpoint and the tokenizer",
    )
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--minutes", type=float, help="stop, resumable, after this long")
    parser.add_argument("--checkpoint-seconds", type=float, default=240.0)
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    return train(args)


if __name__ == "__main__":
    sys.exit(main())
