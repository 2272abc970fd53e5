"""Compare ``model.onnx`` with ``reference.onnx``: outputs, every attention, and what it may see.

The outputs are those of the model as it ships. The values of the attentions are read in a
second pass, from both graphs with these values as further outputs. Inputs run one length at a
time and results are reduced to sums at once, so the longest run decides the peak memory.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.runtime.artifact import Artifact, check_files, load, open_manifest
from subquad.runtime.budget import EXACT_LIMIT, Budget
from subquad.runtime.decoding import decoding_reason
from subquad.runtime.errors import (
    BudgetError,
    IntegrityError,
    SubquadError,
    UnsupportedModelError,
    UsageError,
)
from subquad.runtime.kernel_library import KernelMode
from subquad.runtime.machine import peak_rss_bytes
from subquad.runtime.manifest import REFERENCE_NAME, Manifest
from subquad.runtime.metamorphic import (
    Change,
    MetamorphicResult,
    Violation,
    causal_granularity,
    changes,
    is_leak,
    length_axis,
    output_changes,
    real_tokens,
    select,
)
from subquad.runtime.metrics import Difference, LogitsDifference
from subquad.runtime.pair import reads_encoder
from subquad.runtime.past import carried, with_past
from subquad.runtime.piecewise import piecewise_change
from subquad.runtime.recall_budget import refuse_recall
from subquad.runtime.samples import (
    PADDINGS,
    Batch,
    Case,
    Layout,
    Samples,
    is_causal_model,
    open_samples,
)
from subquad.runtime.session import QUIET_THREADS, open_session, run_session
from subquad.runtime.site_comparison import SiteComparison, SiteResult, as_vectors
from subquad.runtime.validate_recall import artifact_recall
from subquad.runtime.validation_result import (
    CaseResult,
    ValidationResult,
    Verdict,
    exact_violations,
    leak_sentences,
    unexpected_divergence,
)

Progress = Callable[[str, float | None], None]
Values = Mapping[str, NDArray[Any]]

# Three or more runs per change: long sequences would take most of the time and show no more.
_METAMORPHIC_LENGTH = 1024


def validate(
    path: str | Path,
    *,
    data: Path | None = None,
    lengths: Sequence[int] | None = None,
    paddings: Sequence[str] = PADDINGS,
    rows: int | None = None,
    seed: int = 0,
    budget: Budget | None = None,
    site_tolerance: float = EXACT_LIMIT,
    provider: str = "cpu",
    threads: int | None = None,
    kernels: KernelMode = "auto",
    metamorphic: bool = True,
    sites: bool = True,
    progress: Progress | None = None,
) -> ValidationResult:
    """Compare an artifact with its reference.

    Args:
        path: artifact directory.
        data: ``.npz`` with one array per input, ``.jsonl`` with ``{"text": ...}`` lines, or any
            other text file; ``None`` = made-up inputs.
        lengths: sequence lengths; by default a few up to the longest the model accepts.
        paddings: of ``PADDINGS``.
        rows: rows per length and padding.
        seed: of everything random.
        budget: limits; without one, exact artifacts must agree to ``EXACT_LIMIT`` and others are
            measured only.
        site_tolerance: relative L2 error above which an attention counts as diverging.
        provider, threads: for the model. The reference always runs on the CPU.
        kernels: as ``load``.
        metamorphic: whether to test that hidden tokens do not matter.
        sites: whether to compare every attention.
        progress: called with a message and the share done.

    Raises:
        UsageError: bad arguments or data.
        IntegrityError, TargetUnavailableError: as ``load``.
        UnsupportedModelError: nothing could be compared.
    """
    _check_arguments(lengths, paddings, rows)
    started = time.monotonic()
    folder, manifest = open_manifest(path)
    check_files(folder, manifest)
    if REFERENCE_NAME not in manifest.files:
        raise IntegrityError(f"{folder} has no {REFERENCE_NAME} to compare with. Convert again.")
    _check_budget(budget, manifest)
    samples = open_samples(manifest, folder, data=data, seed=seed, rows=rows)
    run = _Validation(
        folder=folder,
        manifest=manifest,
        samples=samples,
        provider=provider,
        threads=threads,
        kernels=kernels,
        seed=seed,
        report=progress or (lambda message, share: None),
    )
    run.plan(lengths or samples.default_lengths(), paddings)
    execution = run.compare_outputs(metamorphic)
    if not run.results:
        why = "; ".join(f"length {item['length']}: {item['reason']}" for item in run.skipped)
        if run.failures:
            raise BudgetError(f"{folder}: {run.failures[0]}")
        raise UnsupportedModelError(f"{folder}: no length could be compared. {why}")
    site_results = run.compare_sites() if sites else ()
    exact = all(record.method == "dense" for record in manifest.sites)
    measured = run.measured()
    if budget is not None and "recall" in budget.limits:
        measured["recall"] = run.recall()
    diverging = [s for s in site_results if (s.relative_l2 or 0.0) > site_tolerance]
    reasons = [*run.failures, *leak_sentences(run.metamorphic.violations)]
    reasons += unexpected_divergence(site_results, diverging)
    if budget is not None:
        reasons += budget.violations(measured)
    elif exact:
        reasons += exact_violations(measured)
    verdict: Verdict = "pass" if exact or budget is not None else "measured"
    if not exact and budget is None:
        run.notes.append("approximate attention and no budget: measured only; see --budget")
    return ValidationResult(
        artifact=str(path),
        verdict="fail" if reasons else verdict,
        reasons=tuple(dict.fromkeys(reasons)),
        exact=exact,
        synthetic=samples.kind == "synthetic",
        data=samples.description,
        budget=dict(budget.limits) if budget else {},
        measured=measured,
        cases=tuple(run.results),
        sites=site_results,
        site_tolerance=site_tolerance,
        first_diverging=diverging[0] if diverging else None,
        metamorphic=run.metamorphic if metamorphic else None,
        skipped=tuple(run.skipped),
        notes=tuple(run.notes),
        execution=execution,
        seed=seed,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _check_arguments(
    lengths: Sequence[int] | None, paddings: Sequence[str], rows: int | None
) -> None:
    for length in lengths or ():
        if length < 1:
            raise UsageError(f"Lengths must be at least 1, got {length}.")
    for padding in paddings:
        if padding not in PADDINGS:
            raise UsageError(f"Unknown padding {padding!r}; use {', '.join(PADDINGS)}.")
    if not paddings:
        raise UsageError(f"No paddings given; use {', '.join(PADDINGS)}.")
    if rows is not None and rows < 1:
        raise UsageError(f"Rows must be at least 1, got {rows}.")


def _check_budget(budget: Budget | None, manifest: Manifest) -> None:
    """Refuse limits on what this model cannot have before anything runs."""
    limits = budget.limits if budget else {}
    logits = any(spec.is_logits for spec in manifest.outputs)
    for name in ("kl", "top1", "ppl"):
        if name in limits and not logits:
            raise UsageError(f"Budget {name}: the model has no logits; use cosine or rel.")
    if "recall" in limits:
        refuse_recall(manifest)
    if "ppl" in limits and not is_causal_model(manifest):
        raise UsageError("Budget ppl: the model is no causal language model; use kl or top1.")


@dataclass
class _Validation:
    """State of one validation; the methods are its phases, in order."""

    folder: Path
    manifest: Manifest
    samples: Samples
    provider: str
    threads: int | None
    kernels: KernelMode
    seed: int
    report: Progress

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.manifest)
        self.causal = is_causal_model(self.manifest)
        self.reference_inputs = self.manifest.reference_inputs or self.manifest.inputs
        self.results: list[CaseResult] = []
        self.skipped: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._failed: set[str] = set()
        self.notes: list[str] = []
        self.metamorphic = MetamorphicResult()
        self._cases: list[Case] = []
        self._logits: dict[int, LogitsDifference] = {}
        self._leak: tuple[Batch, Change] | None = None

    def plan(self, lengths: Sequence[int], paddings: Sequence[str]) -> None:
        """Decide what runs."""
        limit = self.manifest.max_length
        for case in self.samples.cases(lengths, paddings):
            if isinstance(case, tuple):
                self._skip(*case)
            elif limit is not None and case.length > limit and case.padding != "given":
                self._skip(case.length, f"the model accepts at most {limit} tokens")
            else:
                self._cases.append(case)

    def compare_outputs(self, metamorphic: bool) -> dict[str, Any]:
        """Compare outputs case by case; test the relations on the first batch of each."""
        artifact = load(
            self.folder,
            provider=self.provider,
            threads=self.threads,
            verify=False,
            config=QUIET_THREADS,
            kernels=self.kernels,
            # Two models are open at once, and each would keep the memory of its longest run.
            arena=False,
        )
        reference = open_session(
            self.folder / REFERENCE_NAME,
            folder=self.folder,
            threads=self.threads,
            config=QUIET_THREADS,
            arena=False,
        )
        # States that the model keeps instead of all keys are its own.
        known = {item.name for item in reference.get_outputs()}
        names = [spec.name for spec in self.manifest.outputs if spec.name in known]

        def run_model(feeds: Values) -> Values:
            return artifact.run(feeds, names)

        def run_reference(feeds: Values) -> Values:
            own = with_past(self.reference_inputs, feeds)
            return dict(zip(names, run_session(reference, own, names), strict=True))

        unusable: set[int] = set()
        usable = []
        for number, case in enumerate(self._cases):
            share = number / len(self._cases)
            self.report(f"outputs: length {case.length}, padding {case.padding}", share)
            if case.length in unusable:
                continue
            differences = {name: Difference() for name in names}
            logits = LogitsDifference()
            failed = False
            for index, batch in enumerate(self.samples.batches(case)):
                try:
                    want = run_reference(batch.feeds)
                except SubquadError as error:
                    self._skip(case.length, f"the reference cannot run it: {error}")
                    unusable.add(case.length)
                    failed = True
                    break
                try:
                    got = run_model(batch.feeds)
                except SubquadError as error:
                    self.failures.append(
                        f"the reference runs length {case.length} (padding {case.padding}), the "
                        f"model does not: {error}"
                    )
                    failed = True
                    break
                self._compare(batch, want, got, differences, logits)
                if metamorphic and index == 0 and case.length <= _METAMORPHIC_LENGTH:
                    self._relations(batch, want, got, run_reference, run_model)
                    self._pieces(artifact, batch, got)
            if failed:
                continue
            usable.append(case)
            self._record(case, differences, logits)
        self._cases = usable
        if metamorphic:
            self._explain_untested()
        return dataclasses.asdict(artifact.execution)

    def compare_sites(self) -> tuple[SiteResult, ...]:
        """Compare the value of every attention; find where a leak starts."""
        comparison = SiteComparison(
            self.folder,
            self.manifest,
            self.samples,
            self.layout,
            provider=self.provider,
            threads=self.threads,
            kernels=self.kernels,
            report=self.report,
        )
        results = comparison.run(self._cases, self._leak)
        self.notes += comparison.notes
        if comparison.leaking_site is not None:
            found = self.metamorphic.violations
            first = next(i for i, item in enumerate(found) if item.relation != "pieces")
            found[first] = dataclasses.replace(found[first], site=comparison.leaking_site)
        return results

    def recall(self) -> float:
        """What is kept of the reference's recall, at the worst length."""
        self.report("recall", None)
        found, notes = artifact_recall(
            self.folder,
            self.manifest,
            self.samples,
            self._cases,
            provider=self.provider,
            threads=self.threads,
            kernels=self.kernels,
            seed=self.seed,
        )
        self.notes += notes
        return found.kept

    def measured(self) -> dict[str, float | None]:
        """Figures of ``budget.METRICS`` but recall; ``None`` where the model has no such thing."""
        outputs = [output for case in self.results for output in case.outputs.values()]
        compared = [output for output in outputs if output["vectors"]]
        logits = [item for item in self._logits.values() if item.positions]
        # One length has too few tokens for a perplexity, but not all of them together.
        ratios = [item.perplexity_ratio for item in logits]
        return {
            "rel": _worst(max, [output["relative_l2"] for output in compared]),
            "cosine": _worst(min, [output["cosine_mean"] for output in compared]),
            "kl": _worst(max, [item.kl_mean for item in logits]),
            "top1": _worst(min, [item.top1 for item in logits]),
            "ppl": _worst(max, [ratio - 1.0 for ratio in ratios if ratio is not None]),
        }

    def _fail_once(self, kind: str, sentence: str) -> None:
        """Record the first failure of each kind; the cases have the others."""
        if kind not in self._failed:
            self._failed.add(kind)
            self.failures.append(sentence)

    def _skip(self, length: int, reason: str) -> None:
        item = {"length": length, "reason": reason}
        if item not in self.skipped:
            self.skipped.append(item)

    def _compare(
        self,
        batch: Batch,
        want: Values,
        got: Values,
        differences: Mapping[str, Difference],
        logits: LogitsDifference,
    ) -> None:
        real = real_tokens(self.layout, batch.feeds)
        for spec in self.manifest.outputs:
            if spec.name not in want:
                continue
            reference, model = want[spec.name], got[spec.name]
            if reference.shape != model.shape:
                raise IntegrityError(
                    f"Output {spec.name!r} has shape {list(model.shape)}, but the reference "
                    f"gives {list(reference.shape)}. Convert again."
                )
            found = length_axis(spec.shape, reference, real)
            if found is None:
                pair = [as_vectors(reference), as_vectors(model)]
                labels = np.full(len(pair[0]), -1, np.int64)
            else:
                axis, mask = found
                pair = [select(values, axis, mask) for values in (reference, model)]
                labels = self._labels(batch, mask) if axis == 1 else np.full(len(pair[0]), -1)
            differences[spec.name].add(pair[0], pair[1])
            if spec.is_logits:
                logits.add(pair[0], pair[1], labels)

    def _labels(self, batch: Batch, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The token after each real token, where that is real as well; else -1."""
        labels = np.full(mask.shape, -1, np.int64)
        if self.causal:
            for spec in self.manifest.inputs:
                ids = batch.feeds[spec.name]
                if spec.role == "token_ids" and ids.shape == mask.shape:
                    labels[:, :-1] = np.where(mask[:, 1:], ids[:, 1:], -1)
                    break
        return np.asarray(labels[mask])

    def _record(
        self, case: Case, differences: Mapping[str, Difference], logits: LogitsDifference
    ) -> None:
        for name, difference in differences.items():
            where = f"output {name}, length {case.length}, padding {case.padding}"
            if difference.non_finite:
                self._fail_once(
                    f"{name} is not finite",
                    f"{where}: {difference.non_finite} values are NaN or infinite, but finite in "
                    "the reference",
                )
            if difference.vectors and difference.squared_reference == 0.0:
                self._fail_once(
                    f"{name} is zero",
                    f"{where}: the reference gives zeros only, so nothing was compared; the "
                    "source's weights may have been lost",
                )
            if difference.reference_non_finite:
                self.notes.append(f"{where}: the reference itself has NaN or infinite values")
        self.results.append(
            CaseResult(
                length=case.length,
                padding=case.padding,
                rows=case.rows,
                outputs={name: item.to_json() for name, item in differences.items()},
                logits=logits.to_json() if logits.positions else None,
            )
        )
        self._logits.setdefault(case.length, LogitsDifference()).merge(logits)

    def _relations(
        self,
        batch: Batch,
        want: Values,
        got: Values,
        run_reference: Callable[[Values], Values],
        run_model: Callable[[Values], Values],
    ) -> None:
        result = self.metamorphic
        for change in changes(
            self.manifest, self.layout, batch, causal=self.causal, seed=self.seed
        ):
            result.checks[change.relation] = result.checks.get(change.relation, 0) + 1
            after = run_model(change.feeds)
            if change.relation != "padding":
                same = all(np.array_equal(got[name], after[name]) for name in got)
                result.visible_reactions += not same
            moved = output_changes(self.manifest, change, got, after)
            if not moved:
                continue
            expected = output_changes(self.manifest, change, want, run_reference(change.feeds))
            leaks = {
                name: amount
                for name, amount in moved.items()
                if is_leak(amount, expected.get(name, 0.0))
            }
            if not leaks:
                count = result.source_reacts.get(change.relation, 0)
                result.source_reacts[change.relation] = count + 1
                continue
            if self._leak is None:
                self._leak = (batch, change)
            output, amount = next(iter(leaks.items()))
            result.violations.append(
                Violation(change.relation, batch.length, batch.padding, change.cut, output, amount)
            )

    def _pieces(self, artifact: Artifact, batch: Batch, got: Values) -> None:
        """A model with a cache: pieces make the whole."""
        if decoding_reason(self.manifest, self._encoded()):
            return
        found = piecewise_change(artifact, batch, got)
        if found is None:
            return
        result = self.metamorphic
        result.checks["pieces"] = result.checks.get("pieces", 0) + 1
        output, change = found
        if not change <= EXACT_LIMIT:
            result.violations.append(
                Violation("pieces", batch.length, batch.padding, None, output, change)
            )

    def _encoded(self) -> list[str]:
        """Inputs of a decoder that an encoder makes."""
        return [spec.name for spec in self.manifest.inputs if reads_encoder(spec.name)]

    def _explain_untested(self) -> None:
        checks = self.metamorphic.checks
        if checks.get("future", 0) + checks.get("batch", 0) and (
            self.metamorphic.visible_reactions == 0
        ):
            self.failures.append(
                "other tokens change no output at all: nothing was tested; the source's weights "
                "may have been lost"
            )
        missing = {
            "padding": "no case has padding (no padding mask input, or no padded inputs)",
            "future": "not every self-attention is causal"
            if not self.causal
            else f"no case is longer than {_tokens(causal_granularity(self.manifest))}",
            "batch": "no case has more than one row",
        }
        if carried(self.manifest):
            reason = decoding_reason(self.manifest, self._encoded())
            missing["pieces"] = reason or "no case has two tokens"
        for relation, reason in missing.items():
            if relation not in self.metamorphic.checks:
                self.metamorphic.not_applicable[relation] = reason


def _worst(choose: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    if any(math.isnan(value) for value in values):
        return math.nan
    return choose(values) if values else None


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
