"""Every registered workload at a small size, through the real child process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import harness
import render
import run
import whole_models
from contestants import ENGINES
from harness import Pool, Settings
from workloads import BODY, KERNEL, MUST, SHORT, WORKLOADS, Workload

LENGTH = 65


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as shared:
        yield shared


def in_onnxruntime(workload: Workload) -> Any:
    """The case without what needs a kernel or torch: those take seconds to start."""
    case = run.operator_case(workload, LENGTH, 1, {"": {}}, slow=False)
    kernels = {entry.label for entry in workload.entries if entry.engine == "kernel"}
    chosen = [c for c in case.contestants if c.family == "ort" and c.label not in kernels]
    return replace(case, contestants=tuple(chosen))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda item: item.name)
def test_function_and_rivals_agree_with_float64(workload: Workload, pool: Pool) -> None:
    case = in_onnxruntime(workload)
    result = harness.measure_case(case, pool, Settings(rounds=1), left=60.0)
    assert result["excluded"] == {}
    (body,) = [item for item in result["contestants"] if item["label"] == BODY]
    assert body["error"] < 1e-6 if workload.compared else body["error"] is None
    assert body["median_seconds"] > 0
    for item, contestant in zip(result["contestants"], case.contestants, strict=True):
        if contestant.wanted is not None:
            assert item["error"] < 1e-6


@pytest.mark.parametrize("workload", SHORT[::6], ids=lambda item: item.name)
def test_short_sequences_have_a_rival(workload: Workload, pool: Pool) -> None:
    result = harness.measure_case(in_onnxruntime(workload), pool, Settings(rounds=1), left=60.0)
    assert result["excluded"] == {} and len(result["contestants"]) == 3


def test_labels_are_unique_and_ours_comes_first() -> None:
    names = [workload.name for workload in (*WORKLOADS, *SHORT)]
    names += [model.name for model in whole_models.MODELS]
    assert len(set(names)) == len(names)
    for workload in (*WORKLOADS, *SHORT):
        labels = [entry.label for entry in workload.entries]
        assert len(set(labels)) == len(labels)
        assert labels[0] == KERNEL
        assert all(entry.engine in ENGINES for entry in workload.entries)


def test_rows_of_the_table_name_contestants_that_exist() -> None:
    workloads = {workload.name: workload.entries for workload in WORKLOADS}
    models = {model.name: model.entries for model in whole_models.MODELS}
    for row in MUST:
        entries: Any = workloads.get(row.workload) or models.get(row.workload)
        if entries is not None and row.metric == "ratio":
            assert row.rival in [entry.label for entry in entries], row


def test_the_table_is_measured_at_its_own_lengths() -> None:
    operators, models = run.choose(run.parse(["--set", "must"]))
    got = {(item.name, length) for item, length, _ in [*operators, *models]}
    known = {w.name: w.lengths for w in [*WORKLOADS, *whole_models.MODELS]}
    for row in MUST:
        if row.workload in known:
            assert row.length in known[row.workload], row
            assert (row.workload, row.length) in got


def test_the_table_needs_ours_and_the_rivals_of_its_rows_only() -> None:
    dense = WORKLOADS[0]
    case = run.operator_case(dense, 8192, 2, {"": {}}, slow=False, must=True)
    labels = [item.label for item in case.contestants]
    assert labels == [KERNEL, "torch SDPA", "ORT GroupQueryAttention"]


def test_flops_by_hand() -> None:
    flops = {workload.name: workload.total_flops for workload in WORKLOADS}
    # 12 heads, half of 1024 x 1024 pairs, two products of 64
    assert flops["dense_causal"](1024) == 12 * 1024**2 / 2 * 4 * 64
    # 8 rows, half the keys real, no mask between queries
    assert flops["dense_padded"](512) == 8 * 12 * 512 * 256 * 4 * 32
    # per token: 64 near keys (half a chunk, twice), the state and its update
    assert flops["linear_elu"](1024) == 12 * 1024 * (64 * 128 + 4 * 64 * 64)
    assert flops["decode_dense"](1024) == 9 * 1024 * 4 * 64


def test_compared_rows_include_the_first_and_the_last() -> None:
    case = run.operator_case(WORKLOADS[0], 1000, 2, {"": {}}, slow=False)
    assert case.rows is not None
    assert case.rows[0] == 0 and case.rows[-1] == 999 and len(case.rows) == run.COMPARED_ROWS


def test_processor_time_is_for_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--clock", "cpu"])
    assert "--threads 1" in capsys.readouterr().err


def case_result(length: int, ratio: float, **facts: Any) -> dict[str, Any]:
    item = {"ours": True, "share_of_gemm": 0.6, "error": 1e-7, "peak_growth_bytes": 1 << 20}
    item |= {"process_peak_bytes": 2 << 20, "gflops": 50.0, "ratio_quartiles": [ratio, ratio]}
    item |= {"median_seconds": 0.01, "ours_over_this": 1.0}
    contestants = [
        item | {"label": KERNEL},
        item | {"label": "torch SDPA", "ours": False, "ours_over_this": ratio},
    ]
    return {
        "workload": "dense_causal",
        "length": length,
        "threads": 2,
        "rounds": 12,
        "rounds_kept": 11,
        "excluded": {"ORT GroupQueryAttention": "crashed"},
        "contestants": contestants,
        "flops": 1e9,
        "gemm_gflops": 80.0,
    } | facts


def report(results: list[dict[str, Any]], name: str = "must") -> dict[str, Any]:
    return {
        "set": name,
        "command": "python benchmarks/run.py --set must",
        "date": "2026-01-01",
        "machine": {"cpu": "some processor", "usable_cores": 2},
        "versions": {"torch": "2.13.0", "apache-tvm": None},
        "settings": {"clock": "wall"},
        "seconds": 12.0,
        "results": results,
        "skipped": [],
        "must": render.must_rows(results, []),
    }


@pytest.mark.parametrize(("ratio", "verdict"), [(1.25, "pass"), (1.26, "miss")])
def test_a_row_passes_up_to_its_limit(ratio: float, verdict: str) -> None:
    rows = render.must_rows([case_result(8192, ratio)], [])
    assert rows[0]["verdict"] == verdict and rows[0]["value"] == ratio
    assert rows[1]["verdict"] == "not measured" and rows[1]["why"] == "crashed"


def test_a_share_passes_from_its_limit() -> None:
    row = replace(MUST[0], metric="share", limit=0.6)
    assert render.must_rows([case_result(8192, 1.0)], [], [row])[0]["verdict"] == "pass"
    row = replace(MUST[0], metric="share", limit=0.61)
    assert render.must_rows([case_result(8192, 1.0)], [], [row])[0]["verdict"] == "miss"


def test_a_row_without_measurement_says_why() -> None:
    skipped = [{"workload": "dense_causal", "length": 8192, "threads": 2, "skipped": "no time"}]
    assert render.must_rows([], skipped)[0]["why"] == "no time"
    assert render.must_rows([case_result(512, 1.0)], [])[0]["why"] == "not part of this run"


def test_functions_do_not_count_as_kernels() -> None:
    case = case_result(8192, 1.0, excluded={KERNEL: "TVM is not installed"})
    case["contestants"][0]["label"] = BODY
    row = render.must_rows([case], [])[0]
    assert row["verdict"] == "not measured" and "TVM is not installed" in row["why"]


def test_short_sequences_are_a_set_of_their_own() -> None:
    operators, models = run.choose(run.parse(["--set", "short", "--threads", "1"]))
    assert not models and {item.name for item, _, _ in operators} == {item.name for item in SHORT}
    assert {length for item, length, _ in operators if item.queries is None} >= {1, 7, 512}
    usual, _ = run.choose(run.parse([]))
    assert not {item.name for item, _, _ in usual} & {item.name for item in SHORT}


def test_short_sequences_are_compared_with_the_fastest_rival() -> None:
    cases = [case_result(n, r, workload="short_causal_d64_b1") for n, r in ((1, 0.5), (7, 0.9))]
    faster = dict(cases[1]["contestants"][1], label="ORT Attention", ours_over_this=1.02)
    cases[1]["contestants"].append(faster)
    text = render.table(report(cases, "short"))
    assert "| ours / fastest of ORT | 1 | 7 |" in text
    assert "| causal_d64_b1 | 0.50 | 1.02 |" in text


def test_tables_go_between_their_marks() -> None:
    content = report([case_result(8192, 0.9)])
    text = "before\n<!-- benchmarks:must -->old<!-- /benchmarks -->\nafter\n"
    got = render.replace_tables(text, content)
    assert "old" not in got and got.startswith("before\n") and got.endswith("after\n")
    assert "| 0.90x | pass | 11 of 12 |" in got
    assert render.replace_tables(got, content) == got
    with pytest.raises(ValueError, match="benchmarks:must"):
        render.replace_tables("no marks", content)


def test_markdown_says_what_was_left_out() -> None:
    text = render.as_markdown(report([case_result(8192, 0.9)]))
    assert "1 of 12 rounds left out; ORT GroupQueryAttention left out: crashed" in text
    assert "| 8192 | 2 | torch SDPA | 10 | 0.90 |" in text


def test_plot_is_written(tmp_path: Any) -> None:
    path = tmp_path / "plot.png"
    render.plot(report([case_result(512, 0.9), case_result(2048, 0.9)]), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tokens_of_rows_differ() -> None:
    tokens = whole_models._tokens(whole_models.MODELS[0].source(), 64, 3)
    assert tokens.shape == (3, 64)
    assert not np.array_equal(tokens[0], tokens[1])
