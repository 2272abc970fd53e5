"""SmolLM2-135M writes through its artifact what it writes in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import subquad
import third_party
from subquad.converter.pipeline import convert
from subquad.runtime.decoding import Decoding
from subquad.runtime.generate import generate
from subquad.runtime.manifest import Manifest

pytestmark = [pytest.mark.models, pytest.mark.slow]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived an old",
)
NEW = 32


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "exact"
    report = convert(third_party.smollm2(), folder, cache=True)
    assert report.check["verdict"] == "pass"
    return folder


def test_greedy_tokens_are_those_of_torch(exact: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(third_party.smollm2())
    model = AutoModelForCausalLM.from_pretrained(third_party.smollm2(), dtype=torch.float32)
    wanted = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        written = model.generate(**given, max_new_tokens=NEW, do_sample=False)
        wanted.append(tuple(written[0, given["input_ids"].shape[1] :].tolist()))
    alone = [generate(exact, texts=(p,), max_new_tokens=NEW).rows[0].ids for p in PROMPTS]
    assert alone == wanted
    # Of different lengths, so padded in front.
    batch = generate(exact, texts=PROMPTS, max_new_tokens=NEW)
    assert [row.ids for row in batch.rows] == wanted


def test_states_of_a_mixed_plan(tmp_path: Path) -> None:
    """Windows with sinks and linear layers: pieces are the whole, and the cache stays as it is."""
    folder = tmp_path / "mixed"
    convert(third_party.smollm2(), folder, cache=True, force=("window:64@0-27", "hedgehog@28-29"))
    pasts = [spec for spec in Manifest.read(folder).inputs if spec.role == "past"]
    assert not any("past" in spec.shape for spec in pasts)
    ids = np.random.default_rng(0).integers(0, 49152, (1, 200))
    artifact = subquad.load(folder)
    whole = Decoding(artifact, 1).advance(ids)
    decoding = Decoding(artifact, 1)
    pieces = [decoding.advance(ids[:, :150])]
    size = decoding.nbytes()
    pieces += [decoding.advance(ids[:, i : i + 1]) for i in range(150, 200)]
    assert decoding.nbytes() == size
    error = np.linalg.norm(np.concatenate(pieces, axis=1) - whole) / np.linalg.norm(whole)
    print(f"pieces against the whole: {error:.2g}")
    assert error <= 1e-4  # float32 through 30 layers
