"""The page at `/requests` in a real browser, and who may see its data."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import CHROMEDRIVER, CHROMIUM, MISSING, chromium
from tests.support.fake_server import FakeServer
from tests.support.slow_requests import LOADS, SLOW, Loads, start

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
needs_browser = pytest.mark.skipif(CHROMIUM is None or CHROMEDRIVER is None, reason=MISSING)
SAYS = {  # what the ledger of the slow request must say, by load
    "behind_another_key": ["waited for a batch slot", "of key bulk"],
    "evicted_prefix": ["computed its prompt (480 of its 480 tokens", "in 2 steps — Request cmpl-same-before", "were evicted"],
    "prompts_of_neighbors": ["steps that also computed prompts of others", "tokens of its prompt computed", "of key bulk"],
    "slow_grammar": ["waited for the grammar"],
    "preempted": ["was preempted, because others", "Preempted"],
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(webdriver, tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def wait(browser: Any, condition: Any) -> None:
    WebDriverWait(browser, 30).until(lambda _: condition())


def texts(browser: Any, selector: str) -> list[str]:
    """Read at once: the page makes its rows again twice a second."""
    found: list[str] = browser.execute_script("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector)
    return found


def ask(server: FakeServer, **options: Any) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
    httpx.post(server.url + "/v1/chat/completions", json=body, headers={"X-Request-Id": SLOW}, timeout=60, **options).raise_for_status()


@pytest.mark.slow
@needs_browser
def test_a_request_is_seen_while_it_runs_and_opens_its_ledger(browser: Any) -> None:
    with FakeServer(pause=0.1, admin_routes=True) as server:
        browser.get_log("browser")
        asked = threading.Thread(target=ask, args=(server,))
        asked.start()
        browser.get(server.url + "/requests")
        wait(browser, lambda: texts(browser, "#table tbody td:nth-child(2)") == ["decoding"])
        assert texts(browser, ".card b")[0] == "1"
        asked.join()
        wait(browser, lambda: texts(browser, "#table tbody td:nth-child(2)") == ["ended"])
        browser.execute_script("document.querySelector('#table tbody button').click()")
        [why] = texts(browser, "#ledger .why")
        assert "generated its tokens" in why
        assert [text for text in texts(browser, "#ledger td") if text.startswith("decode")]
        assert browser.execute_script("return document.querySelectorAll('#timeline .part.decode').length") == 1
        browser.find_element("id", "pause").click()
        ask(server)
        assert browser.execute_script("return live.length + ended.size") == 1
        browser.find_element("id", "pause").click()
        wait(browser, lambda: len(texts(browser, "#table tbody tr")) == 2)
        browser.find_element("id", "search").send_keys("nothing has this")
        assert texts(browser, "#table tbody tr") == []
        browser.find_element("id", "search").clear()
        browser.execute_script("document.getElementById('search').dispatchEvent(new Event('input'))")
        events = browser.execute_script("return trace().traceEvents")
        assert {"plain step", "decode", "thread_name"} <= {event["name"] for event in events}
        before = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        browser.find_element("id", "theme").click()
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != before
        assert texts(browser, "header nav a") == ["chat", "API", "metrics"]
        assert browser.get_log("browser") == []


@pytest.mark.slow
@needs_browser
def test_the_page_asks_for_the_admin_key(browser: Any) -> None:
    with FakeServer(admin_routes=True, admin_keys=["secret"], api_keys=["other"]) as server:
        browser.get(server.url + "/requests")
        wait(browser, lambda: "admin API key" in browser.find_element("id", "problem").text)
        browser.find_element("id", "key").send_keys("secret\t")
        wait(browser, lambda: texts(browser, ".card b")[:2] == ["0", "0"])


@pytest.mark.slow
def test_only_the_admin_key_opens_the_data() -> None:
    with FakeServer(admin_routes=True, admin_keys=["secret"], api_keys=["other"]) as server:
        assert httpx.get(server.url + "/requests").status_code == 200
        assert httpx.get(server.url + "/requests/data").status_code == 401
        assert httpx.get(server.url + "/requests/data", headers={"Authorization": "Bearer other"}).status_code == 403
        found = httpx.get(server.url + "/requests/data", headers={"Authorization": "Bearer secret"}).json()
        assert found["live"] == []
        policy = httpx.get(server.url + "/requests").headers["content-security-policy"]
        assert "unsafe" not in policy


@pytest.mark.exhaustive
@needs_browser
def test_the_page_says_why_a_request_was_slow(browser: Any, tiny_llama_dir: Path, tmp_path: Path) -> None:
    server = start(tiny_llama_dir, tmp_path)
    try:
        loads = Loads(server.url)
        for load in LOADS:
            data = loads.record(load)
            browser.get(server.url + "/requests")
            browser.execute_script("paused = true; take(arguments[0])", data)
            names = "[...document.querySelectorAll('#table tbody button')]"
            browser.execute_script(f"{names}.find((one) => one.innerText === arguments[0]).click()", SLOW)
            [said] = texts(browser, "#ledger")
            assert [one for one in SAYS[load.__name__] if one not in said] == [], (load.__name__, said)
    finally:
        server.stop()
