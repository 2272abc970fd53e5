from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from subquad.runtime import artifact, metamorphic, session, site_comparison, validate_recall
from subquad.runtime import validate as validation
from subquad.runtime.budget import Budget
from subquad.runtime.errors import (
    IntegrityError,
    TargetUnavailableError,
    UnsupportedModelError,
    UsageError,
)
from subquad.runtime.validate import validate
from subquad.runtime.validation_result import ValidationResult
from tiny_artifact import VOCABULARY, Tiny, edit_manifest, feeds, save_npz

Make = Callable[[Tiny], Path]


def quick(path: Path, **options: Any) -> ValidationResult:
    defaults: dict[str, Any] = {"lengths": (1, 9), "threads": 1}
    return validate(path, **defaults | options)


def test_an_exact_artifact_passes(decoder: Path) -> None:
    result = quick(decoder, lengths=(1, 9, 34))
    assert result.verdict == "pass"
    assert result.exact and result.synthetic and "SYNTHETIC" in result.data
    assert result.measured["rel"] is not None and result.measured["rel"] < 1e-6
    assert [site.name for site in result.sites] == [f"layers.{i}.attention" for i in range(3)]
    assert all(site.relative_l2 is not None and site.relative_l2 < 1e-6 for site in result.sites)
    assert result.first_diverging is None
    assert result.metamorphic is not None and result.metamorphic.visible_reactions > 0
    assert result.peak_rss_bytes is None or result.peak_rss_bytes > 1 << 20
    assert {(case.length, case.padding) for case in result.cases} >= {(1, "none"), (34, "holes")}


def test_an_encoder_passes_and_has_no_logits(encoder: Path) -> None:
    result = quick(encoder)
    assert result.verdict == "pass"
    assert result.measured["kl"] is None and result.measured["ppl"] is None
    assert set(result.cases[0].outputs) == {"last_hidden_state", "pooled"}


def test_tokens_are_selected_without_a_copy() -> None:
    """A copy of the logits of 8000 tokens and 49152 words takes 1.6 GB."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 6, 3))
    some = np.array([[True] * 6, [True] * 4 + [False] * 2])
    for rows, mask in ((2, some | True), (1, some[1:]), (1, some[1:, ::-1])):
        picked = metamorphic.select(values[:rows], 1, mask)
        assert np.array_equal(picked, values[:rows][mask])
        assert np.shares_memory(picked, values)
    holes = np.array([[True, False, True, True, False, False]])
    for rows, mask in ((2, some), (1, holes)):
        assert np.array_equal(metamorphic.select(values[:rows], 1, mask), values[:rows][mask])
    assert np.array_equal(
        metamorphic.select(values.swapaxes(1, 2), 2, some | True), values.reshape(12, 3)
    )


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_a_row_without_tokens_is_not_compared(
    decoder: Path, encoder: Path, tmp_path: Path, hidden: int
) -> None:
    arrays = feeds(rows=3, length=6)
    arrays["attention_mask"][hidden] = 0
    save_npz(tmp_path / "rows.npz", arrays)
    for folder in (decoder, encoder):
        assert validate(folder, data=tmp_path / "rows.npz", threads=1).verdict == "pass"
    arrays["attention_mask"][:] = 0
    save_npz(tmp_path / "rows.npz", arrays)
    with pytest.raises(UsageError, match="padding masks are all 0"):
        validate(decoder, data=tmp_path / "rows.npz", threads=1)


def test_no_session_keeps_the_memory_of_its_longest_run(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas: list[tuple[str, bool]] = []
    for module in (artifact, validation, site_comparison, validate_recall):

        def opened(*arguments: Any, where: str = module.__name__, **options: Any) -> Any:
            arenas.append((where.rpartition(".")[2], options.get("arena", True)))
            return session.open_session(*arguments, **options)

        monkeypatch.setattr(module, "open_session", opened)
    quick(decoder)
    assert {name for name, _ in arenas} == {"artifact", "validate", "site_comparison"}
    assert not any(arena for _, arena in arenas)


def test_results_are_reproducible(decoder: Path) -> None:
    first, second = quick(decoder), quick(decoder)
    assert first.cases == second.cases and first.sites == second.sites


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_site_that_was_perturbed_is_named(make: Make, layer: int) -> None:
    # A scale that is 1 % off must be seen.
    result = quick(make(Tiny(perturbed=layer, perturbation=0.01)), metamorphic=False)
    assert result.verdict == "fail"
    assert result.first_diverging is not None
    assert result.first_diverging.name == f"layers.{layer}.attention"
    errors = [site.relative_l2 or 0.0 for site in result.sites]
    assert all(error < 1e-6 for error in errors[:layer])
    assert all(error > 1e-4 for error in errors[layer:])


def test_sites_read_in_small_groups_give_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(Tiny(perturbed=1))
    together = quick(folder, metamorphic=False).sites
    monkeypatch.setattr(site_comparison, "_SITE_BYTES", 1)
    assert quick(folder, metamorphic=False).sites == together


def test_an_exact_site_that_diverges_before_any_approximation_fails(make: Make) -> None:
    tiny = Tiny(perturbed=0, methods=("dense", "window", "dense"))
    result = quick(make(tiny), budget=Budget.parse(["rel=100"]))
    assert result.verdict == "fail"
    assert any("layers.0.attention is exact" in reason for reason in result.reasons)


def test_an_approximation_is_measured(make: Make) -> None:
    tiny = Tiny(perturbed=1, methods=("dense", "window", "dense"))
    result = quick(make(tiny))
    assert result.verdict == "measured" and not result.reasons
    assert result.first_diverging is not None and result.first_diverging.method == "window"
    assert result.metamorphic is not None and not result.metamorphic.violations


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [
        (["kl=10,ppl=1000%"], "pass"),
        (["rel=1"], "pass"),
        (["kl=0"], "fail"),
        (["cosine=1"], "fail"),
        (["top1=100%", "kl=10"], "fail"),
    ],
)
def test_budgets(make: Make, limits: list[str], verdict: str) -> None:
    tiny = Tiny(perturbed=1, perturbation=0.5, methods=("dense", "window", "dense"))
    result = quick(make(tiny), budget=Budget.parse(limits), metamorphic=False)
    assert result.verdict == verdict


@pytest.mark.parametrize("text", ["kl", "kl=x", "loss=1", "kl=-1", "kl=nan"])
def test_bad_budgets(text: str) -> None:
    with pytest.raises(UsageError, match="budget|Budget"):
        Budget.parse([text])


def test_budget_texts() -> None:
    budget = Budget.parse(["kl=0.1, ppl=1%", "top1=99%"])
    assert budget is not None
    assert budget.limits == {"kl": 0.1, "ppl": 0.01, "top1": 0.99}
    assert Budget.parse([]) is None
    assert budget.violations({"kl": math.nan, "ppl": 0.0, "top1": 1.0}) != []


@pytest.mark.parametrize("name", ["kl", "ppl", "top1"])
def test_a_budget_without_logits_is_refused(encoder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no logits"):
        quick(encoder, budget=Budget.parse([f"{name}=1"]))


def test_nan_fails_even_without_a_budget(make: Make) -> None:
    result = quick(make(Tiny(nan=1, methods=("dense", "window", "dense"))), metamorphic=False)
    assert result.verdict == "fail"
    assert "NaN or infinite" in result.reasons[0]
    json.dumps(result.to_json(), allow_nan=False)


def test_zeros_on_both_sides_are_no_agreement(make: Make) -> None:
    # Lost weights: model and reference agree to the bit, and mean nothing.
    result = quick(make(Tiny(zero=True)), metamorphic=False)
    assert result.verdict == "fail"
    assert "the reference gives zeros only" in result.reasons[0]


def test_a_model_that_ignores_its_tokens_has_not_been_tested(make: Make) -> None:
    result = quick(make(Tiny(zero=True)))
    assert "other tokens change no output at all" in " ".join(result.reasons)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_causal_leak_is_found_and_localised(make: Make, layer: int) -> None:
    # Claimed as an approximation with a generous budget: only the relations can catch it.
    methods = tuple("window" if i == layer else "dense" for i in range(3))
    folder = make(Tiny(leak=layer, methods=methods))
    result = quick(folder, budget=Budget.parse(["rel=1000"]))
    assert result.verdict == "fail"
    assert result.metamorphic is not None
    relations = {violation.relation for violation in result.metamorphic.violations}
    assert relations == {"future", "padding"}
    assert result.metamorphic.violations[0].site == f"layers.{layer}.attention"
    assert any(f"reacts is layers.{layer}.attention" in reason for reason in result.reasons)


def test_a_padding_leak_of_an_encoder_is_found(make: Make) -> None:
    folder = make(Tiny(causal=False, leak=1, methods=("dense", "landmark", "dense")))
    result = quick(folder, budget=Budget.parse(["rel=1000"]))
    assert result.verdict == "fail"
    assert result.metamorphic is not None
    violations = result.metamorphic.violations
    assert {violation.padding for violation in violations} == {"right", "left", "holes"}
    assert {violation.relation for violation in violations} == {"padding"}
    assert violations[0].site == "layers.1.attention"


def test_what_the_source_model_does_itself_is_no_leak(encoder: Path) -> None:
    # The pooled output reads slot 0, which is padding on the left.
    result = quick(encoder, paddings=("left",))
    assert result.metamorphic is not None
    assert result.metamorphic.source_reacts == {"padding": 1}
    assert not result.metamorphic.violations


def test_relations_that_do_not_apply_are_named(make: Make) -> None:
    result = quick(make(Tiny(padded=False, layers=1)), lengths=(9,), rows=1)
    assert result.metamorphic is not None
    assert set(result.metamorphic.not_applicable) == {"padding", "batch"}
    assert result.metamorphic.checks == {"future": 3}


def test_switched_off_parts_are_absent(decoder: Path) -> None:
    result = quick(decoder, metamorphic=False, sites=False)
    assert result.metamorphic is None and result.sites == ()


def test_lengths_that_cannot_run_are_left_out_with_the_reason(copied: Path) -> None:
    result = quick(copied, lengths=(9, 601), metamorphic=False)
    assert result.verdict == "pass"
    assert result.skipped == ({"length": 601, "reason": "the model accepts at most 600 tokens"},)
    # and if the manifest does not know: the reference tells
    edit_manifest(copied, max_length=None)
    result = quick(copied, lengths=(9, 601), metamorphic=False)
    assert result.skipped[0]["length"] == 601
    assert "the reference cannot run it" in result.skipped[0]["reason"]
    with pytest.raises(UnsupportedModelError, match="no length could be compared"):
        quick(copied, lengths=(601,))


def test_sites_that_cannot_be_read_are_named(copied: Path) -> None:
    sites = json.loads((copied / "manifest.json").read_text())["sites"]
    sites[1]["site"]["source_output"] = "gone"
    edit_manifest(copied, sites=sites)
    result = quick(copied, lengths=(9,), metamorphic=False)
    assert result.verdict == "pass"
    assert result.sites[1].relative_l2 is None
    assert result.sites[1].note == "reference.onnx has no value 'gone'"


def test_perplexity_on_text(decoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "held_out.txt"
    path.write_text(" ".join(f"w{i * i % VOCABULARY}" for i in range(300)))
    result = quick(decoder, data=path, lengths=None, budget=Budget.parse(["ppl=0.1%"]))
    assert result.verdict == "pass"
    assert not result.synthetic and "held_out.txt" in result.data
    logits = next(case.logits for case in result.cases if case.length == 128)
    assert logits is not None and logits["labels"] == 2 * 127
    assert logits["reference_perplexity"] > 1.0


def test_perplexity_is_that_of_the_next_real_token(decoder: Path, tmp_path: Path) -> None:
    import subquad

    arrays = feeds(2, 12)
    arrays["attention_mask"][1, 5] = 0
    save_npz(tmp_path / "x.npz", arrays)
    result = quick(decoder, data=tmp_path / "x.npz")
    values = subquad.load(decoder).run(arrays)["logits"].astype(np.float64)
    log_p = values - np.log(np.exp(values).sum(-1, keepdims=True))
    real = arrays["attention_mask"] == 1
    terms = [
        -log_p[row, i, arrays["input_ids"][row, i + 1]]
        for row in range(2)
        for i in range(11)
        if real[row, i] and real[row, i + 1]
    ]
    (case,) = result.cases
    assert case.logits is not None and case.logits["labels"] == len(terms) == 20
    want = float(np.exp(np.mean(terms)))
    assert case.logits["model_perplexity"] == pytest.approx(want, rel=1e-9)


def test_without_reference(copied: Path) -> None:
    files = json.loads((copied / "manifest.json").read_text())["files"]
    del files["reference.onnx"]
    edit_manifest(copied, files=files)
    with pytest.raises(IntegrityError, match="has no reference.onnx"):
        quick(copied)


def test_a_damaged_artifact_is_not_validated(copied: Path) -> None:
    (copied / "reference.onnx").write_bytes(b"")
    with pytest.raises(IntegrityError, match="reference.onnx"):
        quick(copied)


def test_a_provider_that_is_not_there(decoder: Path) -> None:
    with pytest.raises(TargetUnavailableError):
        quick(decoder, provider="migraphx")


@pytest.mark.parametrize(
    "options", [{"lengths": (0,)}, {"paddings": ("top",)}, {"paddings": ()}, {"rows": 0}]
)
def test_bad_arguments(decoder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        quick(decoder, **options)


def test_progress_is_reported(decoder: Path) -> None:
    seen: list[tuple[str, float | None]] = []
    quick(decoder, lengths=(9,), progress=lambda message, share: seen.append((message, share)))
    assert seen[0] == ("outputs: length 9, padding none", 0.0)
    assert seen[-1][0].startswith("attentions: length 9")
