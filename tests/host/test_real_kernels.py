"""Kernels of operators with many inputs and outputs, built and hosted as in an artifact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoding import HYBRIDS, Feeds, decode, operators_of
from kernel_nodes import open_node
from oracles import random_case, reference, reference_all, relative_error
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.host.build import build_kernels
from subquad.kernels.host.table import library_source
from subquad.kernels.host.targets import X86_64_V3
from subquad.kernels.operator import OperatorVariant

BIASED = AttentionVariant(
    *(4, 2, 8, 8, 0.3),
    window_right=0,
    score_bias="hqk",
    has_sink_logits=True,
    has_lse=True,
    has_entropy=True,
)
FIRST, STEP = operators_of(HYBRIDS[0])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUBQUAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        built = build_kernels([BIASED, FIRST, STEP], targets=[X86_64_V3])
    assert not built.declined, built.declined
    return built.libraries[0].path


def test_outputs_about_rows(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_POISON", "1")
    rng = np.random.default_rng(0)
    session = open_node(BIASED, library, 2)
    for query_len, kv_len in ((1, 1), (3, 600), (70, 70)):
        case = random_case(rng, BIASED, query_len=query_len, kv_len=kv_len)
        got = session.run(None, case.feeds(BIASED))
        for have, want in zip(got, reference_all(BIASED, case), strict=True):
            # float32 sums of at most 600 terms
            assert relative_error(have, want) < 2e-6


def test_decoding(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_POISON", "1")
    rng = np.random.default_rng(1)
    variant = HYBRIDS[0]
    case = random_case(rng, variant, query_len=90)
    sessions: dict[str, Any] = {
        operator.op_type: open_node(operator, library) for operator in operators_of(variant)
    }

    def run(operator: OperatorVariant, feeds: Feeds) -> list[NDArray[Any]]:
        outputs: list[NDArray[Any]] = sessions[operator.op_type].run(None, feeds)
        return outputs

    got, _ = decode(variant, case, [40, 41, 42, 60, 90], run)
    # float32 sums of at most 90 terms
    assert relative_error(got, reference(variant, case)[:, :, 40:]) < 1e-6


def test_outputs_may_differ_between_variants() -> None:
    """One operator, whose variants carry other parts of a state or other facts about rows."""
    variants = [op for hybrid in HYBRIDS for op in operators_of(hybrid)]
    only_entropy = replace(BIASED, has_lse=False)
    source = library_source([BIASED, only_entropy, *variants], X86_64_V3)
    assert "static const Output kAttentionOutputs[] = {" in source
    table = source.partition("kAttentionOutputs[] = {")[2].partition("};")[0].split()
    assert table == ["{ORT_FLOAT,", "false},", "{ORT_FLOAT,", "false},", "{ORT_FLOAT,", "true},"]
