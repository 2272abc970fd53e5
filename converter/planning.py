"""From a source and a budget to a plan, and on to the artifact.

| stage | in -> out | kept in the work folder |
|---|---|---|
| base | source -> exact artifact | ``base-*/`` |
| data | files -> calibration and held-out inputs | |
| recall | if it is limited: held-out texts -> what the exact model finds in them | ``recall/`` |
| measure | each attention -> errors and prices of its candidates | ``sites-*/`` |
| search | plans -> what each does to held-out outputs | ``runs/`` |
| branches | hybrids of the plan -> what each of their branches does | ``branches/`` |
| convert | plan -> artifact, measured once more as it ships | |
| probes | artifact in its place -> what perplexity does not show, for the report | |

Killed anywhere and started again with the same arguments, it goes on where it was and ends with
the same plan.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from subquad.converter.atomic import atomic_directory
from subquad.converter.base_artifact import base_artifact, content_hash, reopen
from subquad.converter.branching import branch_runner
from subquad.converter.budget_texts import Runner, metric_code, metric_value, parse_budget
from subquad.converter.conversion_report import ConversionReport, StageClock
from subquad.converter.cpu_kernels import KernelKind, chosen_kernels
from subquad.converter.distilling import distillation
from subquad.converter.pipeline import Repair, read_source, write_artifact
from subquad.converter.plan_request import PlanningReport, PlanRequest
from subquad.converter.planned_cache import (
    refuse_cached,
    replace_weights,
    require_all_planned,
    whole_sequences,
)
from subquad.converter.recall_limit import RecallJudge, recall_samples, recall_test
from subquad.converter.refitting import Refitted, refit_plan
from subquad.converter.reports import write_reports
from subquad.converter.work_folder import WorkFolder, key_of, require_apart
from subquad.kernels.tuning.choose import DEFAULT_TUNING, TuningOptions
from subquad.passes.calibrate.branches import Branches, ablate, linear_off, widest_window
from subquad.passes.calibrate.candidates import SiteMeasurement
from subquad.passes.calibrate.data import CalibrationData, open_data
from subquad.passes.calibrate.engine import Engine, Finish
from subquad.passes.calibrate.measure import Question, RecallSample, assignment_of, measure_sites
from subquad.passes.calibrate.score import Score, Scorer
from subquad.passes.calibrate.segments import load_split
from subquad.passes.methods import get_method
from subquad.passes.plan import DENSE, Assignment
from subquad.passes.plan_report import plan_file
from subquad.passes.planner import Choice, PlanBudget, SearchResult, instead, search
from subquad.passes.prices import choose_prices
from subquad.passes.recognise.site import AttentionSite
from subquad.passes.repair.distil import DistilSettings
from subquad.runtime.artifact import Artifact, check_inputs, load
from subquad.runtime.errors import BudgetError, UsageError
from subquad.runtime.machine import peak_rss_bytes
from subquad.runtime.manifest import MODEL_NAME
from subquad.runtime.probes import (
    greedy,
    probe_reason,
    recall,
    recall_facts,
    spelling_tokenizer,
    token_ids,
)
from subquad.runtime.recall_budget import RecallTest
from subquad.runtime.samples import Batch
from subquad.runtime.session import QUIET_THREADS

if TYPE_CHECKING:
    from subquad.converter.conversion_report import Progress
    from subquad.converter.pipeline import Source

PROBE_LENGTH, PROBE_TOKENS = 1024, 2048
"""Inputs that are followed to the end of the model for every attention."""

GREEDY_PROMPT, GREEDY_TOKENS = 256, 32

RECALL_ROWS = 4
"""Held-out rows of every length in which facts are hidden."""


def plan_source(
    source: Source,
    request: PlanRequest,
    *,
    work: Path,
    require_sites: str | None = None,
    progress: Progress | None = None,
) -> PlanningReport:
    """Plan without converting.

    Args:
        source: as ``convert``.
        request: what to plan for.
        work: folder for results that a later run continues from; created.
        require_sites: as ``convert``.
        progress: called with a message and the share done.

    Raises:
        UsageError: bad arguments or data.
        UnsupportedModelError, ReplacementError: as ``convert``.
    """
    clock = StageClock(progress)
    folder = WorkFolder(work)
    with folder.alone():
        return _Planning(source, request, folder, require_sites, clock).run()


def convert_with_budget(
    source: Source,
    output: Path,
    request: PlanRequest,
    *,
    work: Path | None = None,
    overwrite: bool = False,
    require_sites: str | None = None,
    kernels: KernelKind | None = None,
    require_kernels: bool = False,
    distil: DistilSettings | None = None,
    tuning: TuningOptions = DEFAULT_TUNING,
    cache: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Plan and convert.

    Args:
        source, output, overwrite, require_sites, kernels, require_kernels, tuning: as
            ``convert``.
        request: what to plan for.
        distil: train the replaced attentions on the calibration inputs; not with ``cache``.
        cache: as ``convert``. The plan is made with whole sequences, for which a model with a cache
            is the same function, and carried out in the graph that has one.
        work: as ``plan_source``; by default ``OUTPUT.work``, removed when all is done.

    Raises:
        BudgetError: the artifact as it ships misses the budget.
        and what ``convert`` and ``plan_source`` raise.
    """
    kind = chosen_kernels(kernels)
    clock = StageClock(progress)
    if cache:
        refuse_cached(source, distil)
        request = replace(request, decodes=True)
    place = work or output.parent / f"{output.name}.work"
    require_apart(place, output)
    with ExitStack() as held:
        with atomic_directory(output, overwrite=overwrite) as folder:
            results = WorkFolder(place)
            held.enter_context(results.alone())
            planning = _Planning(source, request, results, require_sites, clock)
            planned = planning.run()
            if cache:
                traced, raised = read_source(source, clock, cache=True)
            else:
                traced, raised = reopen(planning.base, planning.manifest)
            assignments = planned.plan.assignments(
                raised.sites,
                source_hash=planning.manifest.source["hash"],
                strict_causal=request.strict_causal,
            )
            require_all_planned(planned.plan, assignments)
            refit = planning.refit() if request.refit else Refitted({}, {"asked_for": False})
            replace_weights(traced.model, refit.weights)
            report = write_artifact(
                folder,
                traced,
                raised,
                assignments,
                clock,
                shown_as=output,
                seed=request.seed,
                kernels=kind,
                require_kernels=require_kernels,
                tuning=tuning,
                facts={
                    "planning": planned.to_json(),
                    "refit": refit.facts,
                    "branches": planned.plan.branches,
                },
                repair=None if distil is None else planning.distillation(distil),
                finish=planning.verify,
            )
        # From here on, whatever fails, the artifact is there.
        write_reports(output, report)
        facts = {**report.facts, "probes": planning.probe(output)}
        report = replace(report, facts=facts, peak_rss_bytes=peak_rss_bytes())
        write_reports(output, report)
        if work is None:
            shutil.rmtree(place, ignore_errors=True)
    return report


class _Planning:
    """The stages, in order."""

    def __init__(
        self,
        source: Source,
        request: PlanRequest,
        work: WorkFolder,
        require_sites: str | None,
        clock: StageClock,
    ) -> None:
        self._source = source
        self._request = request
        self._work = work
        self._require_sites = require_sites
        self._clock = clock
        limits, self._metric, self._drop = parse_budget(request.budget)
        self._limits = limits
        self._prices = choose_prices(request.minimize, request.threads)

    def run(self) -> PlanningReport:
        request, clock = self._request, self._clock
        with clock.stage("base"):
            self.base, self.manifest = base_artifact(
                self._source,
                self._work,
                kernels=None if request.kernels or request.artifact_kernels else "none",
                require_sites=self._require_sites,
                progress=clock.progress,
            )
        with clock.stage("data"):
            self._data, probes = self._open_data()
        self._scorer = Scorer(self.manifest, self._data.heldout)
        few: tuple[str, ...] = ()
        if self._limits is not None:
            self._scorer.check(self._limits)
            few = self._scorer.notes(self._limits)
        self._sites = [AttentionSite.from_json(record.site) for record in self.manifest.sites]
        exact = get_method(DENSE)
        present = [exact.lower(site, exact.parameters()) for site in self._sites]
        # Now that it is known what a table has to know.
        self._prices = choose_prices(
            request.minimize,
            request.threads,
            present,
            kernels=request.kernels or request.artifact_kernels,
        )
        split = load_split(self.base, MODEL_NAME, self._sites)
        self._engine = Engine(split, self.base, threads=request.threads, kernels=request.kernels)
        self._budget = PlanBudget(self._limits)
        # Before anything that takes long: a limit that cannot be judged is refused.
        self._test = None if self._budget.recall is None else self._recall_test()
        with clock.stage("measure"):
            measured = self._measure(probes)
        with clock.stage("search"):
            self._budget = PlanBudget(self._limits, self._drop, self._custom_base())
            found = search(measured, self._budget, self._judge)
        with clock.stage("branches"):
            found, branches = self._without_idle_branches(measured, found)
            self._chosen = found.chosen
        return PlanningReport(
            plan=plan_file(
                self.manifest,
                measured,
                found,
                self._prices,
                {
                    "budget": list(request.budget),
                    "minimize": request.minimize,
                    "lengths": list(request.lengths),
                    "batch": request.batch,
                    "seed": request.seed,
                    "strict_causal": request.strict_causal,
                    "data": self._data.facts((*few, *(self._test.notes if self._test else ()))),
                },
                branches,
            ),
            statistics={site.name: site.statistics.to_json() for site in measured},
            data=self._data.description,
            synthetic=self._data.synthetic,
            seconds=dict(clock.seconds),
            peak_rss_bytes=peak_rss_bytes(),
        )

    def refit(self) -> Refitted:
        """Projections that bring the chosen plan nearer to the exact model, if there are any."""
        chosen = self._chosen
        if not chosen.choice:
            return Refitted({}, {"why": "nothing was replaced"})
        plan = self._plan(chosen.choice)

        def accept(score: Score, engine: Engine) -> tuple[Score, str | None]:
            if self._metric is not None:
                return score, "the user's metric judged the plan without it"
            score = self._recall.judge(score, self._engine_runner(plan, engine))
            missed = PlanBudget(self._limits).misses(score)
            return score, f"with it the budget is missed: {'; '.join(missed)}" if missed else None

        with self._clock.stage("refit"):
            self._teach()
            return refit_plan(self._engine, plan, self._data, self._scorer, chosen.score, accept)

    def verify(self, folder: Path) -> dict[str, Any]:
        """The artifact in ``folder``, as it ships, on the held-out inputs.

        Raises:
            BudgetError: it misses the budget.
        """
        self._teach()
        self._engine.close()
        whole = whole_sequences(self._open(folder))

        def run(finish: Callable[[int, Mapping[str, NDArray[Any]]], None]) -> None:
            for number, batch in enumerate(self._data.heldout):
                finish(number, whole(batch.feeds))

        score = self._scorer.score(run)
        if self._metric is not None:
            score = replace(score, custom=metric_value(self._metric, whole))
        score = self._recall.judge(score, whole)
        misses = self._budget.misses(score)
        if misses:
            raise BudgetError(
                f"The plan kept the budget, but the artifact misses it and was discarded: "
                f"{'; '.join(misses)}."
            )
        return {"verified": score.to_json()}

    def probe(self, folder: Path) -> dict[str, Any]:
        """Recall and greedy agreement of the artifact in ``folder``, or why there is none."""
        refused = probe_reason(self.manifest)
        if refused is not None:
            return {"not_applicable": refused.reason}
        with self._clock.stage("probes"):
            return self._probe(whole_sequences(self._open(folder)))

    def _open(self, folder: Path) -> Artifact:
        return load(
            folder, threads=self._request.threads, verify=False, config=QUIET_THREADS, arena=False
        )

    def _probe(self, model: Runner) -> dict[str, Any]:
        exact = self._engine_runner({})
        rows: dict[int, list[NDArray[Any]]] = {}
        for batch in self._data.heldout:
            rows.setdefault(batch.length, []).extend(token_ids(self.manifest, batch.feeds))
        points = recall(
            self.manifest,
            exact,
            model,
            [row for of_length in rows.values() for row in of_length[:RECALL_ROWS]],
            spelling_tokenizer(self.base),
            beyond=widest_window(self._plan(self._chosen.choice).values()),
            seed=self._request.seed,
        )
        row = token_ids(self.manifest, self._data.heldout[0].feeds)[0]
        prompt = row[: max(1, min(GREEDY_PROMPT, len(row)))]
        said = greedy(self.manifest, exact, model, prompt, GREEDY_TOKENS)
        return {**recall_facts(points), "greedy": said}

    def _engine_runner(
        self, plan: Mapping[int, Assignment], engine: Engine | None = None
    ) -> Runner:
        """The model with ``plan``, as a function of its inputs."""
        runs = engine or self._engine

        def run(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            found: dict[str, NDArray[Any]] = {}
            checked = check_inputs(self.manifest.inputs, inputs)
            runs.run([checked], plan, finish=lambda number, out: found.update(out))
            return found

        return run

    def distillation(self, settings: DistilSettings) -> Repair:
        """Training on the calibration inputs, judged by the held-out ones."""
        return distillation(
            self.base, self.manifest, self._data, settings, self._request.threads, self._clock
        )

    # --- stages ---

    def _open_data(self) -> tuple[CalibrationData, tuple[Batch, ...]]:
        request = self._request
        data = open_data(
            self.manifest,
            self.base,
            paths=request.data,
            lengths=request.lengths,
            seed=request.seed,
            calibration_tokens=request.calibration_tokens,
            heldout_tokens=request.heldout_tokens,
        )
        shortest = min(batch.length for batch in data.calibration)
        if data.calibration[0].padding == "given":
            return data, data.calibration[:1]
        probes = open_data(
            self.manifest,
            self.base,
            paths=request.data,
            lengths=[min(PROBE_LENGTH, max(shortest, 1))],
            seed=request.seed,
            calibration_tokens=min(PROBE_TOKENS, request.calibration_tokens),
            heldout_tokens=1,
        )
        return data, probes.calibration

    def _measure(self, probes: Sequence[Batch]) -> list[SiteMeasurement]:
        request = self._request
        question = Question(
            manifest=self.manifest,
            lengths=request.lengths,
            batch=request.batch,
            prices=self._prices,
            strict_causal=request.strict_causal,
            methods=request.methods,
            decodes=request.decodes,
        )
        key = key_of(
            {
                "model": content_hash(self.manifest),
                "data": self._data.digest,
                "probes": [probes[0].length, len(probes)],
                "lengths": request.lengths,
                "batch": request.batch,
                "prices": [self._prices.unit, self._prices.source],
                "strict_causal": request.strict_causal,
                "methods": request.methods,
                "decodes": request.decodes,
                "kernels": request.kernels,
                "recall": None if self._test is None else request.seed,
            }
        )
        names = [f"sites-{key}/{rank}.json" for rank in range(len(self._sites))]
        known = {
            rank: SiteMeasurement.from_json(raw, tensors)
            for rank, name in enumerate(names)
            if (raw := self._work.load(name)) is not None
            and (tensors := self._work.load_arrays(f"{name}.npz")) is not None
        }

        asking: list[RecallSample] = []
        if self._test is not None:
            asking = recall_samples(
                self.manifest, self.base, self._data.calibration, seed=request.seed
            )

        def done(rank: int, site: SiteMeasurement) -> None:
            # The arrays first: where the measurement is, they are.
            self._work.save_arrays(f"{names[rank]}.npz", site.tensors())
            self._work.save(names[rank], site.to_json())
            known[rank] = site
            self._show(f"measured {site.name}", len(known) / len(names))

        measure_sites(
            self._engine,
            question,
            self._data.calibration,
            probes,
            recall=asking,
            known=dict(known),
            done=done,
        )
        return [known[rank] for rank in range(len(names))]

    def _judge(self, choice: Choice) -> Score:
        """Run one plan on the held-out inputs, or remember its run."""
        # The budget decides when a run is stopped.
        budget = self._request.budget
        key = self._key_of_run(choice, budget=budget, metric=metric_code(budget))
        name = f"runs/{key}.json"
        known = self._work.load(name)
        if known is not None:
            return Score.from_json(known)
        plan = self._plan(choice)
        if choice:
            self._teach()
            # The user's metric is taken of whole runs only.
            enough = self._budget.is_hopeless if self._metric is None else None
            score = self._scorer.score(lambda finish: self._one_by_one(plan, finish), enough)
        else:
            score = self._scorer.exact()
        if self._metric is not None:
            score = replace(score, custom=metric_value(self._metric, self._engine_runner(plan)))
        if choice:
            score = self._recall.judge(score, self._engine_runner(plan))
        else:
            score = self._recall.exact(score)
        self._work.save(name, score.to_json())
        self._show(f"tried a plan of {len(choice)} replacements", None)
        return score

    def _one_by_one(self, plan: Mapping[int, Assignment], finish: Finish) -> None:
        """The held-out inputs in turns of their kinds, so that a run can be stopped."""
        for number, batch in enumerate(self._data.heldout):
            self._engine.run([batch.feeds], plan, finish=partial(_as_number, finish, number))

    def _plan(self, choice: Choice) -> dict[int, Assignment]:
        return {
            rank: assignment_of(self._sites[rank], candidate.text, candidate.fitted)
            for rank, candidate in choice.items()
        }

    def _key_of_run(self, choice: Choice, **more: Any) -> str:
        """Of everything that a run of the model with ``choice`` depends on."""
        return key_of(
            {
                "model": content_hash(self.manifest),
                "data": self._data.digest,
                "kernels": self._request.kernels,
                "plan": {
                    str(rank): (candidate.text, candidate.fitted and candidate.fitted.digest)
                    for rank, candidate in sorted(choice.items())
                },
                **more,
            }
        )

    def _without_idle_branches(
        self, measured: Sequence[SiteMeasurement], found: SearchResult
    ) -> tuple[SearchResult, dict[int, Branches]]:
        """Hybrids whose linear part does nothing become plain windows, if the budget allows it."""
        choice = dict(found.chosen.choice)
        branches = self._branches(choice)
        plan = self._plan(choice)
        for rank, seen in branches.items():
            plain = linear_off(plan[rank]).text
            twin = next((c for c in measured[rank].candidates if c.text == plain), None)
            if seen.linear_off.is_nothing and twin is not None:
                choice[rank] = twin
        if choice != found.chosen.choice:
            found = instead(found, measured, self._budget, self._judge, choice)
        return found, branches

    def _branches(self, choice: Choice) -> dict[int, Branches]:
        """What each branch of the chosen hybrids does, or what is remembered of it."""
        name = f"branches/{self._key_of_run(choice)}.json"
        known = self._work.load(name)
        if known is not None:
            return {int(rank): Branches.from_json(raw) for rank, raw in known.items()}
        run = branch_runner(self.manifest, self._engine, self._engine, self._data.heldout)
        found = ablate(self._plan(choice), run)
        self._work.save(name, {str(rank): seen.to_json() for rank, seen in found.items()})
        return found

    @property
    def _recall(self) -> RecallJudge:
        return RecallJudge(self._budget, self._test)

    def _recall_test(self) -> RecallTest:
        with self._clock.stage("recall"):
            return recall_test(
                self.manifest,
                self.base,
                self._data.heldout,
                self._engine_runner({}),
                self._work,
                seed=self._request.seed,
                known_by={
                    "model": content_hash(self.manifest),
                    "data": self._data.digest,
                    "kernels": self._request.kernels,
                },
            )

    def _custom_base(self) -> float | None:
        if self._metric is None:
            return None
        base = self._judge({}).custom
        if base is None or not np.isfinite(base):
            raise UsageError(
                f"The metric is {base} for the exact model, so no plan can be judged by it; it "
                "must be a finite number."
            )
        return base

    def _teach(self) -> None:
        """The exact outputs, once, and only if a plan must be run."""
        if not self._scorer.is_taught:
            feeds = [batch.feeds for batch in self._data.heldout]
            self._scorer.teach(lambda finish: self._engine.run(feeds, {}, finish=finish))

    def _show(self, message: str, share: float | None) -> None:
        if self._clock.progress is not None:
            self._clock.progress(message, share)


def _as_number(finish: Finish, number: int, _: int, outputs: Mapping[str, NDArray[Any]]) -> None:
    finish(number, outputs)
