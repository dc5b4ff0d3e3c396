"""The page in headless Chromium: nothing from outside, tokens coloured by where they come from, numbers of /metrics.

Needs the package playwright and a Chromium of the system; skips where one is missing. With FORETELL_SCREENSHOTS=folder
it leaves pictures there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_lab import MODEL, VOCABULARY, Live, drafting, start, tiny_llm
from tiny_tokenizers import byte_level

from foretell.spec.tree import Tree

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
TREE = Tree((-1, 0, 0, 1, 1, 2, 3))


@pytest.fixture(scope="module")
def busy_tree() -> Iterator[Live]:
    live = start(tiny_llm(drafting(0), TREE))
    yield live
    live.idle()
    live.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        made = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


class Page:
    """A page, what it asked for and what it complained of."""

    def __init__(self, browser: Any, live: Live, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.urls: list[str] = []
        self.faults: list[str] = []
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda m: self.faults.append(m.text) if m.type == "error" else None)
        self.page.goto(live.url + "/")

    def ask(self, text: str, **options: str) -> None:
        if options:
            self.page.click("summary")
            for name, value in options.items():
                self.page.fill(f"#{name}", value)
        self.page.focus("#input")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")
        self.page.locator(".turn.assistant .meta").last.filter(has_text="steps").wait_for()

    def shot(self, name: str) -> None:
        folder = os.environ.get("FORETELL_SCREENSHOTS")
        if folder:
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def answer_of(live: Live, text: str, **asked: object) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "report_drafts": True, **asked}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60).json()
    return answer["choices"][0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_chat_shows_the_answer_and_where_each_token_comes_from(
    browser: Any, busy_tree: Live, seed: int
) -> None:
    wanted = answer_of(busy_tree, "hello", seed=seed, temperature=1, max_tokens=60)
    shown = Page(browser, busy_tree)
    shown.ask("hello", seed=str(seed), temperature="1", max_tokens="60")
    text = shown.page.locator(".turn.assistant .text").last.evaluate("e => e.textContent")
    assert text == wanted["message"]["content"]
    kinds = [
        kind
        for step in wanted["steps"]
        for kind in (
            *["accepted"] * step["accepted"],
            *([step["last"]] if step["last"] is not None else []),
        )
    ]
    assert set(kinds) >= {"accepted", "bonus"}
    classes = shown.page.locator(".turn.assistant .t").evaluate_all(
        "all => all.map(e => e.className.split(' ')[1])"
    )
    assert set(classes) <= {*kinds}
    if len(classes) == len(kinds):  # every token had whole characters of its own
        assert classes == kinds
    assert shown.page.locator("#tree g.accepted").count() == wanted["steps"][-1]["accepted"]
    assert shown.faults == []
    shown.shot(f"chat-{seed}")
    shown.context.close()


def test_nothing_comes_from_outside(browser: Any, busy_tree: Live) -> None:
    shown = Page(browser, busy_tree)
    shown.ask("x", max_tokens="8")
    assert shown.urls
    assert all(url.startswith((busy_tree.url, "data:")) for url in shown.urls), shown.urls
    assert shown.faults == []
    shown.context.close()


def test_the_numbers_are_those_of_metrics(browser: Any, busy_tree: Live) -> None:
    shown = Page(browser, busy_tree)
    shown.ask("numbers", max_tokens="30")
    busy_tree.idle()
    metrics = busy_tree.llm.get_metrics()
    locator = shown.page.locator("#generated")
    playwright.expect(locator).to_have_text(str(metrics.generation_tokens))
    playwright.expect(shown.page.locator("#batch")).to_have_text("0 of 8")
    playwright.expect(shown.page.locator("#kv")).to_have_text("0 %")
    said = shown.page.inner_text("#acceptance")
    assert said.startswith(f"{metrics.mean_acceptance_length:.2f} tokens a step")
    assert f"of {metrics.num_draft_tokens} drafted" in said
    assert shown.page.locator("#positions i").count() == len(metrics.acceptance_rate_per_pos)
    scraped = httpx.get(f"{busy_tree.url}/metrics").text
    assert f'generation_tokens_total{{engine="0",model_name="{MODEL}"}} ' in scraped
    shown.context.close()


def test_keys_do_everything(browser: Any, busy_tree: Live) -> None:
    shown = Page(browser, busy_tree)
    page = shown.page
    assert page.evaluate("() => document.activeElement.id") == "input"
    page.evaluate("() => { document.getElementById('max_tokens').value = 30; }")
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    assert page.input_value("#input") == "first\nsecond"
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .meta").filter(has_text="steps").wait_for()
    assert page.input_value("#input") == ""
    last = page.inner_text("#step-place")
    page.focus("#log")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    before = page.inner_text("#step-place")
    assert int(before.split()[0]) == int(last.split()[0]) - 2
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.id") == "input"
    page.keyboard.type("stop me")
    page.keyboard.press("Enter")
    page.locator(".turn.assistant .t").nth(1).wait_for()
    page.keyboard.press("Escape")
    page.locator(".turn.assistant .meta").last.filter(has_text="s").wait_for()
    busy_tree.idle()
    page.keyboard.press("Alt+n")
    assert page.locator(".turn").count() == 0
    seen = set()
    for _ in range(24):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("() => document.activeElement.id || document.activeElement.tagName"))
    assert {"fresh", "theme", "log", "input", "send", "measure"} <= seen
    assert shown.faults == []
    shown.context.close()


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_any_screen_in_light_and_dark(
    browser: Any, busy_tree: Live, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 800}
    shown = Page(browser, busy_tree, viewport=size, color_scheme=scheme)
    shown.ask("a long text " * 10, max_tokens="40")
    overflow = shown.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0, f"{overflow} px too wide"
    back = shown.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    light = sum(int(x) for x in back[4:-1].split(",")) > 380
    assert light == (scheme == "light")
    shown.page.click("#theme")
    shown.page.click("#theme")
    dark = shown.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert sum(int(x) for x in dark[4:-1].split(",")) < 380
    shown.shot(f"{scheme}-{width}")
    shown.context.close()


def test_errors_are_shown_and_html_in_answers_is_text(browser: Any) -> None:
    live = start(tiny_llm(), api_keys=("k1",))
    try:
        shown = Page(browser, live)
        shown.page.keyboard.type("<img src=x onerror=alert(1)>")
        shown.page.keyboard.press("Enter")
        bad = shown.page.locator(".turn.assistant .meta.bad")
        playwright.expect(bad).to_have_text("Unauthorized")
        playwright.expect(shown.page.locator("#health")).to_have_text("key needed")
        assert shown.page.locator(".turn img").count() == 0
        shown.page.click("#fresh")
        shown.page.click("summary")
        shown.page.fill("#key", "k1")
        shown.page.fill("#max_tokens", "5")
        shown.page.focus("#input")
        shown.page.keyboard.type("hi")
        shown.page.keyboard.press("Enter")
        shown.page.locator(".turn.assistant .meta").filter(has_text="5 tokens").wait_for()
        shown.context.close()
    finally:
        live.close()


def test_the_tiny_model_has_ids_for_all_texts() -> None:
    """The tests above need a vocabulary that covers the tokenizer's."""
    assert len(byte_level()) <= VOCABULARY
