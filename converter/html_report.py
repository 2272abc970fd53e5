"""``report.html``: the conversion report as one page without scripts or outside references."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATE = "report.html.j2"

_BLUE, _GREY, _RED = "#2563eb", "#9ca3af", "#dc2626"


def html_report(report: Mapping[str, Any]) -> str:
    """The page of a ``report.json``; sections without content are left out."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["number"] = _number
    environment.filters["size"] = _size
    planning = report.get("planning")
    # A figure is markup of our own making; everything else is escaped.
    return environment.get_template(TEMPLATE).render(
        report=report,
        replaced=[site for site in report["sites"] if site["method"] != "dense"],
        planning=planning,
        figures={name: _svg(figure) for name, figure in _figures(report).items()},
        total_seconds=sum(report["seconds"].values()),
    )


def _figures(report: Mapping[str, Any]) -> dict[str, Figure]:
    figures = {"seconds": _seconds(report["seconds"])}
    planning = report.get("planning")
    if planning is not None:
        plan = planning["plan"]
        figures["errors"] = _errors(plan["sites"])
        if len(plan["front"]) > 1:
            figures["front"] = _front(plan["front"])
        density = _density(planning["statistics"])
        if density is not None:
            figures["density"] = density
    return figures


def _seconds(seconds: Mapping[str, float]) -> Figure:
    """Where the time of the conversion went."""
    names = list(seconds)
    figure, axes = _axes(0.3 * len(names) + 0.7)
    axes.barh(names, [seconds[name] for name in names], color=_BLUE, height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    return figure


def _errors(sites: Sequence[Mapping[str, Any]]) -> Figure:
    """Error of every candidate at every attention; what was chosen stands out."""
    figure, axes = _axes(2.6)
    chosen: list[tuple[int, float]] = []
    others: list[tuple[int, float]] = []
    for place, site in enumerate(sites):
        for candidate in site["candidates"]:
            error = max(candidate["errors"].values(), default=math.nan)
            taken = candidate["method"] == site["method"]
            (chosen if taken else others).append((place, error))
    for points, color, label in ((others, _GREY, "tried"), (chosen, _BLUE, "chosen")):
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, s=14, color=color, label=label)
    if chosen or others:
        axes.set_yscale("log")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _whole_numbers(axes, "x")
    axes.set_xlabel("attention")
    axes.set_ylabel("relative error")
    return figure


def _front(front: Sequence[Mapping[str, Any]]) -> Figure:
    """What is saved against what it does to the model, measured where plans were run."""
    figure, axes = _axes(2.6)
    for keeps, color, label in ((True, _BLUE, "keeps the budget"), (False, _RED, "misses it")):
        points = [
            (100 * point["saving"], point["predicted_damage"])
            for point in front
            if bool(point.get("keeps_budget")) is keeps and point["predicted_damage"] is not None
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, s=18, color=color, label=label)
    axes.set_xlabel("saved, % of the price of all attentions")
    axes.set_ylabel("predicted damage")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _density(statistics: Mapping[str, Any]) -> Figure | None:
    """Share of key blocks that hold 95 % of the attention, per attention and head."""
    rows = [item["density"].get("0.95") for item in statistics.values() if "density" in item]
    if not rows or any(row is None or len(row) != len(rows[0]) for row in rows):
        return None
    figure, axes = _axes(0.12 * len(rows) + 1.2)
    image = axes.imshow(rows, aspect="auto", vmin=0, vmax=1, cmap="viridis")
    _whole_numbers(axes, "x", "y")
    axes.set_xlabel("head")
    axes.set_ylabel("attention")
    figure.colorbar(image, label="share of blocks")
    return figure


def _axes(height: float) -> tuple[Figure, Axes]:
    # Not pyplot: that keeps state and may look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> Any:
    import matplotlib
    from markupsafe import Markup

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "subquad"}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawing = text.getvalue()
    return Markup(drawing[drawing.index("<svg") :])


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.4g}"


def _size(count: int | None) -> str:
    if count is None:
        return "–"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def _whole_numbers(axes: Axes, *names: Literal["x", "y"]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name in names:
        getattr(axes, f"{name}axis").set_major_locator(MaxNLocator(integer=True))
