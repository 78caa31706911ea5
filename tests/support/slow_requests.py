"""Loads of a tiny server in which one request is slow, for another reason each: what the page `/requests` shows of them.

    python -m tests.support.slow_requests MODEL FOLDER

writes FOLDER/NAME.json, answers of `/requests/data`. In each the slow request has the id `the-slow-one`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.server_process import ServerProcess

SLOW = "the-slow-one"
BULK, SHOP, ADMIN = "key of bulk", "key of shop", "key of admin"
OPTIONS = (
    *("--port", "0", "--device", "cpu", "--dtype", "float32", "--enforce-eager", "--num-threads", "1", "--max-model-len", "512"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "48", "--block-size", "16"),
    *("--enable-admin-routes", "--admin-api-key", ADMIN),
)


class Loads:
    """Sends loads to a server that was started with `OPTIONS` and `tenants_file`."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self._running: list[threading.Thread] = []
        self._failures: list[str] = []

    def record(self, load: Callable[[Loads], None]) -> dict[str, Any]:
        """What the page would show when the load has ended."""
        began = time.time()
        load(self)
        for thread in self._running:
            thread.join()
        self._running.clear()
        assert not self._failures, self._failures
        time.sleep(0.1)  # the last records end behind their answers
        answer = self._http.get("/requests/data", params={"since": began}, headers={"Authorization": f"Bearer {ADMIN}"})
        found: dict[str, Any] = answer.raise_for_status().json()
        assert [one for one in found["ended"] if one["request_id"] == SLOW], found
        return found

    def send(self, name: str, prompt: list[int], max_tokens: int = 1, *, key: str = SHOP, **body: Any) -> None:
        """A request, in a thread."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **body}

        def ask() -> None:
            answer = self._http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}", "X-Request-Id": name})
            if answer.status_code != 200:
                self._failures.append(answer.text)

        thread = threading.Thread(target=ask)
        thread.start()
        self._running.append(thread)

    def wait(self) -> None:
        """Until all that was sent has ended."""
        for thread in self._running:
            thread.join()


def prompt_of(number: int, length: int) -> list[int]:
    """Unlike those of other numbers from the first token on."""
    return [10 + (number * 37 + place * 11 + place * place * (number + 1)) % 250 for place in range(length)]


def behind_another_key(loads: Loads) -> None:
    for number in range(4):
        loads.send(f"bulk-{number}", prompt_of(number, 20), 170, key=BULK)
    time.sleep(0.1)
    for number in range(4, 8):
        loads.send(f"shop-{number}", prompt_of(number, 20), 170)
    time.sleep(0.05)
    loads.send(SLOW, prompt_of(9, 20), 5)


def evicted_prefix(loads: Loads) -> None:
    document = prompt_of(20, 480)
    loads.send("same-before", document)
    loads.wait()
    for number in range(3):
        loads.send(f"other-{number}", prompt_of(21 + number, 440))
        loads.wait()
    loads.send(SLOW, document)


def prompts_of_neighbors(loads: Loads) -> None:
    loads.send(SLOW, prompt_of(30, 20), 100)
    time.sleep(0.05)
    for number in range(12):
        loads.send(f"long-{number}", prompt_of(31 + number, 490), key=BULK)


def slow_grammar(loads: Loads) -> None:
    names = {f"field_{number}": {"type": "string", "pattern": f"^[a-z]{{{number % 7 + 1},40}}[0-9]{{2,9}}$"} for number in range(400)}
    schema = {"type": "object", "properties": names, "required": list(names)[:50], "additionalProperties": False}
    loads.send("quick", prompt_of(50, 20), 5)
    loads.send(SLOW, prompt_of(51, 20), 5, structured_outputs={"json": schema}, ignore_eos=False)


def preempted(loads: Loads) -> None:
    for number in range(3):
        loads.send(f"first-{number}", prompt_of(60 + number, 30), 300)
    time.sleep(0.1)
    loads.send(SLOW, prompt_of(64, 30), 200)


LOADS = (behind_another_key, evicted_prefix, prompts_of_neighbors, slow_grammar, preempted)


def start(model: Path, folder: Path) -> ServerProcess:
    """A server for the loads. folder: for its file of tenants."""
    tenants = folder / "tenants.yaml"
    tenants.write_text(json.dumps([{"key": BULK, "name": "bulk"}, {"key": SHOP, "name": "shop"}]))  # JSON is YAML
    return ServerProcess(str(model), *OPTIONS, "--tenants", str(tenants))


def main() -> None:
    model, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as private:
        server = start(model, Path(private))
    try:
        loads = Loads(server.url)
        for load in LOADS:
            (folder / f"{load.__name__}.json").write_text(json.dumps(loads.record(load)))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
