"""How results look on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from subquad.kernels.tuning.tune import TuneReport
    from subquad.passes.costs import CostTable
    from subquad.runtime.bench import BenchResult
    from subquad.runtime.doctor import DoctorReport
    from subquad.runtime.validation_result import ValidationResult


def open_console() -> Console:
    from rich.console import Console

    return Console()


def _table(*columns: str, title: str | None = None) -> Table:
    """A plain table; columns whose name starts with ``>`` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        # Folded, not cut: a name that ends in dots cannot be passed to --sites.
        table.add_column(
            name.removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    return table


def _add(table: Table, *cells: object) -> None:
    from rich.text import Text

    # Text: names may hold brackets, which rich would read as markup.
    table.add_row(*(Text(str(cell)) for cell in cells))


def print_source(console: Console, report: Mapping[str, Any]) -> None:
    source = report["source"]
    line = f"{source.get('name', '?')} ({source.get('kind', '?')})"
    console.print(line, style="bold", markup=False, highlight=False)


def print_sites(console: Console, records: Sequence[Mapping[str, Any]], *, converted: bool) -> None:
    if not records:
        console.print("no attention found")
        return
    columns = [">#", "attention", "heads", ">dim", "mask"]
    table = _table(*columns, *(("method", "runs as") if converted else ()))
    for record in records:
        site = record["site"]
        heads = str(site.get("num_heads", "?"))
        if site.get("num_kv_heads", site.get("num_heads")) != site.get("num_heads"):
            heads += f"/{site['num_kv_heads']}"
        cells = [
            site["index"],
            site["name"],
            heads,
            site.get("head_dim", "?"),
            site.get("mask_text", ""),
        ]
        if converted:
            params = ",".join(f"{key}={_value(v)}" for key, v in record["params"].items())
            method = f"{record['method']}:{params}" if params else record["method"]
            cells += [method, record["kernel"] or "function body"]
        _add(table, *cells)
    console.print(table)
    coarse = {record.get("causal_granularity", 1) for record in records} - {1}
    for block in sorted(coarse):
        line = f"causal only between blocks of {block} tokens; --strict-causal forbids it"
        console.print(line, markup=False, highlight=False)
    if converted:
        _print_tuned_sites(console, records)
        kept = Counter(record["keeps"] for record in records if record.get("keeps"))
        for what, count in kept.items():
            line = f"kept for the next call, {count} attentions: {what}"
            console.print(line, markup=False, highlight=False)
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record["reason"]:
            reasons.setdefault(record["reason"], []).append(record["site"]["name"])
    for reason, names in reasons.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        console.print(f"{names[0]}{others}: {reason}", markup=False, highlight=False)


def print_proofs(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """How the semantics of the sites were established; sites with equal proofs together."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        site = record["site"]
        lines = [site.get("proof", {}).get("mask", "")]
        lines += [
            f"added to the scores: {bias['kind']}, along {bias['axes']}; no mask: {bias['reason']}"
            for bias in site.get("biases", ())
        ]
        groups.setdefault("; ".join(line for line in lines if line), []).append(site)
    for text, sites in groups.items():
        if not text:
            continue
        proofs = [site["proof"] for site in sites]
        numbers = ",".join(str(site["index"]) for site in sites)
        line = (
            f"proof of {numbers}: {text} "
            f"({min(p['mask_probes'] for p in proofs)} masks and "
            f"{min(p['node_probes'] for p in proofs)} inputs probed each, "
            f"largest error {max(p['max_error'] for p in proofs):.1e})"
        )
        console.print(line, markup=False, highlight=False)


def print_branches(console: Console, branches: Sequence[Mapping[str, Any]]) -> None:
    for seen in branches:
        line = f"{seen['name']} ({seen['method']}): {seen['verdict']}"
        console.print(line, markup=False, highlight=False)


def print_distillation(console: Console, result: Mapping[str, Any] | None) -> None:
    if result is None:
        console.print("distillation: every attention is exact, so there was nothing to train")
        return
    if not result["best_step"]:
        console.print("distillation: no step lowered the held-out loss, so nothing was changed")
        return
    console.print(
        f"distillation: held-out loss {result['loss_before']:.4g} -> {result['loss_after']:.4g}, "
        f"{len(result['changed'])} weights changed (step {result['best_step']})"
    )


def _value(value: Any) -> str:
    """A parameter as it is written: one for every head with slashes."""
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _print_tuned_sites(console: Console, records: Sequence[Mapping[str, Any]]) -> None:
    """One line: where the parameters of the kernels come from."""
    counts: dict[str, int] = {}
    for record in records:
        for variant in record.get("variants", ()):
            for target, choice in variant["tuning"].items():
                line = f"{target} {choice['how']}"
                counts[line] = counts.get(line, 0) + 1
    if counts:
        text = ", ".join(f"{line}: {count}" for line, count in counts.items())
        console.print(f"kernel parameters: {text}", markup=False, highlight=False)


def print_kernels(console: Console, kernels: Mapping[str, Any], sites: int) -> None:
    """One line: whether there are compiled kernels, or why not."""
    if kernels["targets"]:
        targets = ", ".join(kernels["targets"])
        line = f"kernels: {kernels['attentions']} of {sites} attentions, for {targets}"
    elif kernels["asked"] == "none":
        line = "kernels: none, as asked for; attentions run as ONNX functions"
    elif kernels["missing"]:
        line = f"kernels: none, attentions run as ONNX functions: {kernels['missing']}"
    else:
        line = "kernels: none could be built, attentions run as ONNX functions"
    console.print(line, markup=False, highlight=False)


def print_gpu_kernels(console: Console, sites: Sequence[Mapping[str, Any]]) -> None:
    for target in sites[0]["gpu_kernels"] if sites else ():
        texts = [site["gpu_kernels"][target] for site in sites]
        missing = [text for text in texts if text.startswith("no kernel")]
        console.print(
            f"{target}: {len(texts) - len(missing)} of {len(texts)} attentions have a kernel, "
            "which has not run on a GPU"
        )
        for text in dict.fromkeys(missing):
            console.print(f"  {text}", style="dim")


def print_rejections(console: Console, rejections: Sequence[Mapping[str, str]]) -> None:
    if rejections:
        console.print("left alone:", style="bold")
    for item in rejections:
        where = item.get("where") or "?"
        console.print(f"  {where}: {item['reason']}", markup=False, highlight=False)


def print_heads(console: Console, report: Mapping[str, Any]) -> None:
    """Statistics of the heads of every attention, as means over its heads."""
    table = _table(
        "attention", ">entropy", ">sinks", ">in 64", ">in 256", ">blocks 90%", ">95%", ">99%"
    )
    for name, item in report["statistics"].items():
        window, density = item["window_mass"], item["density"]
        shares = (
            item["entropy"],
            item["sink_mass"],
            *(window["64"], window["256"]),
            *(density["0.9"], density["0.95"], density["0.99"]),
        )
        _add(table, name, *(f"{sum(share) / len(share):.0%}" for share in shares))
    console.print(table)
    line = (
        "means over heads: entropy (100% = uniform), mass on the first 4 tokens and in windows, "
        f"blocks of 64 keys needed for 90, 95 and 99 % of the mass; {report['data']}"
    )
    console.print(line, markup=False, highlight=False)


def print_plan(console: Console, report: Mapping[str, Any]) -> None:
    """The plan of a planning report, per site and as a whole."""
    found = report["plan"]
    table = _table("attention", "method", ">saved", ">error", ">damage", ">pays from")
    for site in found["sites"]:
        chosen = next((c for c in site["candidates"] if c["method"] == site["method"]), None)
        saved = 1 - site["price"] / site["exact_price"] if site["exact_price"] else 0.0
        _add(
            table,
            site["name"],
            site["method"],
            f"{saved:.0%}",
            _number(max(chosen["errors"].values()) if chosen else None),
            _number(chosen["predicted_damage"] if chosen else None),
            site.get("crossover_length") or "-",
        )
    console.print(table)
    for site in found["sites"]:
        if site["method"] == "dense":
            console.print(f"{site['name']}: {site['why']}", markup=False, highlight=False)
    prices, measured = found["prices"], found["measured"]
    console.print(
        f"saves {found['saving']:.1%} of the {prices['unit']} of all attentions at lengths "
        f"{', '.join(map(str, found['lengths']))} ({prices['source']})",
        markup=False,
        highlight=False,
    )
    budget = ", ".join(found["budget"])
    line = f"held out: {_figures(measured)}; budget {budget}"
    console.print(line, markup=False, highlight=False)
    for name, figures in measured.get("groups", {}).items():
        console.print(f"  {name}: {_figures(figures)}", markup=False, highlight=False)
    for note in found["data"]["notes"]:
        console.print(f"note: {note}", markup=False, highlight=False)
    seconds = sum(report["seconds"].values())
    console.print(
        f"data: {report['data']}; {found['runs']} plans run, {seconds:.1f} s, peak memory "
        f"{size_text(report['peak_rss_bytes'])}",
        markup=False,
        highlight=False,
    )


def _figures(measured: Mapping[str, Any]) -> str:
    errors = measured["standard_errors"]
    return ", ".join(
        f"{name} {value:.4g}" + (f" +- {errors[name]:.2g}" if name in errors else "")
        for name, value in measured["metrics"].items()
    )


def print_validation(result: ValidationResult) -> None:
    console = open_console()
    table = _table(
        ">length", "padding", ">rows", ">rel. L2", ">cosine", ">KL", ">top-1", ">ppl ratio"
    )
    for case in result.cases:
        outputs = case.outputs.values()
        logits = case.logits or {}
        _add(
            table,
            case.length or "-",
            case.padding,
            case.rows,
            _number(max(item["relative_l2"] for item in outputs)),
            _number(min(item["cosine_mean"] for item in outputs), "{:.6f}"),
            _number(logits.get("kl_mean")),
            _number(logits.get("top1_agreement"), "{:.2%}"),
            _number(logits.get("perplexity_ratio"), "{:.5g}"),
        )
    console.print(table)
    if result.sites:
        _print_site_errors(console, result)
    if result.metamorphic is not None:
        checks = result.metamorphic.checks
        text = ", ".join(f"{count} x {name}" for name, count in checks.items()) or "none"
        found = len(result.metamorphic.violations)
        console.print(f"hidden tokens: {text} checked, {found} violations", highlight=False)
        for name, reason in result.metamorphic.not_applicable.items():
            console.print(f"  {name} not tested: {reason}", highlight=False)
        for name, count in result.metamorphic.source_reacts.items():
            line = f"  {name}: in {count} checks the source model itself reacts; not counted"
            console.print(line, highlight=False)
    for item in result.skipped:
        line = f"length {item['length']} left out: {item['reason']}"
        console.print(line, markup=False, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    memory = size_text(result.peak_rss_bytes)
    line = f"data: {result.data}; {result.seconds:.1f} s, peak memory {memory}"
    console.print(line, markup=False, highlight=False)
    words = {
        "pass": ("PASS", "bold green"),
        "fail": ("FAIL", "bold red"),
        "measured": ("MEASURED, no budget given", "bold yellow"),
    }
    console.print(words[result.verdict][0], style=words[result.verdict][1])


def _print_site_errors(console: Console, result: ValidationResult) -> None:
    table = _table(">#", "attention", "method", ">worst rel. L2", ">length", "padding", "note")
    for site in result.sites:
        _add(
            table,
            site.index,
            site.name,
            site.method,
            _number(site.relative_l2),
            site.length or "-",
            site.padding or "-",
            site.note,
        )
    console.print(table)
    first = result.first_diverging
    if first is not None:
        line = f"first diverging attention: {first.name} ({first.method}), {first.relative_l2:.3g}"
        console.print(line, markup=False, highlight=False)


def print_bench(result: BenchResult) -> None:
    console = open_console()
    table = _table(
        ">length", ">rounds", ">reference", ">artifact", ">speed-up", ">GEMM spread", ">memory"
    )
    for case in result.cases:
        memory = f"{size_text(case.reference_peak_bytes)} -> {size_text(case.artifact_peak_bytes)}"
        _add(
            table,
            case.length,
            f"{case.rounds_kept}/{case.rounds}",
            f"{case.reference_seconds * 1e3:.1f} ms",
            f"{case.artifact_seconds * 1e3:.1f} ms",
            f"{case.speedup:.2f}x",
            f"{case.gemm_spread:.0%}",
            memory,
        )
    console.print(table)
    for item in result.skipped:
        line = f"length {item['length']} left out: {item['reason']}"
        console.print(line, markup=False, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    machine = result.machine
    console.print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, ONNX Runtime "
        f"{result.versions['onnxruntime']}, GEMM {result.gemm_gflops:.0f} GFLOP/s",
        markup=False,
        highlight=False,
    )


def print_costs(costs: CostTable) -> None:
    console = open_console()
    places = sorted({(p.kv_len, p.query_len) for curve in costs.curves for p in curve.points})
    names = [f">{k}" if k == q else f">{q} of {k}" for k, q in places]
    table = _table("operator, ms by length", "as", ">threads", *names)
    for curve in costs.curves:
        times = {(p.kv_len, p.query_len): p.seconds for p in curve.points if p.density == 1.0}
        cells = [f"{times[place] * 1e3:.3g}" if place in times else "-" for place in places]
        _add(table, curve.title, curve.runs_as, curve.threads, *cells)
    console.print(table)
    for note in costs.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    steady = costs.settings["steady"]
    if steady < 0.85:
        line = f"note: the machine was busy: {1 - steady:.0%} of the matrix products were unsteady"
        console.print(line, markup=False, highlight=False)


def print_tuning(report: TuneReport) -> None:
    console = open_console()
    table = _table("kernel", ">length", ">trials", ">failed", ">time", ">quartiles", "parameters")
    for kernel in report.kernels:
        low, middle, high = kernel.ratios
        failed = kernel.trials.get("failed", 0) + kernel.trials.get("wrong", 0)
        params = ",".join(f"{name}={value}" for name, value in kernel.params.items())
        _add(
            table,
            f"{kernel.operator}:{kernel.variant}",
            kernel.workload.kv_len,
            sum(kernel.trials.values()),
            failed,
            f"{middle:.2f}x",
            f"{low:.2f}-{high:.2f}",
            params if kernel.how == "tuned" else f"defaults: {kernel.reason}",
        )
    console.print(table)
    console.print(
        f"{report.machine}, {report.target}, threads: {report.threads}; {report.seconds:.0f} s; "
        f"time is that of the default parameters; records: {report.records}",
        markup=False,
        highlight=False,
    )


def print_doctor(report: DoctorReport) -> None:
    console = open_console()
    table = _table("", "what", "found", "meaning")
    for check in report.checks:
        mark = "ok" if check.ok else ("!" if check.problem else "-")
        _add(table, mark, check.name, check.found, check.advice)
    console.print(table)


def _number(value: float | None, form: str = "{:.2e}") -> str:
    return "-" if value is None else form.format(value)


def size_text(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:.0f} MiB"
