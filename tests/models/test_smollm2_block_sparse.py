"""SmolLM2-135M with block-sparse attention: perplexity, density and prefill time on code."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

import subquad
import third_party
from model_checks import feeds_for, perplexity
from subquad.converter.pipeline import convert
from subquad.runtime.artifact import Artifact
from subquad.runtime.kernel_library import choose_kernels
from subquad.runtime.manifest import MODEL_NAME, Manifest
from subquad.runtime.session import open_session
from subquad.runtime.validate import validate

pytestmark = [pytest.mark.models, pytest.mark.slow]

LAYERS, HEADS, BLOCK = 30, 9, 64
LENGTHS = (2048, 4096)


def make(folder: Path, method: str) -> Path:
    report = convert(third_party.smollm2(), folder, force=(method,), require_kernels=True)
    assert {record["method"] for record in report.sites} == {method.partition(":")[0]}
    return folder


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("exact") / "artifact", "dense")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sparse") / "artifact", "block_sparse:tau=0.97")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    method = "block_sparse:tau=0.97,selector=causal"
    return make(tmp_path_factory.mktemp("causal") / "artifact", method)


@pytest.fixture(scope="module")
def code() -> NDArray[np.int64]:
    """``[1, 4096]`` token ids of program text."""
    tokenizer = Tokenizer.from_file(str(third_party.smollm2() / "tokenizer.json"))
    return np.array([tokenizer.encode(third_party.python_source()).ids[: max(LENGTHS)]])


def logits(artifact: Artifact, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    (output,) = (spec.name for spec in artifact.manifest.outputs if spec.is_logits)
    feeds = feeds_for(artifact.manifest, ids, np.ones_like(ids))
    result: NDArray[np.float32] = artifact.run(feeds)[output][0]
    return result


def density(folder: Path, ids: NDArray[np.int64]) -> float:
    """Share of the causal pairs of blocks that are listed, over all layers and heads."""
    model = onnx.load(folder / MODEL_NAME, load_external_data=False)
    counts = [node.output[0] for node in model.graph.node if node.op_type == "BlockSelect"]
    assert len(counts) == LAYERS
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in counts)
    manifest = Manifest.read(folder)
    library = choose_kernels(folder, manifest, "require").library
    assert library is not None
    session = open_session(
        model.SerializeToString(), folder=folder, libraries=[folder.absolute() / library.path]
    )
    listed = session.run(counts, feeds_for(manifest, ids, np.ones_like(ids)))
    blocks = -(-ids.shape[1] // BLOCK)
    return float(np.sum(listed) / (LAYERS * HEADS * blocks * (blocks + 1) / 2))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["sparse", "causal"])
def test_perplexity_and_density(
    kind: str, length: int, exact: Path, code: NDArray[np.int64], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    ids = code[:, :length]
    want = perplexity(logits(subquad.load(exact), ids), ids[0])
    got = perplexity(logits(subquad.load(folder, kernels="require"), ids), ids[0])
    share = density(folder, ids)
    print(f"{kind} at {length}: perplexity {got:.4f}, x{got / want:.4f}, density {share:.3f}")
    # A study in torch with pooled blocks saw x1.008 at .505 (2048) and x1.015 at .370 (4096).
    assert got / want < 1.03
    assert share < {2048: 0.65, 4096: 0.52}[length]


def test_prefill_time(exact: Path, sparse: Path, code: NDArray[np.int64]) -> None:
    """Prints the ratio of processor times; a busy machine makes no test fail."""
    runs: dict[str, Any] = {
        "exact": subquad.load(exact, kernels="require"),
        "block_sparse": subquad.load(sparse, kernels="require"),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name, artifact in runs.items():
            start = time.process_time()
            result = logits(artifact, code)
            times[name].append(time.process_time() - start)
            assert np.isfinite(result).all()
    ratios = np.array(times["block_sparse"]) / np.array(times["exact"])
    print(f"prefill of 4096: {times}; block_sparse / exact {np.median(ratios):.3f}")


def test_hidden_tokens_move_nothing_at_the_declared_granularity(sparse: Path, causal: Path) -> None:
    for folder, granularity in ((sparse, BLOCK), (causal, 1)):
        manifest = Manifest.read(folder)
        assert {site.causal_granularity for site in manifest.sites} == {granularity}
        result = validate(folder, lengths=(300,))
        assert result.metamorphic is not None
        assert result.metamorphic.checks["future"] > 0
        assert not result.metamorphic.violations
