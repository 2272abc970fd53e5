"""report.html: everything that report.json says of attentions, safe markup, shown by a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import exact_folder
from subquad.converter.html_report import html_report
from subquad.converter.plan_request import PlanRequest
from subquad.converter.planning import convert_with_budget
from subquad.converter.reports import PAGE_NAME, REPORT_NAME

REQUEST = PlanRequest(
    ("kl=1.5",), lengths=(96,), threads=1, calibration_tokens=960, heldout_tokens=960
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    source = exact_folder.save_decoder(folder / "deep.onnx", layers=2)
    convert_with_budget(source, folder / "out", REQUEST)
    return folder / "out"


@pytest.fixture
def report(artifact: Path) -> Any:
    return json.loads((artifact / REPORT_NAME).read_text("utf-8"))


class _Page(HTMLParser):
    """Texts, tags, and references to anything outside the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(
                ("#", "data:")
            ):
                self.references.append(value or "")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_page_says_what_the_report_says(artifact: Path, report: Any) -> None:
    page = _Page((artifact / PAGE_NAME).read_text("utf-8"))
    plan = report["planning"]["plan"]
    for site in plan["sites"]:
        assert site["why"] in page.text
    for site in report["sites"]:
        assert site["site"]["mask_text"] in page.text
        assert site["site"]["proof"]["mask"] in page.text
    assert f"saves {100 * plan['saving']:.1f} %" in page.text
    assert report["planning"]["data"] in page.text
    for file in report["files"].values():
        assert file["sha256"] in page.text
    assert page.tags.count("svg") >= 3
    assert "script" not in page.tags and page.references == []


def test_names_are_escaped(report: Any) -> None:
    report["sites"][0]["site"]["name"] = "<script>alert(1)</script>"
    report["rejections"] = [{"where": "<b>x", "reason": "a & b"}]
    page = html_report(report)
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;b&gt;x" in page and "a &amp; b" in page


def test_a_plan_that_keeps_an_attention_exact(report: Any) -> None:
    site = report["planning"]["plan"]["sites"][0]
    site |= {"method": "dense", "why": "nothing pays here"}
    for name in ("crossover_length", "causal_granularity", "branches"):
        site.pop(name, None)
    assert f"{site['name']} dense nothing pays here –" in _Page(html_report(report)).text


def test_a_report_without_a_plan(report: Any) -> None:
    for name in ("planning", "verified", "probes"):
        report.pop(name, None)
    page = _Page(html_report(report))
    assert "Where the time went" in page.text
    assert "Budget" not in page.text


def test_nothing_of_this_machine_is_in_the_artifact(artifact: Path) -> None:
    for name in (REPORT_NAME, PAGE_NAME):
        assert str(artifact.parent) not in (artifact / name).read_text("utf-8").replace(
            f'"output": "{artifact}"', ""
        )


@pytest.mark.browser
def test_a_browser_draws_it(artifact: Path, report: Any, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "Chromium is needed: apt-get install chromium"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run(
        [*command, (artifact / PAGE_NAME).resolve().as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    page = _Page(done.stdout)
    assert page.tags.count("svg") >= 3
    assert report["planning"]["plan"]["sites"][0]["why"] in page.text


def test_branches_of_hybrids_are_shown(report: Any) -> None:
    off = {"metrics": {"kl": 0.75, "top1": None}, "damage": 0.5, "noise": 0.01}
    report["branches"] = [
        {
            "name": "layer <3>",
            "method": "lolcats:size=64",
            "metrics": {"kl": 0.25, "top1": None},
            "linear_off": off,
            "window_off": off | {"metrics": {"kl": 1.5, "top1": None}},
            "verdict": "the linear part contributes",
        }
    ]
    text = _Page(html_report(report)).text
    shown = "layer <3> lolcats:size=64 kl 0.25 0.75 1.5 the linear part contributes"
    assert shown in text
