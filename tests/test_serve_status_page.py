"""The status page in a headless Chromium: it shows what the engine does while it does it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving import serve_fake

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except sync_api.Error as problem:
            pytest.skip(f"{CHROMIUM} does not start here: {str(problem).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which every error of the script or the console fails the test."""
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert [problem for problem in problems if "ERR_CONNECTION" not in problem] == []


def wait_for(page: Any, name: str, text: str) -> None:
    """Wait until an element shows a text."""
    check = "([id, text]) => document.getElementById(id).textContent === text"
    page.wait_for_function(check, arg=[name, text], timeout=20_000)


def number(page: Any, name: str) -> float:
    text = page.inner_text(f"#{name}").replace(",", "").removesuffix("%")
    return float(text)


def width(page: Any, name: str) -> float:
    """Part of the pool that a bar covers."""
    size = "id => document.getElementById(id).getBoundingClientRect().width"
    return float(page.evaluate(size, name)) / float(page.evaluate(size, "pool"))


def test_the_page_shows_what_runs_and_what_is_cached(page: Any) -> None:
    with serve_fake(num_open=3, num_pages=60, step_seconds=0.04) as served, ThreadPoolExecutor() as pool:
        page.goto(served.url)
        wait_for(page, "state", "live")
        assert page.inner_text("#model") == "fake" and page.title() == "kvq"
        assert number(page, "running") == 0 and number(page, "max_running") == 3
        assert number(page, "free_pages") == number(page, "total_pages") == 60
        answers = [pool.submit(served.text, f"{i}" * 130, max_tokens=100) for i in range(5)]
        wait_for(page, "running", "3")
        page.wait_for_function("Number(document.getElementById('rate').textContent) > 0", timeout=20_000)
        assert number(page, "waiting") >= 1
        assert number(page, "used_pages") >= 3
        page.wait_for_timeout(400)  # the bars glide
        assert 0.05 < width(page, "used-bar") < 1
        assert all(answer.result().status_code == 200 for answer in answers)
        served.text("0" * 130, max_tokens=2)
        wait_for(page, "running", "0")
        page.wait_for_function(
            "document.getElementById('generated_tokens').textContent === '502'", timeout=20_000
        )
        stats = served.core.stats()
        assert number(page, "cached_pages") == stats.cached_pages > 10
        assert number(page, "hit_rate") == round(100 * stats.hit_tokens / stats.prompt_tokens) > 0
        page.wait_for_timeout(400)
        assert width(page, "used-bar") == 0
        assert abs(width(page, "cached-bar") - stats.cached_pages / 60) < 0.02
        assert len(page.get_attribute("#history", "points").split()) >= 2


def test_the_page_says_when_the_server_is_gone(page: Any) -> None:
    with serve_fake() as served:
        page.goto(served.url)
        wait_for(page, "state", "live")
    page.wait_for_function("document.getElementById('state').className === 'bad'", timeout=20_000)
    assert "no answer" in page.inner_text("#state")
