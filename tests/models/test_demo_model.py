"""The embedded model, tied embeddings and grouped heads: the artifact computes what torch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import subquad
from subquad.converter.pipeline import convert

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


def test_dense_equals_the_source(tmp_path: Path) -> None:
    convert(DEMO_MODEL, tmp_path / "artifact", force=("dense",))
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = np.random.default_rng(0).integers(1, model.config.vocab_size, (2, 150))
    mask = np.ones_like(ids)
    mask[1, :40] = 0
    feeds = {"input_ids": ids, "attention_mask": mask}
    got = subquad.load(tmp_path / "artifact").run(feeds)["logits"]
    with torch.no_grad():
        want = model(**{name: torch.from_numpy(array) for name, array in feeds.items()})
    # Padding queries see nothing real; what they compute is nobody's business.
    difference = np.abs(got - want.logits.numpy())[mask == 1]
    assert difference.max() <= 1e-4  # float32, logits up to about 10
