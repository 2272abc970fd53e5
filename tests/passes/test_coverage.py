"""No attention is lost: what ``coverage.json`` says is raised still is, and as exactly.

``make coverage`` writes the file. A change that gains something does so with the file.
"""

from __future__ import annotations

import pytest

from zoo.exports import make_exports
from zoo.families import FAMILIES
from zoo.measure import Cell, measure, measured
from zoo.report import known_cells

# Cheap exports of families that differ: masks, biases, layouts, cross attention, no mask at all.
CHEAP = (
    ("bert", "torchscript17-eager"),
    ("distilbert", "torchscript17-eager"),
    ("mpnet", "torchscript17-eager"),
    ("gpt2", "torchscript17-eager"),
    ("opt", "torchscript17-eager"),
    ("bloom", "torchscript17-eager"),
    ("qwen3", "torchscript17-eager"),
    ("mistral", "torchscript17-eager"),
    ("t5", "torchscript17-eager"),
    ("bart", "torchscript17-eager"),
    ("vit", "torchscript17-eager"),
    ("nn.Module", "torchscript17-sdpa"),
)
# float32 of two layers in another order; families with large values reach a tenth of it.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Cell]:
    make_exports(CHEAP)
    return known_cells()


def assert_nothing_lost(now: Cell, before: Cell) -> None:
    where = f"{now.family} {now.exporter}"
    assert not now.failure or before.failure, f"{where}: {now.failure}"
    lost = {
        name: now.declined.get(name, "not found at all")
        for name in before.raised
        if name not in now.raised
    }
    assert len(now.raised) >= len(before.raised), f"{where} lost {lost}"
    unproved = {
        name: meaning
        for name, meaning in now.raised.items()
        if _has_bias(meaning) and not _has_bias(before.raised.get(name, ""))
    }
    masks = [sum(not _has_bias(m) for m in cell.raised.values()) for cell in (now, before)]
    assert masks[0] >= masks[1], f"{where}: masks that were proved are biases now: {unproved}"
    if before.source_error is not None:
        assert now.source_error is not None, f"{where}: {now.note}"
        assert now.source_error <= max(TOLERANCE, 4 * before.source_error), where


def _has_bias(meaning: str) -> bool:
    return "bias" in meaning or "mask computed" in meaning


@pytest.mark.parametrize(("family", "exporter"), CHEAP)
def test_cheap_exports_keep_their_attentions(
    family: str, exporter: str, known: dict[tuple[str, str], Cell]
) -> None:
    assert_nothing_lost(measure(family, exporter), known[family, exporter])


def test_a_loss_is_named(known: dict[tuple[str, str], Cell]) -> None:
    before = known["bert", "torchscript17-eager"]
    first, *_ = before.raised
    rest = {name: meaning for name, meaning in before.raised.items() if name != first}
    now = Cell(before.family, before.exporter, before.sites, raised=rest, declined={first: "why"})
    with pytest.raises(AssertionError, match=f"lost .*{first}.*why"):
        assert_nothing_lost(now, before)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_export_keeps_its_attentions(family: str, known: dict[tuple[str, str], Cell]) -> None:
    mine = [cell for cell in known.values() if cell.family == family]
    assert mine, "make coverage has not measured it"
    make_exports([(cell.family, cell.exporter) for cell in mine])
    for before in mine:
        assert_nothing_lost(measured(before.family, before.exporter), before)
