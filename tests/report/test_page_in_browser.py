"""The page of `dtrain report` in a real headless Chromium: zoom, smoothing, run selector, theme, sorting, keyboard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report_page import make_run
from dtrain.report.page import write
from tests.report.test_page import EVIL, change

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three runs, one of which is hostile in every text that a page shows."""
    folder = tmp_path_factory.mktemp("sweep")
    runs = [make_run(folder / f"run-{i}", seed=i, steps=3000) for i in range(2)]
    evil = make_run(folder / "<script>window.evil=1<", seed=2, steps=300, status="failed")
    (evil / "logs" / "system-<img src=x onerror='window.evil=1'>.jsonl").write_text('{"time": 1, "cpu_percent": 3}\n')
    change(evil / "summary.json", name=EVIL, model=EVIL, device=EVIL, unit=EVIL, versions={EVIL: EVIL})
    change(evil / "launch.json", overrides=[EVIL], host=EVIL, cwd=EVIL, launches=[{"overrides": [EVIL]}])
    change(evil / "plan.json", step_s={EVIL: 1.0}, memory_gib={EVIL: 1.0}, reason=EVIL)
    (evil / "failure.json").write_text(json.dumps({"rank": 0, "type": EVIL, "message": EVIL, "where": EVIL}))
    (evil / "attempts.jsonl").write_text(json.dumps({"event": "start", "time": 1, "step": 0, "nodes": [EVIL]}) + "\n")
    (evil / "config.yaml").write_text(json.dumps({EVIL: EVIL, "optim": {"lr": EVIL}}))
    with open(evil / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 300, EVIL: 1.0, "slow_text": EVIL}) + "\n")
    write([*runs, evil], folder / "page.html", f"{EVIL} · dtrain report")
    return folder / "page.html"


class Opened:
    """A page that is open, and everything that it must not do."""

    def __init__(self, browser: Any, file: Path, width: int = 1360, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page, self.troubles, self.requests = self.context.new_page(), [], []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: self.troubles.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.file = file.as_uri()
        self.page.goto(self.file)
        self.page.wait_for_selector("html[data-ready]")  # wait_for_function needs eval, which the page forbids

    def close(self) -> None:
        assert self.troubles == [] and self.requests == [self.file]
        assert self.page.evaluate("window.evil") is None and self.page.locator("main img").count() == 0
        self.context.close()

    def __call__(self, script: str) -> Any:
        return self.page.evaluate(script)

    def drawn(self) -> Any:
        """The first chart's pixels, once it has been drawn again."""
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert not self("curves.charts[0].dirty")
        return self("curves.charts[0].base.toDataURL()")


def test_curves_zoom_smooth_and_compare(browser: Any, sweep: Path) -> None:
    opened = Opened(browser, sweep)
    page = opened.page
    plot = page.locator("#curves .plot").first
    plot.scroll_into_view_if_needed()
    first = opened.drawn()
    assert opened("curves.charts[0].lines.length") == 3
    # the spike of one step, which a mean would hide, is within the axis
    assert opened("curves.charts[0].y1") > opened("Math.max(...curves.charts[0].lines[0].data.hi)") > 4

    box = plot.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    assert page.locator("#curves .tip").first.is_visible()
    assert "step" in page.locator("#curves .tip-head").first.text_content()
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 120, steps=3)
    page.mouse.up()
    low, high = opened("curves.zoom")
    assert 0 < low < high < 3000 and opened.drawn() != first
    assert opened("curves.charts.every(c => !c.width || c.dirty || c.x0 === curves.zoom[0])"), (
        "all charts zoom together"
    )
    plot.dblclick(position={"x": 400, "y": 100})
    assert opened("curves.zoom") is None and page.locator("#reset").is_disabled()

    plot.focus()
    page.keyboard.press("+")
    assert opened("curves.zoom") is not None and page.locator("#reset").is_enabled()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Escape")
    assert opened("curves.zoom") is None

    page.locator("#smooth").fill("0.9")
    smooth = opened.drawn()
    assert smooth != first and opened("curves.charts[0].lines[0].smooth.length") > 100
    page.locator("#smooth").fill("0")
    page.locator("#log").click()
    assert opened.drawn() != first and opened("curves.charts[0].log")
    page.locator("#log").click()
    page.locator("[data-axis=tokens]").click()
    opened.drawn()
    assert opened("curves.charts[0].x1") > 1e9
    page.locator("[data-axis=step]").click()

    page.locator(".runlist input").first.uncheck()
    opened.drawn()
    assert opened("curves.charts[0].lines.map(l => l.key)") == [1, 2]
    assert page.locator("table.runs tr.off").count() == 1
    page.get_by_role("button", name="none", exact=True).click()
    opened.drawn()
    assert opened("curves.charts[0].lines.length") == 0
    page.get_by_role("button", name="all", exact=True).click()
    assert opened.drawn() == first, "everything is as it was"
    opened.close()


def test_table_sorts_and_axes_select(browser: Any, sweep: Path) -> None:
    opened = Opened(browser, sweep)
    page = opened.page
    head = page.get_by_role("button", name="train loss")
    order = (
        "[...document.querySelectorAll('table.runs tbody tr')].map(r => data.runs[r.dataset.run].results.train_loss)"
    )
    head.click()
    first = opened(order)
    assert first == sorted(first, reverse=first[0] > first[-1])
    head.click()
    assert opened(order) == first[::-1]
    assert page.locator("th[aria-sort]").count() == 1
    assert opened("parallel.axes.at(-1).result") and len(opened("parallel.axes.map(a => a.title)")) > 2

    zone = page.locator(".pzone").last
    box = zone.bounding_box()
    page.mouse.move(box["x"] + 9, box["y"] + box["height"] - 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 9, box["y"] + box["height"] - 40, steps=3)
    page.mouse.up()
    best = opened("data.runs.reduce((a, b) => a.results.val_loss < b.results.val_loss ? a : b).index")
    assert best in opened("[...state.selected]") and opened("state.selected.size") < 3
    zone.click()
    assert opened("state.selected.size") == 3

    page.locator("table.runs .link").last.click()
    assert opened("state.focus") == opened(
        "Number(document.querySelector('table.runs tbody tr:last-child').dataset.run)"
    )
    for i in range(3):  # the details of the hostile run too
        page.locator("#details select").select_option(str(i))
    assert EVIL[:20] in page.locator("#environment").text_content()
    assert page.locator("#details .why.bad").count() == 1
    opened.close()


@pytest.mark.parametrize("width", [360, 1360])
def test_light_and_dark_at_phone_and_desktop_width(browser: Any, sweep: Path, width: int) -> None:
    for scheme, other in (("light", "dark"), ("dark", "light")):
        opened = Opened(browser, sweep, width, scheme)
        background = "getComputedStyle(document.body).backgroundColor"
        assert opened("document.documentElement.dataset.theme") == scheme
        before = opened(background), opened.drawn() if width > 1000 else None
        assert opened("document.documentElement.scrollWidth") <= width, "nothing is wider than the screen"
        opened.page.locator("#theme").click()
        assert opened("document.documentElement.dataset.theme") == other
        assert opened(background) != before[0]
        opened.close()


def test_the_communication_of_a_profiled_run(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", seed=0, steps=300)
    for rank, begin in enumerate((0, 20_000)):
        calls = [["all_reduce", 10**6, 0, begin, 30_000], [EVIL, 10**6, 0, 40_000, 50_000]]
        content = {"rank": rank, "host": "a", "groups": [[0, 1]], "calls": calls, "num_steps": 1}
        (run / "profiles").mkdir(exist_ok=True)
        (run / "profiles" / f"communication-rank-{rank}.json").write_text(json.dumps(content))
    write([run], tmp_path / "page.html", "one · dtrain report")
    for width in (390, 1360):
        opened = Opened(browser, tmp_path / "page.html", width)
        part = opened.page.locator("#communication")
        part.scroll_into_view_if_needed()
        assert part.is_visible() and "all_reduce" in part.locator("table").inner_text()
        assert "rank 0 waits for rank 1: 20.00 ms a step, in 1 of 1 collectives" in part.inner_text()
        assert opened("document.documentElement.scrollWidth <= innerWidth"), "only the table scrolls sideways"
        opened.close()
