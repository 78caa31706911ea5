"""The page at `/` in a real browser: streams an answer, shows figures and reasoning, stops, reports errors, asks for the key."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import CHROMEDRIVER, CHROMIUM, MISSING, chromium
from tests.support.fake_server import TEXT, FakeServer

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
needs_browser = pytest.mark.skipif(CHROMIUM is None or CHROMEDRIVER is None, reason=MISSING)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(webdriver, tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


class Page:
    """The playground of a server, opened."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get_log("browser")
        driver.get(url + "/")
        self.wait(lambda: self.js("return document.readyState === 'complete'"))

    def js(self, code: str) -> Any:
        return self.driver.execute_script(code)

    def wait(self, condition: Any) -> None:
        WebDriverWait(self.driver, 30).until(lambda _: condition())

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [one.text for one in self.all(selector)]

    def say(self, text: str) -> None:
        self.all("#prompt")[0].send_keys(text + "\n")

    def idle(self) -> bool:
        return bool(self.js("return !document.getElementById('send').disabled"))

    def problems(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@needs_browser
def test_a_conversation_streams_with_its_figures(browser: Any) -> None:
    with FakeServer(pause=0.02) as server:
        page = Page(browser, server.url)
        page.wait(lambda: page.texts("#model option") == ["test-model"])
        page.say("Hi <b>there</b>")
        page.wait(lambda: page.texts(".assistant .text")[:1] not in ([], [""]))
        page.wait(page.idle)
        assert page.texts(".user .text") == ["Hi <b>there</b>"]
        assert page.texts(".assistant .text") == [TEXT]
        [figures] = page.texts(".figures")
        assert "first token after" in figures
        assert "tokens/s" in figures
        page.say("Again")
        page.wait(lambda: page.texts(".assistant .text") == [TEXT, TEXT])
        page.wait(page.idle)
        roles = page.js("return messages.map((message) => message.role)")
        assert roles == ["user", "assistant", "user", "assistant"]
        page.all("#clear")[0].click()
        assert page.all(".message") == []
        assert page.texts("nav a") == ["API", "metrics"]
        assert page.problems() == []


@needs_browser
def test_stop_ends_the_answer(browser: Any) -> None:
    with FakeServer(pause=0.5) as server:
        page = Page(browser, server.url)
        page.say("Hi")
        page.wait(lambda: page.texts(".assistant .text")[:1] not in ([], [""]))
        page.all("#stop")[0].click()
        page.wait(page.idle)
        assert TEXT.startswith(page.texts(".assistant .text")[0])
        assert httpx.get(server.url + "/load").json()["server_load"] in (0, 1)


@needs_browser
def test_the_key_is_asked_for_and_kept_for_the_tab(browser: Any) -> None:
    with FakeServer(api_keys=["secret"]) as server:
        page = Page(browser, server.url)
        page.say("Hi")
        page.wait(lambda: page.texts(".error .text"))
        assert "requires an API key" in page.texts(".error .text")[0]
        page.all("#key")[0].send_keys("secret\t")
        page.wait(lambda: page.texts("#model option") == ["test-model"])
        page = Page(browser, server.url)
        page.say("Hi")
        page.wait(lambda: page.texts(".assistant .text") == [TEXT])


@needs_browser
def test_reasoning_is_apart_from_the_answer(browser: Any) -> None:
    with FakeServer(text="because it is blue</think>The sky", reasoning_parser="deepseek_r1") as server:
        page = Page(browser, server.url)
        page.say("Why?")
        page.wait(lambda: page.idle() and page.texts(".reasoning"))
        assert page.texts(".reasoning") == ["because it is blue"]
        assert page.texts(".assistant .text") == ["The sky"]


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
EVENTS = {  # makes a file of the pixel, and gives it to the page
    "paste": "document.getElementById('prompt').dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, cancelable: true}))",
    "drop": "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}))",
}


@needs_browser
def test_images_are_pasted_dropped_and_chosen(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(base64.b64decode(PIXEL))
    make = f"const bytes = Uint8Array.from(atob('{PIXEL}'), (c) => c.charCodeAt(0)); const data = new DataTransfer();"
    make += "data.items.add(new File([bytes], 'a.png', {type: 'image/png'}));"
    with FakeServer() as server:
        page = Page(browser, server.url)
        for count, event in enumerate(EVENTS.values(), 1):
            page.js(f"{make} {event}")
            page.wait(lambda count=count: len(page.all("#images img")) == count)
        page.all("#file")[0].send_keys(str(tmp_path / "a.png"))
        page.wait(lambda: len(page.all("#images img")) == 3)
        page.all("#images img")[0].click()
        page.wait(lambda: len(page.all("#images img")) == 2)
        assert page.js("return images[0]") == f"data:image/png;base64,{PIXEL}"
        page.js(
            "window.sent = []; const before = fetch; fetch = (url, options) => { sent.push(options.body); return before(url, options); }"
        )
        page.say("What is it?")
        page.wait(page.idle)
        [message] = json.loads(page.js("return sent[0]"))["messages"]
        assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
        assert message["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
        assert len(page.all(".user img")) == 2
        assert page.all("#images img") == []
        assert "only reads text" in page.texts(".error .text")[0]


@pytest.mark.slow
def test_the_page_needs_no_key_and_allows_only_itself() -> None:
    with FakeServer(api_keys=["secret"], served_model_names=["<model>"]) as server:
        response = httpx.get(server.url + "/")
    assert response.status_code == 200
    assert "&lt;model&gt;" in response.text
    assert "<model>" not in response.text
    assert "graphs" not in response.text
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
