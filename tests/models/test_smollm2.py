"""SmolLM2-135M: a causal decoder with grouped key/value heads, converted from its folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import subquad
import third_party
from model_checks import HiddenValues, assert_moved, assert_unmoved, feeds_for, perplexity
from subquad.converter.pipeline import convert
from subquad.runtime.manifest import Manifest
from subquad.runtime.probes import recall, recall_facts, spelling_tokenizer
from subquad.runtime.validate import validate

pytestmark = [pytest.mark.models, pytest.mark.slow]

LAYERS = 30
VOCABULARY = 49152

# VmHWM belongs to the process image; ru_maxrss would start at the size of whoever started it.
CONVERT = """
import json, re, resource, sys
from pathlib import Path
from subquad.converter.pipeline import convert

report = convert(Path(sys.argv[1]), Path(sys.argv[2]), force=("dense",))
own = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({
    "own_peak_bytes": 1024 * own,
    "peak_bytes": 1024 * max(own, children),
    "reported_bytes": report.peak_rss_bytes,
    "seconds": sum(report.seconds.values()),
    "methods": [record["method"] for record in report.sites],
}))
"""


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The exact artifact, converted in a process of its own so that its memory can be read."""
    output = tmp_path_factory.mktemp("smollm2") / "artifact"
    command = [sys.executable, "-c", CONVERT, str(third_party.smollm2()), str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"SmolLM2 conversion: {facts['seconds']:.0f} s, peak {facts['peak_bytes'] / 1e9:.2f} GB")
    return output, facts


@pytest.fixture(scope="module")
def article() -> NDArray[np.int64]:
    """``[1, 1024]`` token ids of held-out text."""
    tokenizer = Tokenizer.from_file(str(third_party.smollm2() / "tokenizer.json"))
    return np.array([tokenizer.encode(third_party.wikipedia_article()).ids[:1024]])


def test_conversion_raises_all_in_little_memory(
    conversion: tuple[Path, dict[str, Any]],
) -> None:
    _, facts = conversion
    assert facts["methods"] == ["dense"] * LAYERS
    assert facts["peak_bytes"] <= 1.6e9
    assert facts["reported_bytes"] == pytest.approx(facts["own_peak_bytes"], rel=0.1)


def test_dense_perplexity_is_the_source_s(
    conversion: tuple[Path, dict[str, Any]], article: NDArray[np.int64]
) -> None:
    artifact = subquad.load(conversion[0])
    (output,) = (spec.name for spec in artifact.manifest.outputs if spec.is_logits)
    logits = artifact.run(feeds_for(artifact.manifest, article, np.ones_like(article)))[output][0]
    model = AutoModelForCausalLM.from_pretrained(third_party.smollm2(), dtype=torch.float32)
    with torch.no_grad():
        source_logits = model(input_ids=torch.from_numpy(article)).logits[0].numpy()
    got, want = perplexity(logits, article[0]), perplexity(source_logits, article[0])
    print(f"perplexity at 1024: artifact {got:.4f}, source {want:.4f}")
    assert want == pytest.approx(13.20, abs=0.01)  # the published figure of this text
    assert got == pytest.approx(want, rel=5e-5)


def test_future_token_moves_nothing_at_any_site(
    conversion: tuple[Path, dict[str, Any]],
) -> None:
    hidden = HiddenValues(conversion[0])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, 96))
    changed_at = np.array([60, 95])
    changed = ids.copy()
    changed[[0, 1], changed_at] = (ids[[0, 1], changed_at] + 1) % VOCABULARY
    mask = np.ones_like(ids)
    outputs, before = hidden.run(feeds_for(hidden.manifest, ids, mask))
    outputs_after, after = hidden.run(feeds_for(hidden.manifest, changed, mask))
    blind = np.arange(96) < changed_at[:, None]
    assert len(before) == LAYERS
    assert_unmoved(before, after, dict.fromkeys(before, blind))
    assert_moved(before, after, ~blind)
    for name, logits in outputs.items():
        assert np.array_equal(logits[blind], outputs_after[name][blind])


@pytest.mark.parametrize("padding", ["left", "right"])
def test_masked_token_moves_nothing_at_any_site(
    conversion: tuple[Path, dict[str, Any]], padding: str
) -> None:
    hidden = HiddenValues(conversion[0])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, 96))
    mask = np.ones_like(ids)
    mask[:, slice(0, 30) if padding == "left" else slice(66, 96)] = 0
    changed = np.where(mask == 0, (ids + 1) % VOCABULARY, ids)
    outputs, before = hidden.run(feeds_for(hidden.manifest, ids, mask))
    outputs_after, after = hidden.run(feeds_for(hidden.manifest, changed, mask))
    real = mask == 1
    assert_unmoved(before, after, dict.fromkeys(before, real))
    if padding == "left":  # after right padding no real token could see it anyway
        _, seen_before = hidden.run(feeds_for(hidden.manifest, ids, np.ones_like(mask)))
        _, seen_after = hidden.run(feeds_for(hidden.manifest, changed, np.ones_like(mask)))
        assert_moved(seen_before, seen_after, real)
    for name, logits in outputs.items():
        assert np.array_equal(logits[real], outputs_after[name][real])


WINDOWED = 4
"""Layers 0 to 3 get a window; the others stay exact."""


def test_window_on_some_layers(tmp_path: Path) -> None:
    """Converts, says how large the error is, and confines a change to the window's reach."""
    size, changed_at, length = 32, 100, 300
    report = convert(
        third_party.smollm2(), tmp_path / "artifact", force=(f"window:{size}@0-{WINDOWED - 1}",)
    )
    methods = [record["method"] for record in report.sites]
    assert methods == ["window"] * WINDOWED + ["dense"] * (LAYERS - WINDOWED)

    result = validate(tmp_path / "artifact", lengths=(length,))
    print(f"window {size} on layers 0-{WINDOWED - 1}: {result.measured}")
    assert result.metamorphic is not None and not result.metamorphic.violations
    errors = [site.relative_l2 for site in result.sites]
    assert errors[0] is not None and 1e-3 < errors[0] < 1

    hidden = HiddenValues(tmp_path / "artifact")
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, length))
    changed = ids.copy()
    changed[0, changed_at] = (ids[0, changed_at] + 1) % VOCABULARY
    _, before = hidden.run(feeds_for(hidden.manifest, ids, np.ones_like(ids)))
    _, after = hidden.run(feeds_for(hidden.manifest, changed, np.ones_like(ids)))
    position = np.arange(length)[None]
    may_not_see = {
        site: (position < changed_at)
        | ((position > changed_at + (size - 1) * (layer + 1)) & (layer < WINDOWED))
        for layer, site in enumerate(before)
    }
    assert_unmoved(before, after, may_not_see)
    assert_moved(before, after, position == changed_at + size - 1)


def test_it_finds_what_was_said_far_before(
    conversion: tuple[Path, dict[str, Any]], article: NDArray[np.int64]
) -> None:
    """So the recall of a converted one says something."""
    folder, _ = conversion
    artifact = subquad.load(folder)
    points = recall(
        Manifest.read(folder), artifact.run, artifact.run, [article[0]], spelling_tokenizer(folder)
    )
    assert all(point.counts for point in points if point.kind != "copy")
    assert sum(point.counts for point in points) >= len(points) - 1
    assert recall_facts(points)["recall_kept"] == 1.0
