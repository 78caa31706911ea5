"""A small trained model tells what drawings show, over HTTP: alone, and beside requests that are only text."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL")

from tests.support.drawings import Drawing, draw, write_seeing
from tests.support.made_once import made_once
from tests.support.server_process import ServerProcess

OPTIONS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--enforce-eager",
    "--port",
    "0",
    "--max-model-len",
    "256",
    "--num-gpu-blocks-override",
    "256",
)
HELD_OUT = 20_000_000  # seeds from here on are in no training
TEXTS = {"What is the capital of France?": "Paris", "What is the capital of Italy?": "Rome"}


@pytest.fixture(scope="module")
def server(smollm2_dir: Path, run_dir: Path) -> Iterator[ServerProcess]:
    folder = made_once(run_dir / "seeing", lambda folder: write_seeing(smollm2_dir, folder))
    server = ServerProcess(str(folder), *OPTIONS)
    yield server
    assert server.stop() == 0


def answer(client: httpx.Client, content: str | list[dict[str, Any]]) -> str:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"]).strip()


def asked(drawing: Drawing, number: int) -> tuple[list[dict[str, Any]], str]:
    """The content of a message with one of the questions, and the right answer."""
    question, right = list(drawing.questions.items())[number % 3]
    buffer = io.BytesIO()
    drawing.image.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return parts if number % 2 == 0 else parts[::-1], right


def wrong_answers(server: ServerProcess, count: int, *, clients: int) -> list[tuple[str, str]]:
    """What is answered and what would be right, of the drawings that are not told right; each 4th request beside them is text."""
    with server.client() as client, ThreadPoolExecutor(clients) as threads:
        questions = [asked(draw(HELD_OUT + i), i) for i in range(count)]
        texts = list(TEXTS.items()) * (count // 8 + 1) if clients > 1 else []
        said_of_texts = [threads.submit(answer, client, text) for text, _ in texts[: count // 4]]
        said = list(threads.map(lambda one: answer(client, one[0]), questions))
        for one, (_, word) in zip(said_of_texts, texts, strict=False):
            assert word in one.result()
    return [(one, right) for one, (_, right) in zip(said, questions, strict=True) if one != right]


@pytest.mark.slow
def test_ten_drawings_beside_texts(server: ServerProcess) -> None:
    assert len(wrong_answers(server, 10, clients=12)) <= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("clients", [1, 16])
def test_a_hundred_drawings(server: ServerProcess, clients: int) -> None:
    wrong = wrong_answers(server, 100, clients=clients)
    assert len(wrong) <= 5, wrong
