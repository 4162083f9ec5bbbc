"""`treepack report` in a real browser: it draws, searches, obeys the keyboard, fits any width, runs nothing else."""

import re
import shutil
from pathlib import Path

import pytest

from support.hostile import COLUMN, MARK, PIECES, write_hostile
from support.rollout_files import rollout_rows, write_rollouts
from support.traces import BUNDLED
from treepack.scoring.display import make_display
from treepack.scoring.html_report import write_report
from treepack.scoring.score_job import score_rollouts
from treepack.scoring.score_options import ScoreOptions

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHARTS = ("steps", "balance", "tree", "reward", "advantage", "reasons")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
    pytest.mark.filterwarnings("default::ResourceWarning"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def report_of(folder: Path, rollouts: Path, **options) -> Path:
    tokenizer = options.pop("tokenizer", None)
    with make_display(quiet=True) as display:
        score_rollouts(
            ScoreOptions(rollouts=rollouts, scorer="none", record=True, out=folder / "out", **options), display
        )
    write_report(folder / "out", folder / "page.html", tokenizer=tokenizer)
    return folder / "page.html"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Of real rollouts, some groups of which do not fit."""
    return report_of(tmp_path_factory.mktemp("real"), BUNDLED, token_budget=2048, limit_groups=50)


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    rollouts, tokenizer = write_hostile(folder)
    return report_of(folder, rollouts, tokenizer=tokenizer, ranks=2, steps=1, token_budget=4096)


@pytest.fixture
def open_page(browser):
    """Opens a report, and at the end finds that the console said nothing and nothing but the file was asked for."""
    contexts, said, asked = [], [], []

    def opened(path: Path, *, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: said.append(f"dialog {dialog.message}"))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]", timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == len(contexts)


def rows_of(page, table):
    return page.locator(f"#{table} tbody tr")


@pytest.mark.parametrize("width", [360, 768, 1600, 2000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_draws_at_any_width(report, open_page, width, scheme):
    page = open_page(report, width=width, scheme=scheme)
    for chart in CHARTS:
        box = page.locator(f"#{chart}-chart svg.main-svg").first.bounding_box()
        assert 250 < box["width"] <= width
        assert box["height"] > 150
        assert page.locator(f"#{chart}-chart").get_attribute("aria-label")
    assert page.locator("#tree-chart .iciclelayer path.surface").count() > 5
    assert page.locator("#steps-chart .barlayer .point").count() > 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for field in page.locator("input, select, button:visible").all():
        box = field.bounding_box()
        if box is not None and not field.evaluate("e => !!e.closest('.scroll')"):
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width


def test_search_sort_and_pages(report, open_page):
    page = open_page(report)
    rows = rows_of(page, "samples-table")
    assert rows.count() == 25
    status = page.locator("#samples-table [role=status]")
    assert re.fullmatch(r"1 to 25 of [\d,]+", status.inner_text())
    page.locator("#samples-table").get_by_role("button", name="Next").click()
    assert status.inner_text().startswith("26 to 50 of")
    page.get_by_label("Search samples").fill("oversize")
    assert status.inner_text().startswith("1 to 25 of")
    assert all("oversize" in text for text in rows.all_inner_texts())
    page.get_by_label("Search samples").fill("nothing is like this")
    assert (rows.count(), status.inner_text()) == (0, "nothing found")
    page.get_by_label("Search samples").fill("")
    header = page.locator("#samples-table th", has_text="advantage")
    for direction, wanted in (("ascending", sorted), ("descending", lambda values: sorted(values, reverse=True))):
        header.get_by_role("button").click()
        assert header.get_attribute("aria-sort") == direction
        at = page.locator("#samples-table th").all_inner_texts().index(header.inner_text())
        values = [float(row.locator("td").nth(at).inner_text()) for row in rows.all()]
        assert values == wanted(values)
    assert len({*values}) > 1


def test_the_keyboard_is_enough(report, open_page):
    page = open_page(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", seen[-1]
    order = [
        seen.index(name)
        for name in ("theme", "Overview", "tree-choice", "tree-colour", "tree-root", "Show", "reward-choice")
    ]
    assert order == sorted(order)
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#segments button", has_text="Show").first.focus()
    page.keyboard.press("Enter")
    assert "shared by" in page.locator("#segment").inner_text()
    page.locator("#tree-root").focus()
    page.keyboard.press("Space")
    assert page.locator("#segment").inner_text() == "No segment is chosen."
    page.locator("#rows-table th button").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#rows-table th").first.get_attribute("aria-sort") == "ascending"


def test_the_tree_is_looked_into(report, open_page):
    page = open_page(report)
    choices = page.locator("#tree-choice option").all_inner_texts()
    assert len(choices) > 3
    caption = page.locator("#tree-caption")
    before = caption.inner_text()
    page.locator("#tree-choice").select_option(index=1)
    assert caption.inner_text() != before
    page.locator("#tree-colour").select_option("advantage")
    page.wait_for_timeout(300)
    page.locator("#tree-chart .iciclelayer path.surface").nth(2).click(force=True)
    page.wait_for_function("document.getElementById('segment').textContent.includes('shared by')")
    assert "Token ids:" in page.locator("#segment").inner_text()


def test_a_job_that_dropped_everything(tmp_path, open_page):
    rollouts = write_rollouts(tmp_path / "rollouts.jsonl", rollout_rows([[1.0, 0.0]]))
    page = open_page(report_of(tmp_path, rollouts, token_budget=9))
    for text in ("No optimizer step was finished.", "No row was packed.", "No tokens were kept."):
        assert page.get_by_text(text).is_visible()
    page.locator("#theme").click()
    assert rows_of(page, "samples-table").count() == 2
    assert page.locator("#reasons-caption").inner_text() == "0 samples train; not: oversize 2."


def test_hostile_rollouts_run_nothing(hostile_report, open_page):
    page = open_page(hostile_report)
    page.locator("#reward-choice").select_option(label=COLUMN)
    page.locator("#segments tr", has_text=PIECES[0]).first.get_by_role("button").click()
    assert PIECES[0] in page.locator("#segment pre").inner_text()
    for chart in CHARTS:
        page.locator(f"#{chart}-chart").scroll_into_view_if_needed()
        box = page.locator(f"#{chart}-chart").bounding_box()
        for part in (0.25, 0.5, 0.75):
            page.mouse.move(box["x"] + part * box["width"], box["y"] + 0.6 * box["height"])
            page.wait_for_timeout(60)
    page.get_by_label("Search samples").fill(PIECES[0])
    assert rows_of(page, "samples-table").count() > 0
    page.locator("#samples-table th", has_text="onmouseover").hover()
    page.wait_for_timeout(300)
    assert page.evaluate(f"window.{MARK}") is None
    assert page.evaluate("({}).polluted") is None
    assert page.locator("img, iframe, main script, a[href^=javascript]").count() == 0
    assert COLUMN in page.locator("#samples-table th").all_inner_texts()
    assert page.title() == "treepack score: out"


def test_the_policy_stops_what_would_get_in(report, open_page, browser):
    """The second line of defence: a script that did get into the page would not run."""
    broken = report.with_name("broken.html")
    text = report.read_text(encoding="utf-8")
    broken.write_text(
        text.replace("<h1 ", f"<script>window.{MARK} = 8</script><img src=x onerror='window.{MARK} = 9'><h1 ", 1)
    )
    page = browser.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(broken.as_uri())
    page.wait_for_selector("html[data-ready=true]", timeout=60_000)
    assert page.evaluate(f"window.{MARK}") is None
    assert any("Content Security Policy" in text for text in refused)
    page.close()
