"""Random compositions of spellings: recognised as what they mean; mutants never as what they were.

A failure prints its seed: ``check(seed)`` repeats it.
"""

from __future__ import annotations

import numpy as np
import pytest

from masked_attention import raised
from onnx_graphs import Runner
from random_attention import (
    Spelling,
    build,
    mutated,
    oracle,
    random_inputs,
    random_spelling,
)


def check(seed: int, spelling: Spelling) -> bool:
    """Whether it was recognised; where it was, meaning and numbers must be right."""
    model = build(spelling)
    copy, result = raised(model)
    if not result.sites:
        assert len(result.rejections) == 1 and result.rejections[0].reason, seed
        return False
    (site,) = result.sites
    assert site.mask.describe() == spelling.meaning, (seed, spelling)
    if spelling.scale_place not in ("query", "key", "both"):  # else in the operand itself
        assert site.scale == pytest.approx(spelling.scale, rel=1e-6), (seed, spelling)
    assert site.softcap == pytest.approx(spelling.cap, rel=1e-6), (seed, spelling)
    has_bias = spelling.bias != "none" and spelling.alibi == "none"
    assert bool(site.biases) == has_bias, (seed, spelling)
    assert site.alibi == spelling.alibi, (seed, spelling)
    assert site.has_sinks == bool(spelling.sinks), (seed, spelling)
    # A key that is scaled after its heads were repeated is read as it is.
    assert site.num_heads == spelling.heads and site.num_kv_heads in (
        spelling.kv_heads,
        spelling.heads,
    ), (seed, spelling)
    ours = Runner(copy)
    for length in (1, 23, 90):
        feeds = random_inputs(spelling, length, seed)
        want, rows = oracle(spelling, feeds)
        got = ours(feeds)[0]
        # float32 sums of at most 90 terms
        error = np.linalg.norm((got - want)[rows]) / np.linalg.norm(want[rows])
        assert error <= 1e-5, (seed, spelling, error)
    return True


def run(seeds: range) -> None:
    recognised = sum(check(seed, random_spelling(seed)) for seed in seeds)
    assert recognised >= 0.99 * len(seeds), f"{recognised} of {len(seeds)}"


def run_mutants(seeds: range) -> None:
    for seed in seeds:
        spelling = random_spelling(seed)
        mutant = mutated(spelling, seed)
        assert mutant != spelling
        check(seed, mutant)


@pytest.mark.parametrize("block", range(5))
def test_spellings_are_recognised(block: int) -> None:
    run(range(50 * block, 50 * (block + 1)))


@pytest.mark.parametrize("block", range(5))
def test_mutants_are_what_they_became(block: int) -> None:
    run_mutants(range(1000 + 50 * block, 1000 + 50 * (block + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_spellings_are_recognised(block: int) -> None:
    run(range(10_000 + 250 * block, 10_000 + 250 * (block + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_mutants_are_what_they_became(block: int) -> None:
    run_mutants(range(20_000 + 250 * block, 20_000 + 250 * (block + 1)))
