"""The search: on made-up times, so that what it finds is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.host.targets import X86_64_V3, X86_64_V4
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.hybrid_decode.semantics import HybridDecodeVariant, HybridStateVariant
from subquad.kernels.kernel import CPU_TEMPLATES, CpuTarget
from subquad.kernels.templates.parameters import HybridParameters, TileParameters
from subquad.kernels.templates.space import Params, Space
from subquad.kernels.tuning import search as search_module
from subquad.kernels.tuning.choose import tuning_space
from subquad.kernels.tuning.search import Found, Trial, Values, search, values_of
from subquad.runtime.errors import Rejection

GRID = (1, 2, 4, 8, 16, 32)
SPACE = Space(
    {"a": GRID, "b": GRID, "c": GRID},
    {"a": 1, "b": 1, "c": 1},
    lambda params: params["a"] * params["b"] <= 128,
)
BEST = {"a": 8, "b": 4, "c": 16}


def bowl(params: Params) -> float:
    """Seconds: least at ``BEST``."""
    steps = (abs(GRID.index(params[name]) - GRID.index(BEST[name])) for name in BEST)
    return 1.0 + 0.1 * sum(steps)


@dataclass
class FakeBench:
    """Times from a function, with noise that a whole round shares and noise that it does not.

    Attributes:
        seconds: of a call with these parameters.
        drift: standard deviation of the logarithm of what slows a whole round.
        noise: the same of what slows one timing.
        broken: parameters -> what comes out instead of times.
        uncompiled: parameters that are refused.
        cost: how long a measurement takes.
        compiling: how long it takes to compile whatever is compiled at once.
    """

    seconds: Callable[[Params], float] = bowl
    drift: float = 0.0
    noise: float = 0.0
    broken: Mapping[Values, Trial] = field(default_factory=dict)
    uncompiled: tuple[Values, ...] = ()
    cost: float = 0.0
    compiling: float = 0.0
    lanes: int = 1
    compilers: int = 1
    clock: float = 0.0
    measured: list[Values] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(0)

    def prepare(self, candidates: Sequence[Params], seconds: float) -> list[str]:
        assert seconds > 0
        self.clock += self.compiling
        return ["refused" if values_of(c) in self.uncompiled else "" for c in candidates]

    def measure(
        self, candidate: Params, best: Params, default: Params, rounds: int, seconds: float
    ) -> Trial:
        assert seconds > 0
        self.clock += self.cost
        self.measured.append(values_of(candidate))
        if values_of(candidate) in self.broken:
            return self.broken[values_of(candidate)]
        times: dict[str, list[float]] = {"default": [], "best": [], "candidate": []}
        for _ in range(rounds):
            slow = self.rng.lognormvariate(0, self.drift)
            for name, params in zip(times, (default, best, candidate), strict=True):
                own = self.rng.lognormvariate(0, self.noise)
                times[name].append(self.seconds(params) * slow * own)
        return Trial("ok", times=times)


def run(bench: FakeBench, trials: int = 60, seconds: float = 1e6, **options: object) -> Found:
    return search(SPACE, bench, trials=trials, seconds=seconds, seed="s", **options)  # type: ignore[arg-type]


def test_finds_the_best_of_a_bowl() -> None:
    """60 of 162 candidates; random picks alone would meet it with probability 0.37."""
    found = run(FakeBench())
    assert dict(found.params) == BEST
    assert found.ratios == pytest.approx((1 / bowl(SPACE.defaults),) * 3)
    assert sum(found.trials.values()) == 60


def test_known_good_parameters_come_first() -> None:
    bench = FakeBench()
    space = replace(SPACE, starts=({"a": 2, "b": 2, "c": 2}, {"a": 32, "b": 32, "c": 1}, BEST))
    search(space, bench, trials=2, seconds=1e6, seed="s")
    # The default is checked before and the best confirmed after; the second does not fit.
    assert [dict(item) for item in bench.measured[1:3]] == [{"a": 2, "b": 2, "c": 2}, BEST]


@pytest.mark.parametrize(
    ("seconds", "compiling", "compilers", "size"),
    [
        (1000.0, 0.0, 1, 8),
        (1000.0, 1.0, 1, 8),
        (100.0, 6.0, 1, 5),
        (100.0, 10.0, 2, 6),
        (20.0, 30.0, 1, 1),
        (20.0, 30.0, 2, 2),
    ],
)
def test_slow_compilers_get_few_candidates_at_once(
    seconds: float, compiling: float, compilers: int, size: int
) -> None:
    """What is compiled must be measured in the time that is left."""
    assert search_module.generation(seconds, compiling, compilers) == size


def test_nothing_is_compiled_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults take 35 s and two candidates 40; 10 s before the confirmation are too few for
    two more, and are left to the next shape."""
    bench = FakeBench(cost=5.0, compiling=30.0, compilers=2)
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: bench.clock))
    found = run(bench, trials=10_000, seconds=100.0)
    assert found.trials == {"ok": 2, "failed": 0, "wrong": 0}
    assert bench.clock == 75.0 + 5.0 * (found.params != values_of(SPACE.defaults))


def test_same_seed_same_search() -> None:
    first, second = FakeBench(), FakeBench()
    assert run(first) == run(second)
    assert first.measured == second.measured
    other = FakeBench()
    search(SPACE, other, trials=60, seconds=1e6, seed="t")
    assert other.measured != first.measured


def test_nothing_is_tried_twice_or_outside_the_space() -> None:
    bench = FakeBench()
    found = run(bench, trials=10_000)
    tried = bench.measured[1:-1]
    assert len(set(tried)) == len(tried) == sum(found.trials.values())
    assert {values_of(params) for params in SPACE} >= set(tried)


def test_a_slow_machine_crowns_nobody() -> None:
    """All candidates take the same time; rounds differ by a factor of e in both directions."""
    found = run(FakeBench(seconds=lambda params: 1.0, drift=1.0))
    assert found.params == values_of(SPACE.defaults)
    assert found.reason == ""


def test_a_lucky_candidate_is_found_out() -> None:
    """With 200 % noise some of 60 equal candidates look better; the last comparison decides."""
    bench = FakeBench(seconds=lambda params: 1.0, noise=0.7)
    found = run(bench)
    assert found.params == values_of(SPACE.defaults)
    assert len(set(bench.measured)) < len(bench.measured), "a winner was measured again"


def test_what_fails_costs_one_candidate() -> None:
    by_kind = {"failed": values_of({**BEST, "a": 4}), "wrong": values_of({**BEST, "b": 2})}
    broken = {
        by_kind["failed"]: Trial("failed", "killed by signal 6"),
        by_kind["wrong"]: Trial("wrong", "output: 0.3"),
    }
    refused = values_of({**BEST, "c": 8})
    bench = FakeBench(broken=broken, uncompiled=(refused,))
    seen: dict[Values, Trial] = {}
    found = run(
        bench,
        trials=10_000,
        report=lambda params, trial, confirmed: seen.update({params: trial}),
    )
    assert dict(found.params) == BEST
    assert (found.trials["failed"], found.trials["wrong"]) == (2, 1)
    assert seen[refused] == Trial("failed", "refused")
    assert seen[by_kind["wrong"]].reason == "output: 0.3"


def test_broken_defaults_are_a_reason() -> None:
    default = values_of(SPACE.defaults)
    found = run(FakeBench(uncompiled=(default,)))
    assert found.reason == "the defaults were not compiled: refused"
    found = run(FakeBench(broken={default: Trial("wrong", "output: nan")}))
    assert found.reason == "the defaults are wrong: output: nan"
    assert found.params == default


def test_no_valid_candidate_leaves_the_defaults() -> None:
    """The row "untuned" of the public failures: default schedule, and it says so."""
    everything = tuple(values_of(p) for p in SPACE if values_of(p) != values_of(SPACE.defaults))
    found = run(FakeBench(uncompiled=everything), trials=20)
    assert found.params == values_of(SPACE.defaults)
    assert found.reason == "no candidate could be measured"
    assert found.trials["failed"] == 20


def test_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes 10 s of made-up time; 15 of 100 s are kept for the last comparison."""
    bench = FakeBench(cost=10.0)
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: bench.clock))
    found = run(bench, trials=10_000, seconds=100.0)
    assert bench.clock <= 100.0
    assert len(bench.measured) == 10
    assert found.reason == ""
    late = FakeBench(cost=200.0)
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: late.clock))
    assert run(late, seconds=100.0).reason == "no candidate could be measured"


def test_known_outcomes_are_not_measured_again() -> None:
    first = FakeBench()
    outcomes: dict[Values, float | None] = {}
    run(
        first,
        trials=40,
        report=lambda params, trial, confirmed: outcomes.update(
            {params: trial.ratios("default")[1]}
        ),
    )
    second = FakeBench()
    start = values_of({"a": 4, "b": 4, "c": 8})
    run(second, trials=40, known={**outcomes, start: None}, start=[dict(start)])
    fresh = second.measured[1:-1]
    assert fresh[0] == start
    assert not set(fresh[1:]) & set(outcomes)


def test_several_lanes_find_the_same_bowl() -> None:
    found = run(FakeBench(lanes=3), trials=120)
    assert dict(found.params) == BEST


DENSE = AttentionVariant(4, 2, 64, 64, 0.125, window_right=0)
LINEAR = HybridVariant(4, 4, 64, 64, 0.125, allowed_right=0, feature_map="elu")
WINDOW = HybridVariant(4, 4, 64, 64, 0.125, 63, 0, 4, allowed_right=0)
BOTH = HybridVariant(4, 4, 64, 64, 0.125, 63, 0, allowed_right=0, feature_map="elu")
SPARSE = BlockSparseVariant(4, 4, 64, 64, 0.125, block=64, window_right=0)
SELECT = BlockSelectVariant(4, 2, 64, 0.125, block=64, window_right=0)
STEP = HybridDecodeVariant(4, 4, 64, 64, 0.125, window_left=63, sinks=4, feature_map="elu")
STATE = HybridStateVariant(4, 4, 64, 64, 0.125, window_left=63, sinks=4, feature_map="elu")
EVERY = (DENSE, LINEAR, WINDOW, BOTH, SPARSE, SELECT, STEP, STATE)


def own_space(variant: object, target: CpuTarget = X86_64_V3) -> Space:
    space = tuning_space(variant, target, CPU_TEMPLATES)  # type: ignore[arg-type]
    assert not isinstance(space, Rejection), space
    return space


def test_every_template_has_a_space() -> None:
    assert {variant.op_type for variant in EVERY} == set(CPU_TEMPLATES)


@pytest.mark.parametrize("variant", EVERY, ids=lambda v: v.op_type)
@pytest.mark.parametrize("target", [X86_64_V3, X86_64_V4])
def test_spaces_of_templates(variant: object, target: CpuTarget) -> None:
    space = own_space(variant, target)
    rng = random.Random(0)
    assert space.fits(space.defaults)
    for _ in range(50):
        params = space.sample(rng)
        assert params is not None
        HybridParameters().override(params)
        changed = space.mutate(params, rng)
        assert changed is not None and space.fits(changed)
        assert 1 <= sum(changed[name] != params[name] for name in params) <= 2


@pytest.mark.parametrize("variant", EVERY, ids=lambda v: v.op_type)
def test_untuned_kernels_fill_the_registers(variant: object) -> None:
    assert own_space(variant, X86_64_V3).defaults["lanes"] == 8
    assert own_space(variant, X86_64_V4).defaults["lanes"] == 16


def test_a_space_holds_what_matters() -> None:
    assert set(own_space(DENSE).choices) == set(TileParameters.CHOICES)
    assert set(own_space(WINDOW).choices) == set(TileParameters.CHOICES)
    assert "keys" not in own_space(LINEAR).choices
    assert "chunk" in own_space(LINEAR).choices
    assert {"keys", "chunk"} <= set(own_space(BOTH).choices)


def test_large_tiles_are_tried_where_they_fit() -> None:
    def tiles(target: CpuTarget) -> list[tuple[int, int]]:
        space = own_space(DENSE, target)
        return [(p["rows"], p["vectors"]) for p in space.starts if space.fits(p)]

    assert tiles(X86_64_V4)[:3] == [(8, 3), (6, 4), (12, 1)]
    assert tiles(X86_64_V3)[:2] == [(12, 1), (4, 3)]


def test_register_tiles_fit_the_registers() -> None:
    space = own_space(DENSE)
    tile = {**space.defaults, "rows": 6, "vectors": 2, "lanes": 8}
    assert space.accepts(tile)
    assert not space.accepts({**tile, "rows": 8})
    assert not space.accepts({**tile, "lanes": 16})
    assert own_space(DENSE, X86_64_V4).accepts({**tile, "rows": 8, "lanes": 16})
    assert not space.accepts({**tile, "lanes": 5})
