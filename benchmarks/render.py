"""Reports as tables and plots, and the tables of the documentation.

    python benchmarks/render.py benchmarks/results/must.json README.md docs/benchmarks.md

replaces what stands between ``<!-- benchmarks:must -->`` and ``<!-- /benchmarks -->`` in the files,
so that no figure there is typed by hand. A report of another set goes between
``<!-- benchmarks:NAME -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workloads import MUST, Must

Report = Mapping[str, Any]


def must_rows(
    results: Sequence[Mapping[str, Any]],
    skipped: Sequence[Mapping[str, Any]],
    rows: Sequence[Must] = MUST,
) -> list[dict[str, Any]]:
    """Every row of what must be reached, with what was measured, or why nothing was."""
    return [_must_row(row, results, skipped) for row in rows]


def _must_row(
    row: Must, results: Sequence[Mapping[str, Any]], skipped: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "work": row.work,
        "metric": row.metric,
        "rival": row.rival,
        "bound": row.bound,
        "limit": row.limit,
        "aim": row.aim,
        "value": None,
        "verdict": "not measured",
    }

    def find(cases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        same = [c for c in cases if (c["workload"], c["length"]) == (row.workload, row.length)]
        # On a machine with fewer cores, all of them.
        return min(same, key=lambda case: abs(case["threads"] - row.threads), default=None)

    case = find(results)
    if case is None:
        left_out = find(skipped)
        facts["why"] = left_out["skipped"] if left_out else "not part of this run"
        return facts
    facts |= {name: case[name] for name in ("rounds", "rounds_kept", "threads")}
    ours = case["contestants"][0]
    if not ours["ours"] or "function" in ours["label"]:
        facts["why"] = "no kernel: " + "; ".join(case["excluded"].values())
        return facts
    if row.metric == "share":
        value, quartiles = ours["share_of_gemm"], None
    else:
        rival = next((c for c in case["contestants"] if c["label"] == row.rival), None)
        if rival is None:
            facts["why"] = case["excluded"].get(row.rival, f"{row.rival} did not take part")
            return facts
        value, quartiles = rival["ours_over_this"], rival["ratio_quartiles"]
    verdict = "pass" if row.met(value) else "miss"
    return facts | {"value": value, "quartiles": quartiles, "verdict": verdict}


def must_table(report: Report) -> str:
    lines = [
        f"{where(report)} `{report['command']}`",
        "",
        "| work | must | measured | | rounds |",
        "|---|---|---|---|---|",
    ]
    for row in report["must"]:
        measured, rounds = row.get("why", ""), ""
        if row["value"] is not None:
            share = row["metric"] == "share"
            measured = f"{row['value']:.0%}" if share else f"{row['value']:.2f}x"
            rounds = f"{row['rounds_kept']} of {row['rounds']}"
        lines.append(
            f"| {row['work']} | {row['bound']} | {measured} | {row['verdict']} | {rounds} |"
        )
    return "\n".join(lines) + "\n"


def short_table(report: Report) -> str:
    """Our kernel against the fastest operator of ONNX Runtime at every length of a workload."""
    results = report["results"]
    names = list(dict.fromkeys(item["workload"] for item in results))
    lines = [f"{where(report)} `{report['command']}`", ""]
    for lengths in dict.fromkeys(_lengths(results, name) for name in names):
        rows = [name for name in names if _lengths(results, name) == lengths]
        lines += [f"| ours / fastest of ORT | {' | '.join(map(str, lengths))} |"]
        lines += ["|" + "---|" * (len(lengths) + 1)]
        for name in rows:
            cells = [_short_cell(c) for c in results if c["workload"] == name]
            lines.append(f"| {name.removeprefix('short_')} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _lengths(results: Sequence[Mapping[str, Any]], name: str) -> tuple[int, ...]:
    return tuple(case["length"] for case in results if case["workload"] == name)


def _short_cell(case: Mapping[str, Any]) -> str:
    if "function" in case["contestants"][0]["label"]:
        return "no kernel"
    rivals = [item for item in case["contestants"] if not item["ours"]]
    if not rivals:
        return "no rival"
    fastest = max(rivals, key=lambda item: item["ours_over_this"])
    return f"{fastest['ours_over_this']:.2f}"


def table(report: Report) -> str:
    """The short form of a set that has one; "" for the others."""
    forms = {"must": must_table, "short": short_table}
    return forms[report["set"]](report) if report["set"] in forms else ""


def as_markdown(report: Report) -> str:
    """All cases as tables, ours / theirs."""
    results = report["results"]
    lines = [f"# Benchmarks: {report['set']}", "", f"`{report['command']}`", "", where(report)]
    lines += [
        "",
        "Ratios are the median over rounds of the first contestant's time / this one's within a "
        "round: below 1, ours is faster. Share is the rate of floating-point operations relative "
        "to that of a matrix product in the same rounds; of a contestant that needs other "
        "operations than ours none is given. Memory is what one run adds (of whole models: the "
        "process), error is relative to float64.",
    ]
    for workload in dict.fromkeys(item["workload"] for item in results):
        cases = [item for item in results if item["workload"] == workload]
        lines += ["", f"## {cases[0].get('title', workload)}", ""]
        lines += [
            "| length | threads | | ms | ours / this | quartiles | GF/s | share | MiB | error |"
        ]
        lines += ["|" + "---|" * 10]
        for case in cases:
            lines += [_line(case, item) for item in case["contestants"]]
        notes = [_note(case) for case in cases]
        if any(notes):
            lines += ["", *(note for note in notes if note)]
    if report["skipped"]:
        lines += ["", "## Left out", ""]
        for item in report["skipped"]:
            title = f"{item['workload']}, length {item['length']}, {item['threads']} threads"
            lines.append(f"- {title}: {item['skipped']}")
    return "\n".join(lines) + "\n"


def _line(case: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    same_work = item["gflops"] is not None and item["error"] is not None
    low, high = item["ratio_quartiles"]
    is_model = case["flops"] is None
    memory = item["process_peak_bytes"] if is_model else item["peak_growth_bytes"]
    cells = [
        case["length"],
        case["threads"],
        item["label"],
        f"{item['median_seconds'] * 1e3:.3g}",
        f"{item['ours_over_this']:.2f}",
        f"{low:.2f} - {high:.2f}",
        f"{item['gflops']:.0f}" if same_work else "",
        f"{item['share_of_gemm']:.0%}" if same_work else "",
        "" if memory is None else f"{memory / 2**20:.0f}",
        "" if item["error"] is None else f"{item['error']:.1e}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _note(case: Mapping[str, Any]) -> str:
    parts = []
    if case["rounds_kept"] < case["rounds"]:
        parts.append(f"{case['rounds'] - case['rounds_kept']} of {case['rounds']} rounds left out")
    if case["rounds_kept"] < 10:
        parts.append("**fewer than 10 rounds count: distrust these figures**")
    parts += [f"{label} left out: {reason}" for label, reason in case["excluded"].items()]
    if not parts:
        return ""
    return f"- length {case['length']}, {case['threads']} threads: " + "; ".join(parts)


def where(report: Report) -> str:
    machine, cases = report["machine"], report["results"]
    rounds = sum(case["rounds"] for case in cases)
    kept = sum(case["rounds_kept"] for case in cases)
    rates = {
        count: statistics.median(c["gemm_gflops"] for c in cases if c["threads"] == count)
        for count in sorted({case["threads"] for case in cases})
    }
    gemm = ", ".join(f"{rate:.0f} GF/s with {count} threads" for count, rate in rates.items())
    packages = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v)
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores, {report['date']}; {packages}. "
        f"Matrix product: {gemm or 'not run'}. {rounds - kept} of {rounds} rounds were left out, "
        f"{report['seconds']:.0f} s in all, {report['settings']['clock']} clock."
    )


def plot(report: Report, path: Path) -> None:
    """Time over length, one panel per workload and number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = list(dict.fromkeys((c["workload"], c["threads"]) for c in report["results"]))
    if not keys:
        return
    columns = min(4, len(keys))
    lines = -(-len(keys) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(keys) :]:
        panel.axis("off")
    for (workload, threads), panel in zip(keys, panels.flat, strict=False):
        cases = [
            case
            for case in report["results"]
            if (case["workload"], case["threads"]) == (workload, threads)
        ]
        for label in dict.fromkeys(c["label"] for case in cases for c in case["contestants"]):
            points = sorted(
                (case["length"], item["median_seconds"] * 1e3)
                for case in cases
                for item in case["contestants"]
                if item["label"] == label
            )
            style = {"lw": 2.2} if points and label.startswith("subquad") else {"ls": "--"}
            panel.plot(*zip(*points, strict=True), marker="o", ms=3, label=label, **style)
        panel.set(xscale="log", yscale="log", title=f"{workload}, {threads} threads")
        panel.set_xlabel("length")
        panel.set_ylabel("ms")
        panel.set_xticks(lengths := sorted({c["length"] for c in cases}), map(str, lengths))
        panel.minorticks_off()
        panel.legend(fontsize=6)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def replace_tables(text: str, report: Report) -> str:
    """``text`` with the report's table between its marks.

    Raises:
        ValueError: no such marks.
    """
    text_of_set = table(report) or as_markdown(report)
    start, end = f"<!-- benchmarks:{report['set']} -->", "<!-- /benchmarks -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no {start} ... {end}")
    return pattern.sub(lambda _: f"{start}\n\n{text_of_set}\n{end}", text)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="JSON file that run.py wrote")
    parser.add_argument("documents", type=Path, nargs="*", help="files with marks")
    args = parser.parse_args(arguments)
    report = json.loads(args.report.read_text("utf-8"))
    for document in args.documents:
        try:
            text = replace_tables(document.read_text("utf-8"), report)
        except ValueError as error:
            print(f"{document}: {error}", file=sys.stderr)
            return 1
        document.write_text(text, "utf-8")
    if not args.documents:
        print(table(report) or as_markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
