from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import subquad
from subquad.runtime.errors import OutputError, UsageError
from subquad.runtime.npz import write_npz
from subquad.runtime.run import run
from tiny_artifact import Tiny, feeds, save_npz


def test_arrays_in_and_out(decoder: Path, tmp_path: Path) -> None:
    save_npz(tmp_path / "x.npz", feeds())
    result = run(decoder, arrays=tmp_path / "x.npz", output=tmp_path / "y.npz", threads=1)
    with np.load(tmp_path / "y.npz") as written:
        assert np.array_equal(written["logits"], subquad.load(decoder).run(feeds())["logits"])
    assert result.summaries[0].shape == (2, 9, 32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz", "y.npz"]


def test_text_gives_likely_tokens(decoder: Path) -> None:
    result = run(decoder, texts=["w1 w2 w3", "w4"], top=3, threads=1)
    logits = subquad.load(decoder).run(
        {"input_ids": np.array([[1, 2, 3]]), "attention_mask": np.ones((1, 3), np.int64)}
    )["logits"][0, -1]
    first = result.summaries[0]
    assert [token.index for token in first.next_tokens] == list(np.argsort(-logits)[:3])
    assert first.next_tokens[0].text == f"w{first.next_tokens[0].index}"
    assert first.shape == (3, 32) and result.summaries[1].shape == (1, 32)
    assert "'w1 w2 w3'" in first.describe()


def test_padding_in_a_batch_of_texts_changes_nothing(decoder: Path) -> None:
    alone = run(decoder, texts=["w4 w9"], threads=1).summaries[0]
    together = run(decoder, texts=["w1 w2 w3 w5 w7", "w4 w9"], threads=1).summaries[1]
    for one, two in zip(alone.next_tokens, together.next_tokens, strict=True):
        assert one.index == two.index
        assert one.probability == pytest.approx(two.probability, rel=1e-5)


def test_an_encoder_gives_embeddings(encoder: Path) -> None:
    result = run(encoder, texts=["w1 w2 w3"], threads=1)
    hidden = subquad.load(encoder).run(
        {"input_ids": np.array([[1, 2, 3]]), "attention_mask": np.ones((1, 3), np.int64)}
    )["last_hidden_state"][0]
    assert result.summaries[0].embedding == pytest.approx(hidden.mean(0), rel=1e-5)
    assert [item.output for item in result.summaries] == ["last_hidden_state", "pooled"]


def test_neither_or_both(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either --input"):
        run(decoder)
    with pytest.raises(UsageError, match="either --input"):
        run(decoder, texts=["w1"], arrays=tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("texts", "message"),
    [([""], "no tokens"), (["w1 " * 601], "at most 600"), (["w1 \udcff"], "is no character")],
)
def test_texts_that_cannot_run(decoder: Path, texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(decoder, texts=texts)


def test_unequal_texts_need_a_padding_mask(make: Callable[[Tiny], Path], decoder: Path) -> None:
    folder = make(Tiny(padded=False))
    (folder / "tokenizer.json").write_bytes((decoder / "tokenizer.json").read_bytes())
    assert len(run(folder, texts=["w1 w2", "w3 w4"]).summaries) == 2
    with pytest.raises(UsageError, match="no padding mask"):
        run(folder, texts=["w1 w2", "w3"])


def test_an_output_that_cannot_be_written(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_npz(tmp_path / "missing" / "y.npz", {})
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        write_npz(tmp_path / "taken", {"a": np.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_any_output_name_can_be_written(tmp_path: Path) -> None:
    write_npz(tmp_path / "y.npz", {"file": np.arange(3), "a/b": np.zeros((0, 2))})
    with np.load(tmp_path / "y.npz") as written:
        assert written["file"].tolist() == [0, 1, 2]
        assert written["a/b"].shape == (0, 2)


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_the_output_has_the_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_npz(tmp_path / "y.npz", {"a": np.zeros(1)})
    assert (tmp_path / "y.npz").stat().st_mode == (tmp_path / "plain").stat().st_mode
