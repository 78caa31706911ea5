"""`bench`: correct figures, also from a server that fails."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.serve.cli.bench.metrics import RequestTrace, summarize
from compile_and_serve.serve.cli.bench.online import arrival_delays
from tests.serve.test_cli import SMALL_ENGINE, run


def test_figures_of_known_times() -> None:
    traces = [
        RequestTrace(sent=10.0, prompt_tokens=100, times=[10.5, 10.6, 10.8], output_tokens=3),
        RequestTrace(sent=10.0, prompt_tokens=50, times=[11.5], output_tokens=1),
        RequestTrace(sent=10.0, prompt_tokens=7, times=[10.1], output_tokens=1, error="HTTP 503"),
        RequestTrace(sent=10.0, prompt_tokens=7),
    ]
    figures = summarize(traces, seconds=2.0)
    assert (figures["completed"], figures["failed"]) == (2, 2)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (150, 4)
    assert figures["requests_per_second"] == 1.0
    assert figures["output_tokens_per_second"] == 2.0
    assert figures["total_tokens_per_second"] == 77.0
    assert figures["ttft_ms"] == {"mean": 1000.0, "p50": 1000.0, "p90": 1400.0, "p99": 1490.0}
    assert figures["tpot_ms"]["mean"] == pytest.approx(150.0)
    assert figures["itl_ms"]["mean"] == pytest.approx(150.0)
    assert figures["itl_ms"]["p99"] == pytest.approx(199.0)
    assert figures["e2e_ms"]["mean"] == pytest.approx(1150.0)


def test_no_completed_request_means_no_distribution() -> None:
    figures = summarize([RequestTrace(sent=0.0, prompt_tokens=1, error="gone")], seconds=1.0)
    assert figures["ttft_ms"] is None
    assert figures["output_tokens_per_second"] == 0.0


def test_latency(tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    lengths = ["--input-len", "9", "--output-len", "5", "--batch-size", "2", "--num-iters", "3"]
    code, out, err = run("bench", "latency", str(tiny_llama_dir), *lengths, "--output-json", str(file), *SMALL_ENGINE)
    assert code == 0, err
    row = json.loads(out)
    assert (row["completed"], row["failed"]) == (6, 0)
    assert (row["prompt_tokens"], row["output_tokens"]) == (54, 30)
    assert row["e2e_ms"]["mean"] == pytest.approx(row["ttft_ms"]["mean"] + 4 * row["tpot_ms"]["mean"], rel=1e-3)
    assert row["e2e_ms"]["mean"] * 3 <= row["seconds"] * 1e3
    assert json.loads(file.read_text()) == row
    assert "TTFT (ms)" in err
    assert "6 requests in" in err


def test_throughput(tiny_llama_dir: Path) -> None:
    workload = ["--num-prompts", "6", "--input-len", "20", "--output-len", "10", "--random-range-ratio", "0.5"]
    rows = []
    for seed in ("0", "0", "1"):
        code, out, err = run("bench", "throughput", str(tiny_llama_dir), *workload, "--seed", seed, *SMALL_ENGINE)
        assert code == 0, err
        rows.append(json.loads(out))
    assert rows[0]["completed"] == 6
    assert 60 <= rows[0]["prompt_tokens"] <= 180
    assert 30 <= rows[0]["output_tokens"] <= 90
    sizes = [(row["prompt_tokens"], row["output_tokens"]) for row in rows]
    assert sizes[0] == sizes[1] != sizes[2]
    assert rows[0]["device"] == "cpu"


def test_throughput_of_several_sequences_per_prompt(tiny_llama_dir: Path) -> None:
    workload = ["--num-prompts", "3", "--n", "4", "--input-len", "20", "--output-len", "6"]
    code, out, err = run("bench", "throughput", str(tiny_llama_dir), *workload, *SMALL_ENGINE)
    assert code == 0, err
    row = json.loads(out)
    assert (row["n"], row["completed"], row["prompt_tokens"], row["output_tokens"]) == (4, 12, 60, 72)


class StreamingServer(BaseHTTPRequestHandler):
    """Streams 4 chunks of 2 tokens, 20 ms apart; fails every `fail_every`-th request with a 503, or in the stream.

    The first requests wait for each other, as many as `together` says, so that a busy machine does not decide how many are under way.
    """

    under_way = most_under_way = served = 0
    fail_every = together = 0
    barrier: threading.Barrier
    with_usage = True
    arrivals: list[float] = []  # noqa: RUF012 (each test makes a subclass)
    bodies: list[dict[str, Any]] = []  # noqa: RUF012
    lock = threading.Lock()

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "first-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        with self.lock:
            kind.served += 1
            number = kind.served
            kind.under_way += 1
            kind.most_under_way = max(kind.most_under_way, kind.under_way)
            kind.arrivals.append(time.perf_counter())
            kind.bodies.append(body)
        if number <= kind.together:
            kind.barrier.wait(timeout=30)
        self._stream(number, chat="messages" in body)

    def _leaves(self) -> None:
        """Before the client knows that its request is over, and sends another."""
        with self.lock:
            type(self).under_way -= 1

    def _stream(self, number: int, *, chat: bool) -> None:
        if self.fail_every and number % self.fail_every == 0:
            self._leaves()
            self._answer(503, b'{"error": {"message": "full"}}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for _ in range(4):
            time.sleep(0.02)
            self._event({"choices": [{"index": 0, "delta": {"content": "ab "}} if chat else {"index": 0, "text": "ab "}]})
        if self.with_usage:
            self._event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 8}})
        self._leaves()
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def server(**settings: Any) -> Iterator[tuple[str, type[StreamingServer]]]:
    fresh: dict[str, Any] = {"arrivals": [], "bodies": [], "under_way": 0, "most_under_way": 0, "served": 0}
    fresh["barrier"] = threading.Barrier(max(1, settings.get("together", 0)))
    handler = type("Handler", (StreamingServer,), fresh | settings)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}", handler
    finally:
        httpd.shutdown()
        httpd.server_close()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_serve_uses_the_servers_token_counts(endpoint: str) -> None:
    with server(together=2) as (url, handler):
        lengths = ["--num-prompts", "6", "--max-concurrency", "2", "--input-len", "5", "--output-len", "8"]
        code, out, err = run("bench", "serve", "--base-url", url + "/v1", "--endpoint", endpoint, *lengths)
    assert code == 0, err
    row = json.loads(out)
    assert row["model"] == "first-model"
    assert (row["completed"], row["failed"]) == (6, 0)
    assert (row["prompt_tokens"], row["output_tokens"]) == (66, 48)
    assert handler.most_under_way == 2
    assert row["ttft_ms"]["p50"] >= 20
    assert row["itl_ms"]["p50"] >= 15
    assert row["tpot_ms"]["mean"] == pytest.approx((row["e2e_ms"]["mean"] - row["ttft_ms"]["mean"]) / 7, rel=0.01)
    for body in handler.bodies:
        assert body["max_tokens"] == 8
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}


@pytest.mark.exhaustive
def test_serve_draws_lengths_around_their_means() -> None:
    lengths = []
    for seed in ("3", "3", "4"):
        with server() as (url, handler):
            sizes = ["--num-prompts", "12", "--input-len", "20", "--output-len", "10", "--random-range-ratio", "0.5"]
            code, _, err = run("bench", "serve", "--base-url", url, *sizes, "--seed", seed)
        assert code == 0, err
        lengths.append(sorted((len(body["prompt"].split()), body["max_tokens"]) for body in handler.bodies))
    assert lengths[0] == lengths[1] != lengths[2]
    words, tokens = zip(*lengths[0], strict=True)
    assert 10 <= min(words) < max(words) <= 30
    assert 5 <= min(tokens) < max(tokens) <= 15


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_each_turn_of_a_conversation_begins_with_all_that_was_said(endpoint: str) -> None:
    with server() as (url, handler):
        sizes = ["--num-prompts", "2", "--turns", "3", "--max-concurrency", "1", "--input-len", "4", "--output-len", "8"]
        code, out, err = run("bench", "serve", "--base-url", url, "--endpoint", endpoint, *sizes)
    assert code == 0, err
    row = json.loads(out)
    assert (row["completed"], row["turns"], row["prompt_tokens"]) == (6, 3, 66)
    said = [
        body["prompt"] if endpoint == "completions" else [message["content"] for message in body["messages"]] for body in handler.bodies
    ]
    assert said[0] != said[3]
    answer = "ab " * 4 if endpoint == "completions" else ["ab " * 4]
    for before, now in (*pairwise(said[:3]), *pairwise(said[3:])):
        assert now[: len(before) + len(answer)] == before + answer
        assert len(now) > len(before) + len(answer)
    if endpoint == "chat":
        assert [message["role"] for message in handler.bodies[2]["messages"]] == ["user", "assistant", "user", "assistant", "user"]


def test_turns_after_one_that_failed_are_not_sent() -> None:
    with server(fail_every=2) as (url, handler):
        sizes = ["--num-prompts", "1", "--turns", "5", "--input-len", "4", "--output-len", "8"]
        code, out, err = run("bench", "serve", "--base-url", url, *sizes)
    assert code == 0, err
    row = json.loads(out)
    assert (row["completed"], row["failed"], row["not_sent"], handler.served) == (1, 1, 3, 2)


def test_serve_from_several_processes() -> None:
    with server(together=3) as (url, handler):
        sizes = ["--num-prompts", "7", "--input-len", "5", "--output-len", "8", "--random-range-ratio", "0.5"]
        clients = ["--num-clients", "2", "--max-concurrency", "3"]
        code, out, err = run("bench", "serve", "--base-url", url, *sizes, *clients)
    assert code == 0, err
    row = json.loads(out)
    assert (row["completed"], row["failed"], row["num_clients"]) == (7, 0, 2)
    assert handler.most_under_way == 3
    assert len({body["prompt"] for body in handler.bodies}) == 7
    assert row["e2e_ms"]["p99"] <= row["seconds"] * 1e3


def test_serve_without_usage_counts_chunks_and_can_omit_ignore_eos() -> None:
    with server(with_usage=False) as (url, handler):
        code, out, err = run("bench", "serve", "--base-url", url, "--num-prompts", "2", "--model", "m", "--no-ignore-eos")
    assert code == 0, err
    assert json.loads(out)["output_tokens"] == 8
    assert all("ignore_eos" not in body and body["model"] == "m" for body in handler.bodies)


def test_serve_counts_failures_and_continues() -> None:
    with server(fail_every=3) as (url, _):
        code, out, err = run("bench", "serve", "--base-url", url, "--num-prompts", "6", "--max-concurrency", "1")
    assert code == 0, err
    row = json.loads(out)
    assert (row["completed"], row["failed"]) == (4, 2)
    assert row["first_error"].startswith("HTTP 503")


def test_serve_fails_if_every_request_fails() -> None:
    with server(fail_every=1) as (url, _):
        code, out, err = run("bench", "serve", "--base-url", url, "--num-prompts", "2")
    assert code == 1
    assert out == ""
    assert "every request failed, the first with: HTTP 503" in err


def test_poisson_arrivals_are_spread() -> None:
    """The last request is sent when it is due, however late a busy machine lets it arrive. All at once would take 0.2 s."""
    with server() as (url, _):
        code, out, err = run("bench", "serve", "--base-url", url, "--num-prompts", "8", "--request-rate", "4", "--seed", "3")
    assert code == 0, err
    due = sum(arrival_delays(random.Random(3), 8, 4.0))
    assert due > 1
    assert due <= json.loads(out)["seconds"] < 10 * due


def test_poisson_arrivals_are_seeded() -> None:
    delays = [arrival_delays(random.Random(seed), 2000, 4.0) for seed in (3, 3, 4)]
    assert delays[0] == delays[1] != delays[2]
    assert sum(delays[0]) / 2000 == pytest.approx(1 / 4, rel=0.1)
