"""Own parameters for every head."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from exact_folder import VOCABULARY, ExactFolder
from sites import make_site
from subquad.passes.calibrate.candidates import SiteMeasurement
from subquad.passes.calibrate.engine import Engine
from subquad.passes.calibrate.measure import Question, measure_sites, mix_levels
from subquad.passes.methods import block_sparse, method_text, parse_method
from subquad.passes.methods.base import Wanted
from subquad.passes.prices import counted_flops
from subquad.runtime.errors import UsageError
from subquad.runtime.samples import Batch


@pytest.mark.parametrize("seed", range(10))
def test_levels_keep_the_limit_at_little_work(seed: int) -> None:
    rng = np.random.default_rng(seed)
    errors = np.sort(rng.uniform(0, 1, (3, 4)), axis=0)[::-1]
    work = np.sort(rng.uniform(1, 10, (3, 4)), axis=0)
    heads = np.arange(4)
    limit = float(rng.uniform(errors[-1].sum(), errors[0].sum()))
    levels = mix_levels(errors, work, limit)
    assert errors[levels, heads].sum() <= limit
    best = min(
        work[list(choice), heads].sum()
        for choice in itertools.product(range(3), repeat=4)
        if errors[list(choice), heads].sum() <= limit
    )
    # Greedy: off by less than the dearest single step.
    assert work[levels, heads].sum() <= best + (work[-1] - work[0]).max()


def test_the_most_exact_where_no_mix_keeps_the_limit() -> None:
    errors = np.array([[4.0, 2.0], [3.0, 1.0]])
    assert mix_levels(errors, np.array([[1.0, 1.0], [2.0, 2.0]]), 0.5) == [1, 1]


def test_a_threshold_per_head_is_written_and_read() -> None:
    method, params = parse_method("block_sparse:tau=0.9/0.8/0.95/0.9,block=8")
    text = method_text(method, params)
    assert text == "block_sparse:tau=0.9/0.8/0.95/0.9,block=8,selector=pooled,sinks=1"
    assert parse_method(text)[1] == params
    site = make_site("grouped", heads=(4, 2), right=0)
    assert method.supports(site, params) is None
    thresholds = method.tensors(site, params)["thresholds"]
    assert thresholds.tolist() == np.array([0.9, 0.8, 0.95, 0.9], np.float32).tolist()
    refused = method.supports(make_site("two", right=0), params)
    assert refused is not None and "4 values for 2 query heads" in refused.reason


@pytest.mark.parametrize("text", ["0.9/", "0.9/x", "0.9/1.5", "/", "0.9//0.8"])
def test_malformed_thresholds(text: str) -> None:
    with pytest.raises(UsageError, match="tau"):
        parse_method(f"block_sparse:tau={text}")


def test_only_thresholds_mix() -> None:
    method = block_sparse.METHOD
    statistics = None
    ladder = method.candidates(make_site("a", right=0), statistics, Wanted((4096,)))  # type: ignore[arg-type]
    assert isinstance(ladder, list)
    mixed = method.mixed([ladder[0], ladder[2]])
    assert mixed is not None and mixed.tau == (ladder[0].tau, ladder[2].tau)
    other = dataclasses.replace(ladder[1], block=32)
    assert method.mixed([ladder[0], other]) is None


def test_mixes_are_measured_like_any_candidate(exact: ExactFolder) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (1, 640))
    batch = Batch(640, "none", {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    engine = Engine(exact.split(), exact.path, threads=1)
    question = Question(exact.manifest, (640,), 1, counted_flops(), methods=("block_sparse",))
    found: dict[int, SiteMeasurement] = {}
    measure_sites(
        engine, question, [batch], [batch], known={}, done=lambda r, s: found.update({r: s})
    )
    mixes = [c for s in found.values() for c in s.candidates if "/" in c.text]
    assert mixes, "heads differ, so some mix is there"
    for site in found.values():
        uniform = [c for c in site.candidates if "/" not in c.text]
        for mix in (c for c in site.candidates if "/" in c.text):
            below = [c.error for c in uniform if c.price <= mix.price]
            assert not below or mix.error <= max(below)
            assert 0 < mix.densities[640] <= 1
