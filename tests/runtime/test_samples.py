from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from subquad.runtime.artifact import check_inputs
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import InputSpec, Manifest
from subquad.runtime.npz import read_npz
from subquad.runtime.samples import (
    PADDINGS,
    Case,
    LatticeSamples,
    Layout,
    Samples,
    is_causal_model,
    open_samples,
    padding_mask,
    read_documents,
)
from tiny_artifact import VOCABULARY, feeds, save_npz


def all_cases(samples: Samples, *lengths: int) -> list[Case]:
    return [case for case in samples.cases(lengths, PADDINGS) if isinstance(case, Case)]


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{(start + i) % VOCABULARY}" for i in range(count))


def test_the_lattice_covers_lengths_and_paddings(decoder: Path) -> None:
    samples = open_samples(Manifest.read(decoder), decoder, data=None, seed=0)
    cases = {(case.length, case.padding) for case in all_cases(samples, 1, 9)}
    assert cases == {(1, "none"), *((9, padding) for padding in PADDINGS)}
    for case in all_cases(samples, 1, 9):
        for batch in samples.batches(case):
            check_inputs(Manifest.read(decoder).inputs, batch.feeds)
            mask = batch.feeds["attention_mask"]
            assert mask.shape[1] == case.length
            assert mask.any(axis=1).all()
            assert mask.all() == (case.padding == "none")


def test_the_same_seed_gives_the_same_arrays_in_any_order(decoder: Path) -> None:
    manifest = Manifest.read(decoder)
    cases = all_cases(LatticeSamples(manifest, seed=3), 9, 17)
    forward = [next(LatticeSamples(manifest, seed=3).batches(case)) for case in cases]
    samples = LatticeSamples(manifest, seed=3)
    backward = [next(samples.batches(case)) for case in reversed(cases)]
    other = next(LatticeSamples(manifest, seed=4).batches(cases[0]))
    for first, second in zip(forward, reversed(backward), strict=True):
        assert all(np.array_equal(first.feeds[key], second.feeds[key]) for key in first.feeds)
    assert not np.array_equal(forward[0].feeds["input_ids"], other.feeds["input_ids"])


def test_paddings_have_their_shape() -> None:
    rng = np.random.default_rng(0)
    masks = {name: padding_mask(name, 2, 20, 0, rng) for name in PADDINGS}
    assert all(mask[0].all() for mask in masks.values())
    right, left = masks["right"][1], masks["left"][1]
    assert right[0] and not right[-1] and (np.diff(right.astype(int)) != 0).sum() == 1
    assert not left[0] and left[-1] and (np.diff(left.astype(int)) != 0).sum() == 1
    assert (np.diff(masks["holes"][1].astype(int)) != 0).sum() > 2


def test_long_cases_run_in_parts(decoder: Path) -> None:
    samples = LatticeSamples(Manifest.read(decoder), seed=0, rows=5)
    (case,) = (case for case in all_cases(samples, 1000) if case.padding == "none")
    rows = [batch.feeds["input_ids"].shape[0] for batch in samples.batches(case)]
    assert rows == [2, 2, 1]


def test_other_inputs_follow_their_roles(decoder: Path) -> None:
    manifest = Manifest.read(decoder)
    shape = ("batch", "length")
    more = (
        InputSpec("token_type_ids", "int64", shape, "ids", 2),
        InputSpec("position_ids", "int64", shape, "ids", 5),
        InputSpec("pixels", "float32", ("batch", 3, 2), "values"),
        InputSpec("decoder_input_ids", "int32", ("batch", "decoder_length"), "token_ids", 7),
    )
    manifest = dataclasses.replace(manifest, inputs=(*manifest.inputs, *more))
    assert Layout.of(manifest).lengths == ("length", "decoder_length")
    samples = LatticeSamples(manifest, seed=0)
    (case,) = (case for case in all_cases(samples, 9) if case.padding == "left")
    batch = next(samples.batches(case)).feeds
    check_inputs(manifest.inputs, batch)
    # so that neither length can be taken for the other
    assert batch["decoder_input_ids"].shape == (2, 8)
    mask, positions = batch["attention_mask"], batch["position_ids"]
    assert np.array_equal(positions, np.clip(np.cumsum(mask, 1) - 1, 0, 4))


def test_a_model_of_fixed_sizes_has_one_case(decoder: Path) -> None:
    manifest = Manifest.read(decoder)
    pixels = InputSpec("pixels", "float32", (1, 3, 4, 4), "values")
    samples = LatticeSamples(dataclasses.replace(manifest, inputs=(pixels,)), seed=0)
    (case,) = all_cases(samples, 8, 16)
    assert (case.length, case.padding, case.rows) == (0, "none", 2)
    assert [batch.feeds["pixels"].shape for batch in samples.batches(case)] == [(1, 3, 4, 4)] * 2


def test_a_causal_model_reads_one_stream(decoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(words(30) + "\n\n" + words(30, 30))
    samples = open_samples(Manifest.read(decoder), decoder, data=path, seed=0)
    assert samples.kind == "text"
    (case,) = (case for case in all_cases(samples, 20) if case.padding == "none")
    ids = np.concatenate([batch.feeds["input_ids"] for batch in samples.batches(case)])
    assert np.array_equal(ids.ravel(), np.arange(60) % VOCABULARY)


def test_padding_keeps_the_tokens_in_order(decoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(words(40))
    samples = open_samples(Manifest.read(decoder), decoder, data=path, seed=0)
    for case in all_cases(samples, 20):
        for batch in samples.batches(case):
            for row, mask in enumerate(batch.feeds["attention_mask"] == 1):
                real = batch.feeds["input_ids"][row][mask]
                assert np.array_equal(real, (20 * row + np.arange(mask.sum())) % VOCABULARY)


def test_an_encoder_reads_documents(encoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"text": words(n, start=n)}) for n in (3, 12, 8)]
    path.write_text("\n".join(lines))
    samples = open_samples(Manifest.read(encoder), encoder, data=path, seed=0)
    assert samples.kind == "jsonl"
    assert samples.default_lengths() == (1, 12)
    (case,) = (case for case in all_cases(samples, 8) if case.padding == "none")
    (batch,) = samples.batches(case)
    # longest document first, cut; the one of 3 tokens is too short
    assert np.array_equal(batch.feeds["input_ids"], [range(12, 20), range(8, 16)])


def test_a_length_without_data_is_left_out_with_a_reason(encoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(words(5) + "\n" + words(7))
    samples = open_samples(Manifest.read(encoder), encoder, data=path, seed=0)
    assert list(samples.cases([8], PADDINGS)) == [
        (8, "the data hold at most 7 tokens in one piece")
    ]


def test_arrays_are_used_as_they_are(decoder: Path, tmp_path: Path) -> None:
    arrays = feeds(5, 700)
    save_npz(tmp_path / "x.npz", arrays)
    samples = open_samples(Manifest.read(decoder), decoder, data=tmp_path / "x.npz", seed=0)
    (case,) = all_cases(samples, 1, 2)
    assert (case.length, case.padding, case.rows) == (700, "given", 5)
    parts = [batch.feeds["input_ids"] for batch in samples.batches(case)]
    assert [len(part) for part in parts] == [2, 2, 1]
    assert np.array_equal(np.concatenate(parts), arrays["input_ids"])


def test_causal_is_a_property_of_every_self_attention(decoder: Path, encoder: Path) -> None:
    assert is_causal_model(Manifest.read(decoder))
    assert not is_causal_model(Manifest.read(encoder))
    assert not is_causal_model(dataclasses.replace(Manifest.read(decoder), sites=()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "", "holds no text"),
        ("x.txt", " \n\n ", "holds no text"),
        ("x.jsonl", "{", "x.jsonl:1: expected a JSON object"),
        ("x.jsonl", '{"text": "a"}\n[]', "x.jsonl:2"),
        ("x.jsonl", '{"text": 3}', "must be a string, got int"),
        ("x.jsonl", '{"text": "a", "id": ' + 5000 * "9" + "}", "x.jsonl:1: expected a JSON object"),
        ("x.jsonl", '{"text": "\\ud800"}', "x.jsonl:1: .*holds what is no character"),
        ("x.txt", "h\0i\0", "NUL characters"),
        ("x.npz", "no zip", "not a readable .npz"),
    ],
)
def test_bad_data(decoder: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        open_samples(Manifest.read(decoder), decoder, data=tmp_path / name, seed=0)


def test_missing_data(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        open_samples(Manifest.read(decoder), decoder, data=tmp_path / "x.txt", seed=0)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_documents(tmp_path / "x.txt", split=True)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfw1 w2")
    assert read_documents(tmp_path / "x.txt", split=False) == ["w1 w2"]
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "w1"}')
    assert read_documents(tmp_path / "x.jsonl", split=False) == ["w1"]


@pytest.mark.parametrize("change", ["one array", "cut", "flipped", "encrypted"])
def test_archives_that_cannot_be_read(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.random.default_rng(0).integers(0, 9, 500))
    content = bytearray(path.read_bytes())
    if change == "one array":
        with path.open("wb") as stream:
            np.save(stream, np.arange(3))
    elif change == "cut":
        path.write_bytes(content[:200])
    elif change == "flipped":
        content[60:70] = b"\xff" * 10
        path.write_bytes(content)
    else:
        content[6] |= 1
        content[content.rfind(b"PK\x01\x02") + 8] |= 1
        path.write_bytes(content)
    with pytest.raises(UsageError, match="holds one array|not a readable .npz"):
        read_npz(path)


def test_the_suffix_counts_in_any_case(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.JSONL").write_text('{"text": "w1 w2"}')
    assert read_documents(tmp_path / "x.JSONL", split=False) == ["w1 w2"]
    (tmp_path / "x.NPZ").write_text("no zip")
    with pytest.raises(UsageError, match="not a readable .npz"):
        open_samples(Manifest.read(decoder), decoder, data=tmp_path / "x.NPZ", seed=0)


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.array([{}], object))
    with pytest.raises(UsageError, match="not a readable"):
        read_npz(tmp_path / "x.npz")


def test_an_artifact_without_tokenizer(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("w1")
    with pytest.raises(UsageError, match="has no tokenizer.json"):
        open_samples(Manifest.read(decoder), tmp_path, data=tmp_path / "x.txt", seed=0)


def test_a_tokenizer_of_another_model(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(words(32))
    manifest = Manifest.read(decoder)
    small = dataclasses.replace(manifest.inputs[0], high=4)
    manifest = dataclasses.replace(manifest, inputs=(small, manifest.inputs[1]))
    samples = open_samples(manifest, decoder, data=tmp_path / "x.txt", seed=0)
    with pytest.raises(UsageError, match="do not belong together"):
        next(samples.batches(all_cases(samples, 9)[0]))
