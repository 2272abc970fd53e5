"""The embedded model, tied embeddings and grouped heads: the artifact computes what torch does."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import subquad
from subquad.converter.pipeline import convert
from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import recall, recall_facts, spelling_tokenizer
from subquad.runtime.text import Tokenizer

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


def test_recall_tells_a_window_from_the_whole(tmp_path: Path) -> None:
    """The demo model copies; four layers of a window of 64 reach back over 256 tokens at most."""
    convert(DEMO_MODEL, tmp_path / "exact", force=("dense",))
    convert(DEMO_MODEL, tmp_path / "window", force=("window:size=64",))
    manifest = Manifest.read(tmp_path / "exact")
    tokenizer = Tokenizer.load(tmp_path / "exact")
    code = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    ids = np.array(tokenizer.encode(code.read_text("utf-8"))[: 4 * 768]).reshape(4, 768)
    exact, other = (subquad.load(tmp_path / name) for name in ("exact", "window"))
    spelling = spelling_tokenizer(tmp_path / "exact")
    points = recall(manifest, exact.run, other.run, list(ids), spelling, beyond=256)
    assert {point.kind for point in points} == {"copy", "needle", "pairs"}
    assert all(point.exact > 0.9 for point in points if point.kind == "copy")
    assert any(point.counts for point in points if point.kind == "needle")
    kept = recall_facts(points)["recall_kept"]
    assert kept is not None and kept < 0.3, "digits are guessed at 0.1"
    same = recall(manifest, exact.run, exact.run, list(ids), spelling, beyond=256)
    assert recall_facts(same)["recall_kept"] == 1.0
