"""Kinds of documents: found in paths, balanced in rows, each of them a limit of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_artifact
from exact_folder import VOCABULARY, ExactFolder
from subquad.passes.calibrate.data import CalibrationData, open_data
from subquad.passes.calibrate.groups import MOST_GROUPS, document_groups
from subquad.passes.calibrate.score import Figures, Score, Scorer
from subquad.passes.planner import PlanBudget
from subquad.runtime.budget import Budget
from subquad.runtime.errors import UsageError
from subquad.runtime.manifest import Manifest
from subquad.runtime.samples import Batch


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x", "utf-8")
    return folder


def named(*paths: Path) -> dict[str, list[str]]:
    groups, _ = document_groups(paths)
    return {group.name: [file.name for file in group.files] for group in groups}


def test_a_folder_without_subfolders_is_one_kind(tmp_path: Path) -> None:
    folder = write(tmp_path / "texts", "b.txt", "a.txt", ".hidden")
    assert named(folder) == {"texts": ["a.txt", "b.txt"]}


def test_hidden_folders_are_no_kinds(tmp_path: Path) -> None:
    """A checkout of texts has its history beside them."""
    names = ("wiki/w.txt", "wiki/.cache/c.txt", ".git/HEAD", ".git/refs/main")
    assert named(write(tmp_path / "texts", *names)) == {"wiki": ["w.txt"]}
    assert named(write(tmp_path / ".texts", "a.txt")) == {".texts": ["a.txt"]}, "it was asked for"
    with pytest.raises(UsageError, match="holds no files"):
        named(write(tmp_path / "bare", ".git/HEAD"))


def test_every_subfolder_is_a_kind(tmp_path: Path) -> None:
    folder = write(tmp_path / "texts", "code/a/x.py", "code/b.py", "wiki/w.txt", "loose.txt")
    assert named(folder) == {"texts": ["loose.txt"], "code": ["x.py", "b.py"], "wiki": ["w.txt"]}


def test_every_path_given_is_a_kind(tmp_path: Path) -> None:
    write(tmp_path, "a/t.txt", "b/t.txt")
    first, second = tmp_path / "a" / "t.txt", tmp_path / "b" / "t.txt"
    assert named(tmp_path / "a", second) == {"a": ["t.txt"], "t.txt": ["t.txt"]}
    assert list(named(first, second)) == [str(first), str(second)], "names that repeat"
    assert list(named(first, first)) == ["t.txt"]


def test_a_file_in_two_kinds_is_an_error(tmp_path: Path) -> None:
    """Each is split for itself: what one holds out, the other would be measured on."""
    folder = write(tmp_path / "texts", "code/a.py", "code/b.py", "wiki/w.txt")
    for again in (folder / "code", folder / "code" / "b.py"):
        with pytest.raises(UsageError, match=r"\.py are given twice.*Give every file once"):
            document_groups([folder, again])


def test_many_kinds_are_one_and_that_is_said(tmp_path: Path) -> None:
    names = [f"k{i}/t.txt" for i in range(MOST_GROUPS)]
    assert len(named(write(tmp_path / "some", *names))) == MOST_GROUPS
    groups, notes = document_groups([write(tmp_path / "many", *names, "one/more.txt")])
    assert [len(group.files) for group in groups] == [MOST_GROUPS + 1]
    assert "judged as one" in notes[0]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_artifact.build(tmp_path_factory.mktemp("tiny") / "decoder")
    tiny_artifact.add_tokenizer(folder)
    return folder


def texts(folder: Path, **tokens: int) -> Path:
    """One folder for each kind; its only word is its place among them, plus one."""
    for place, (name, count) in enumerate(tokens.items(), start=1):
        (folder / name).mkdir(parents=True)
        (folder / name / "t.txt").write_text(f"w{place} " * count, "utf-8")
    return folder


def opened(folder: Path, *paths: Path, **tokens: int) -> CalibrationData:
    return open_data(Manifest.read(folder), folder, paths=paths, lengths=(16,), **tokens)


def rows(batches: tuple[Batch, ...]) -> Counter[str]:
    count: Counter[str] = Counter()
    for batch in batches:
        count[batch.group] += batch.rows
    return count


def test_rows_are_balanced_between_kinds(decoder: Path, tmp_path: Path) -> None:
    folder = texts(tmp_path / "t", code=4000, wiki=400)
    data = opened(decoder, folder, calibration_tokens=64, heldout_tokens=128)
    assert data.groups == ("code", "wiki")
    assert rows(data.calibration) == {"code": 2, "wiki": 2}
    assert rows(data.heldout) == {"code": 4, "wiki": 4}
    for batch in (*data.calibration, *data.heldout):
        word = {"code": 1, "wiki": 2}[batch.group]
        assert (batch.feeds["input_ids"] == word).all()
    assert data.description.startswith("code (t.txt: 1 documents, 4000 tokens")
    # Fewer tokens than kinds: a row of each all the same.
    few = opened(decoder, folder, calibration_tokens=16, heldout_tokens=16)
    assert rows(few.calibration) == rows(few.heldout) == {"code": 1, "wiki": 1}


def test_kinds_take_turns(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subquad.passes.calibrate.data._TOKENS_PER_BATCH", 16)
    data = opened(decoder, texts(tmp_path / "t", a=400, b=400), heldout_tokens=64)
    assert [batch.group for batch in data.heldout] == ["a", "b", "a", "b"]


def test_a_kind_that_is_too_short_is_left_out_and_said(decoder: Path, tmp_path: Path) -> None:
    data = opened(decoder, texts(tmp_path / "t", long=400, short=20))
    assert data.groups == ("long",)
    assert any("left out for short" in note for note in data.notes)


def test_the_same_rows_in_other_kinds_are_other_data(decoder: Path, tmp_path: Path) -> None:
    digests = {opened(decoder, texts(tmp_path / name, **{name: 400})).digest for name in ("a", "b")}
    assert len(digests) == 2


def batch(rng: np.random.Generator, group: str, length: int = 300) -> Batch:
    ids = rng.integers(0, VOCABULARY, (1, length))
    feeds = {"input_ids": ids, "attention_mask": np.ones((1, length), np.int64)}
    return Batch(length, "none", feeds, group)


def replay(outputs: list[NDArray[Any]], seen: list[int] | None = None) -> Any:
    def run(finish: Any) -> None:
        for number, logits in enumerate(outputs):
            if seen is not None:
                seen.append(number)
            finish(number, {"logits": logits})

    return run


@pytest.fixture
def taught(exact: ExactFolder) -> tuple[Scorer, list[NDArray[Any]], np.random.Generator]:
    """Two rows of ``a`` and two of ``b``, in turns."""
    rng = np.random.default_rng(5)
    scorer = Scorer(exact.manifest, [batch(rng, group) for group in "abab"])
    teacher = [rng.normal(size=(1, 300, VOCABULARY)).astype(np.float32) for _ in range(4)]
    scorer.teach(replay(teacher))
    return scorer, teacher, rng


def moved(
    teacher: list[NDArray[Any]], rng: np.random.Generator, by: list[float]
) -> list[NDArray[Any]]:
    return [
        (x + size * rng.normal(size=x.shape)).astype(np.float32)
        for x, size in zip(teacher, by, strict=True)
    ]


def test_every_kind_has_its_figures(taught: Any, exact: ExactFolder) -> None:
    scorer, teacher, rng = taught
    student = moved(teacher, rng, [0.05, 0.4, 0.05, 0.4])
    score = scorer.score(replay(student))
    assert set(score.groups) == {"a", "b"} and score.share == 1.0
    for offset, group in enumerate("ab"):
        alone = Scorer(exact.manifest, [scorer._batches[n] for n in (offset, offset + 2)])
        alone.teach(replay(teacher[offset::2]))
        own = alone.score(replay(student[offset::2]))
        assert own.groups == {}, "one kind is all there is"
        for name in ("kl", "ppl", "top1", "rel", "cosine"):
            assert score.groups[group].metrics[name] == pytest.approx(own.metrics[name]), name
        assert score.groups[group].errors == pytest.approx(own.errors)
    mean = np.mean([score.groups[group].metrics["kl"] for group in "ab"])
    assert score.metrics["kl"] == score.damage == pytest.approx(mean)
    assert Score.from_json(score.to_json()) == score


def test_a_limit_holds_on_the_worst_kind() -> None:
    even = Figures({"ppl": 0.004}, {"ppl": 0.001})
    for worst, errors, kept in (
        ({"ppl": 0.008}, {"ppl": 0.001}, True),
        ({"ppl": 0.008}, {"ppl": 0.003}, False),
        ({"ppl": 0.011}, {}, False),
    ):
        groups = {"wiki": even, "code": Figures(worst, errors)}
        score = Score({"ppl": 0.006}, {"ppl": 0.001}, 0.01, groups=groups)
        limits = PlanBudget(Budget.parse(["ppl=1%"]))
        misses = limits.misses(score)
        assert (not misses) == kept
        assert all(sentence.endswith("on code") for sentence in misses)
        careful = worst["ppl"] + errors.get("ppl", 0.0)
        assert limits.load(score) == pytest.approx(max(0.007, careful) / 0.01)


def test_a_limit_from_below_holds_on_the_worst_kind() -> None:
    groups = {"a": Figures({"top1": 0.99}, {}), "b": Figures({"top1": 0.93}, {})}
    score = Score({"top1": 0.96}, {}, 0.01, groups=groups)
    limits = PlanBudget(Budget.parse(["top1=0.95"]))
    assert limits.misses(score) == ["top1 is 0.93, below the budget of 0.95 on b"]
    assert limits.load(score) == pytest.approx(0.07 / 0.05)
    assert not limits.is_hopeless(score), "its standard error is not known"


@pytest.mark.parametrize(
    ("by", "runs"),
    [
        ([0.05, 0.05, 0.05, 0.05], 4),  # keeps the limit
        ([0.6, 0.05, 0.05, 0.05], 1),  # the first row tells
        ([0.05, 0.6, 0.05, 0.05], 2),
    ],
)
def test_a_run_that_clearly_misses_is_stopped(taught: Any, by: list[float], runs: int) -> None:
    scorer, teacher, rng = taught
    limits = PlanBudget(Budget.parse(["kl=0.05"]))
    seen: list[int] = []
    score = scorer.score(replay(moved(teacher, rng, by), seen), limits.is_hopeless)
    assert len(seen) == runs and score.share == runs / 4
    assert bool(limits.misses(score)) == (runs < 4)


def test_a_nan_stops_a_run(taught: Any) -> None:
    scorer, teacher, _ = taught
    broken = [np.full_like(x, np.nan) for x in teacher]
    seen: list[int] = []
    limits = PlanBudget(Budget.parse(["kl=1e9", "ppl=1e9"]))
    score = scorer.score(replay(broken, seen), limits.is_hopeless)
    assert seen == [0] and limits.misses(score)
