from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from exact_folder import VOCABULARY, ExactFolder
from subquad.passes.calibrate.score import Score, Scorer
from subquad.runtime.budget import Budget
from subquad.runtime.errors import UsageError
from subquad.runtime.samples import Batch

Finish = Callable[[int, Mapping[str, NDArray[Any]]], None]


def batch(rng: np.random.Generator, length: int, padding: int = 0) -> Batch:
    mask = np.ones((2, length), np.int64)
    mask[0, length - padding :] = 0
    ids = rng.integers(0, VOCABULARY, (2, length))
    return Batch(length, "right", {"input_ids": ids, "attention_mask": mask})


def replay(outputs: list[NDArray[Any]]) -> Callable[[Finish], None]:
    def run(finish: Finish) -> None:
        for number, logits in enumerate(outputs):
            finish(number, {"logits": logits})

    return run


def test_metrics_follow_their_formulas(exact: ExactFolder) -> None:
    rng = np.random.default_rng(1)
    batches = [batch(rng, 40, padding=7), batch(rng, 25)]
    scorer = Scorer(exact.manifest, batches)
    teacher = [rng.normal(size=(2, b.length, VOCABULARY)).astype(np.float32) for b in batches]
    student = [x + 0.1 * rng.normal(size=x.shape).astype(np.float32) for x in teacher]
    scorer.teach(replay(teacher))
    score = scorer.score(replay(student))
    kl, rise, same, count = {}, {}, {}, {}
    for b, t, s in zip(batches, teacher, student, strict=True):
        log_p = t - np.log(np.exp(t.astype(float)).sum(-1, keepdims=True))
        log_q = s - np.log(np.exp(s.astype(float)).sum(-1, keepdims=True))
        real = b.feeds["attention_mask"].astype(bool)
        kl[b.length] = (np.exp(log_p) * (log_p - log_q)).sum(-1)[real].mean()
        same[b.length] = (log_p.argmax(-1) == log_q.argmax(-1))[real].mean()
        follows = real[:, :-1] & real[:, 1:]
        label = b.feeds["input_ids"][:, 1:][..., None]
        nll = np.take_along_axis(log_p[:, :-1] - log_q[:, :-1], label, -1)[..., 0]
        rise[b.length] = np.exp(nll[follows].mean()) - 1
        count[b.length] = int(follows.sum())
    # float32 distributions of 31 entries.
    assert score.metrics["kl"] == pytest.approx(max(kl.values()), rel=1e-4)
    assert score.damage == score.metrics["kl"]
    assert score.metrics["ppl"] == pytest.approx(max(rise.values()), rel=1e-4)
    assert score.metrics["top1"] == pytest.approx(min(same.values()))
    assert score.errors["kl"] > 0
    assert Score.from_json(score.to_json()) == score


@pytest.mark.parametrize(("rows", "factor"), [(1, 1.32), (2, 1.11), (4, 1.0)])
def test_neighbouring_positions_are_one_observation(
    exact: ExactFolder, rows: int, factor: float
) -> None:
    """Three groups to a row of 300. Within a group all positions are off by as much, so single
    positions know no more of the mean than their group does."""
    rng = np.random.default_rng(9)
    ids = rng.integers(0, VOCABULARY, (rows, 300))
    batches = [
        Batch(300, "none", {"input_ids": row[None], "attention_mask": np.ones_like(row[None])})
        for row in ids
    ]
    teacher = rng.normal(size=(rows, 300, VOCABULARY))
    size = np.repeat(rng.uniform(0.1, 1.0, (rows, 3)), (128, 128, 44), axis=1)
    student = teacher + size[..., None] * rng.normal(size=teacher.shape)
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (teacher, student))
    label = ids[:, 1:, None]
    rise = np.take_along_axis(log_p[:, :-1] - log_q[:, :-1], label, -1)[..., 0]
    terms = {"kl": (np.exp(log_p) * (log_p - log_q)).sum(-1), "ppl": rise}
    scorer = Scorer(exact.manifest, batches)
    scorer.teach(replay(list(teacher[:, None].astype(np.float32))))
    score = scorer.score(replay(list(student[:, None].astype(np.float32))))
    for name, values in terms.items():
        edges = [slice(0, 128), slice(128, 256), slice(256, None)]
        means = np.array([row[edge].mean() for row in values for edge in edges])
        weights = np.array([len(row[edge]) for row in values for edge in edges])
        mean = values.mean()
        spread = (weights * (means - mean) ** 2).sum() / weights.sum()
        want = factor * np.sqrt(spread / (3 * rows - 1))
        if name == "ppl":
            want *= np.exp(mean)
        # float32 distributions; the rest is float64.
        assert score.errors[name] == pytest.approx(want, rel=1e-3), name
        alone = values.std() / np.sqrt(values.size)
        assert name == "ppl" or score.errors[name] > 2 * alone, "as if positions were independent"


def test_of_one_observation_no_error_is_known(exact: ExactFolder) -> None:
    from subquad.passes.planner import PlanBudget

    rng = np.random.default_rng(4)
    ids = rng.integers(0, VOCABULARY, (1, 100))
    one = Batch(100, "none", {"input_ids": ids, "attention_mask": np.ones_like(ids)}, "code")
    scorer = Scorer(exact.manifest, [one])
    teacher = rng.normal(size=(1, 100, VOCABULARY)).astype(np.float32)
    scorer.teach(replay([teacher]))
    score = scorer.score(replay([teacher[..., ::-1].copy()]))
    limits = Budget.parse(["kl=0.01"])
    assert limits is not None and score.errors["kl"] == 0.0
    assert PlanBudget(limits).misses(score) and not PlanBudget(limits).is_hopeless(score)
    (note,) = scorer.notes(limits)
    assert note.startswith("held out of code at length 100 are 1 groups")
    assert Scorer(exact.manifest, [one] * 8).notes(limits) == ()
    other = Budget.parse(["top1=0.9"])
    assert other is not None and scorer.notes(other) == (), "it has no standard error"


def test_the_exact_model_is_at_no_distance(exact: ExactFolder) -> None:
    rng = np.random.default_rng(2)
    batches = [batch(rng, 30)]
    scorer = Scorer(exact.manifest, batches)
    logits = [rng.normal(size=(2, 30, VOCABULARY)).astype(np.float32)]
    scorer.teach(replay(logits))
    measured, claimed = scorer.score(replay(logits)), scorer.exact()
    assert measured.damage == claimed.damage == 0.0
    for name, value in claimed.metrics.items():
        assert measured.metrics[name] == pytest.approx(value, abs=1e-6)


def test_a_nan_is_never_within_a_budget(exact: ExactFolder) -> None:
    from subquad.passes.planner import PlanBudget

    rng = np.random.default_rng(2)
    scorer = Scorer(exact.manifest, [batch(rng, 30)])
    logits = rng.normal(size=(2, 30, VOCABULARY)).astype(np.float32)
    scorer.teach(replay([logits]))
    broken = logits.copy()
    broken[1, 3] = np.nan
    score = scorer.score(replay([broken]))
    for text in ("kl=1e9", "ppl=1e9", "rel=1e9", "cosine=0"):
        assert PlanBudget(Budget.parse([text])).misses(score), text
    assert not score.damage < 1e9


def test_limits_without_logits_are_refused(exact: ExactFolder) -> None:
    import dataclasses

    outputs = tuple(dataclasses.replace(o, is_logits=False) for o in exact.manifest.outputs)
    scorer = Scorer(dataclasses.replace(exact.manifest, outputs=outputs), [])
    budget = Budget.parse(["kl=0.1"])
    assert budget is not None
    with pytest.raises(UsageError, match="no logits"):
        scorer.check(budget)
