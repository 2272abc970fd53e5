"""A sequence in any pieces is what it is as a whole: in torch, and in the artifact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import subquad
import tiny_decoders
from subquad.converter.pipeline import convert
from subquad.runtime.artifact import Artifact
from subquad.runtime.decoding import Decoding
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.validate import validate
from tiny_decoders import Make

LENGTH = 23
CUTS = {
    "whole": (0, LENGTH),
    "steps": tuple(range(LENGTH + 1)),
    "chunks": (0, 7, 14, 21, LENGTH),
    "prompt and steps": (0, 17, *range(18, LENGTH + 1)),
    "uneven": (0, 1, 2, 9, 10, 22, LENGTH),
}

EXACT = ["llama", "gpt2", "mistral", "gemma3"]
REPLACED = [
    ("llama", "window:4,sinks=2"),
    ("llama", "elu@0", "window:5@1"),
    ("gpt2", "hedgehog@1"),
    ("gemma3", "elu@1"),
]


def _padded(seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Three rows: full, padded in front, with holes."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, tiny_decoders.VOCABULARY, (3, LENGTH))
    real = np.ones(ids.shape, np.bool_)
    real[1, :8] = False
    real[2, [0, 3, 4, 11]] = False
    return ids, real


def _in_pieces(
    artifact: Artifact, ids: NDArray[np.int64], real: NDArray[np.bool_], cuts: Sequence[int]
) -> NDArray[np.float32]:
    decoding = Decoding(artifact, len(ids))
    pieces = [
        decoding.advance(ids[:, start:end], real[:, start:end])
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    assert decoding.length == cuts[-1]
    return np.concatenate(pieces, axis=1)


def _assert_same(got: NDArray[np.floating], want: NDArray[np.floating]) -> None:
    # float32 through two layers with large weights; a token too many or too few moves 0.1 or more
    assert np.linalg.norm(got - want) <= 2e-5 * np.linalg.norm(want)


def _check_exact(converted: Make, family: str) -> None:
    made = converted(family)
    ids, real = _padded()
    want = tiny_decoders.whole_pass(made.model, ids, real)
    artifact = subquad.load(made.artifact)
    for cuts in CUTS.values():
        _assert_same(_in_pieces(artifact, ids, real, cuts)[real], want[real])


def _check_replaced(converted: Make, family: str, *force: str) -> None:
    made = converted(family, *force)
    ids, real = _padded()
    artifact = subquad.load(made.artifact)
    want = _in_pieces(artifact, ids, real, CUTS["whole"])
    exact = tiny_decoders.whole_pass(made.model, ids, real)
    # Without an effect the comparison would say nothing.
    assert np.linalg.norm((want - exact)[real]) > 1e-2 * np.linalg.norm(exact[real])
    for cuts in CUTS.values():
        _assert_same(_in_pieces(artifact, ids, real, cuts)[real], want[real])


def test_exact_pieces_are_the_whole_pass_of_torch(converted: Make) -> None:
    _check_exact(converted, "llama")


@pytest.mark.slow
def test_a_window_of_the_source_s_own(converted: Make) -> None:
    _check_exact(converted, "mistral")
    pasts = _pasts(converted("mistral").artifact)
    # Five earlier tokens, whatever came before.
    assert pasts["past_key_values.1.window_keys"] == ("batch", 2, 5, 10)
    assert not any("past" in shape for shape in pasts.values())


def test_states_in_some_layers(converted: Make) -> None:
    _check_replaced(converted, "llama", "elu@0", "window:5@1")


@pytest.mark.slow
@pytest.mark.parametrize("family", EXACT)
def test_exact_families(converted: Make, family: str) -> None:
    _check_exact(converted, family)


@pytest.mark.slow
@pytest.mark.parametrize("case", REPLACED, ids=" ".join)
def test_replaced_families(converted: Make, case: tuple[str, ...]) -> None:
    _check_replaced(converted, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [("llama",), ("gemma3",), *REPLACED], ids=" ".join)
def test_validate_tests_pieces(converted: Make, case: tuple[str, ...]) -> None:
    result = validate(converted(*case).artifact, lengths=(1, 2, 19))
    assert result.verdict == ("pass" if len(case) == 1 else "measured"), result.reasons
    assert result.metamorphic is not None and not result.metamorphic.violations
    assert result.metamorphic.checks["pieces"] == 8  # two lengths of two tokens or more


@pytest.mark.slow
@pytest.mark.parametrize(
    "total", ["total_sequence_length", "past_sequence_length + sequence_length"]
)
def test_an_onnx_file_with_a_cache(converted: Make, tmp_path: Path, total: str) -> None:
    """As other exporters name its dimensions."""
    made = converted("llama")
    names = {
        "batch": "batch_size",
        "length": "sequence_length",
        "past": "past_sequence_length",
        "past + length": total,
    }
    model = onnx.load(made.artifact / "reference.onnx")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = names[dim.dim_param]
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "llama.onnx")
    convert(tmp_path / "llama.onnx", tmp_path / "artifact", force=("window:5@1",))
    pasts = _pasts(tmp_path / "artifact")
    assert pasts["past_key_values.0.key"] == ("batch", 2, "past", 10)
    assert pasts["past_key_values.1.window_keys"] == ("batch", 2, 4, 10)
    ids, real = _padded()
    artifact = subquad.load(tmp_path / "artifact")
    want = _in_pieces(artifact, ids, real, CUTS["whole"])[real]
    for cuts in CUTS.values():
        _assert_same(_in_pieces(artifact, ids, real, cuts)[real], want)


def _pasts(folder: object) -> dict[str, tuple[int | str, ...]]:
    manifest = Manifest.read(folder)  # type: ignore[arg-type]
    return {spec.name: spec.shape for spec in manifest.inputs if spec.role == "past"}


def test_names_are_those_of_other_tools(converted: Make) -> None:
    manifest = Manifest.read(converted("llama").artifact)
    total = "past + length"
    shapes = {spec.name: spec.shape for spec in manifest.inputs}
    assert shapes["input_ids"] == shapes["position_ids"] == ("batch", "length")
    assert shapes["attention_mask"] == ("batch", total)
    assert shapes["past_key_values.1.value"] == ("batch", 2, "past", 10)
    outputs = {spec.name: spec for spec in manifest.outputs}
    assert outputs["present.1.value"].shape == ("batch", 2, total, 10)
    assert outputs["present.1.value"].past == "past_key_values.1.value"
    site = manifest.sites[0].site
    assert site["is_self"] and site["cache"]["past_key"] == "past_key_values.0.key"
    assert site["name"] == "model.layers.0.self_attn"  # as without a cache: plans fit both
    assert manifest.sites[0].keeps.startswith("keys and values of all tokens")


def test_rows_can_be_taken_again(converted: Make) -> None:
    ids, real = _padded()
    artifact = subquad.load(converted("llama").artifact)
    decoding = Decoding(artifact, 3)
    decoding.advance(ids[:, :9], real[:, :9])
    decoding.reorder([2, 2, 0])
    order = np.array([2, 2, 0])
    got = decoding.advance(ids[order, 9:], real[order, 9:])
    want = _in_pieces(artifact, ids, real, (0, 9, LENGTH))[order, 9:]
    _assert_same(got[real[order, 9:]], want[real[order, 9:]])


def test_what_does_not_fit_is_refused(converted: Make) -> None:
    artifact = subquad.load(converted("llama").artifact)
    ids, real = _padded()
    decoding = Decoding(artifact, 3)
    with pytest.raises(UsageError, match="must be \\[3, count\\]"):
        decoding.advance(ids[:1])
    with pytest.raises(UsageError, match="indices of 0 to 100"):
        decoding.advance(ids + 200)
    assert decoding.length == 0
    feeds = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    past = {"past_key_values.0.key": np.zeros((3, 2, 4, 10), np.float32)}
    with pytest.raises(UsageError, match=r"missing: past_key_values.0.value"):
        artifact.run(feeds | past | {"position_ids": positions})
    longer = {name: np.zeros((3, 2, 4, 10), np.float32) for name in _pasts(artifact.path)}
    with pytest.raises(UsageError, match=r"past \+ length must be 27, got 23"):
        artifact.run(feeds | longer | {"position_ids": positions})
