"""What tests of kernels run: variants of which some are slow tests, inputs of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from oracles import Case, mask_of, random_case

LENGTHS = (1, 7, 63, 64, 65, 200)
KINDS = ("none", "left", "holes", "empty_row")


def every_variant(fast: Sequence[Any], slow: Sequence[Any]) -> pytest.MarkDecorator:
    """``variant`` is each of these; compiling a kernel takes seconds, so some are slow tests."""
    return pytest.mark.parametrize(
        "variant",
        [*fast, *(pytest.param(variant, marks=pytest.mark.slow) for variant in slow)],
        ids=lambda variant: variant.overload,
    )


def cases(
    rng: np.random.Generator,
    variant: Any,
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = KINDS,
) -> Iterator[tuple[tuple[int, int, str], Case]]:
    """``(queries, keys, mask)`` and inputs: every length and kind of mask, queries that are all
    slots or the last third of them."""
    for length in lengths:
        for kind in kinds if variant.has_key_mask else ("none",):
            for query_len in sorted({length, -(-length // 3)}):
                mask = mask_of(kind, 2, length, rng)
                case = random_case(rng, variant, query_len=query_len, kv_len=length, mask=mask)
                yield (query_len, length, kind), case


def decoding_cases(
    rng: np.random.Generator, variant: Any, queries: Sequence[int] = (1, 3, 7, 16)
) -> Iterator[tuple[tuple[int, int], Case]]:
    """``(queries, keys)`` and inputs: few queries over keys that are cut into parts, of which some
    hold no key that a row sees."""
    for kv_len in (257, 1000):
        for query_len in queries:
            mask = mask_of("left" if variant.has_key_mask else "none", 2, kv_len, rng)
            case = random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask)
            yield (query_len, kv_len), case
