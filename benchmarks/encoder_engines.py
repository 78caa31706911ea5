"""One engine of `benchmarks.encoders` in its own process.

Reads a job (one line of JSON) from stdin and prints a line about itself. Then, for each further line {"texts": [...]}, embeds the texts and
prints its seconds and the embeddings' first numbers. Imports only the standard library and the engine's package, so that the Python of
another environment can run this file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Embed = Callable[[list[str]], Any]  # → a vector for each text


def ours(job: dict[str, Any]) -> tuple[Embed, str]:
    """This project's `LLM`."""
    from compile_and_serve import LLM, __version__

    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        device=job["device"],
        num_threads=job["threads"],
        max_model_len=512,
        max_num_seqs=256,
        load_format=job["load_format"],
        skip_tokenizer_init=job["load_format"] == "dummy",
    )
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)], __version__


def sentence_transformers(job: dict[str, Any]) -> tuple[Embed, str]:
    """sentence-transformers on torch."""
    import torch
    from sentence_transformers import SentenceTransformer, __version__

    torch.set_num_threads(job["threads"])
    model = SentenceTransformer(job["model"], device=job["device"], model_kwargs={"dtype": getattr(torch, job["dtype"])})
    model.max_seq_length = 512
    return lambda texts: model.encode(texts, batch_size=64, show_progress_bar=False), __version__


def fastembed(job: dict[str, Any]) -> tuple[Embed, str]:
    """onnxruntime as fastembed calls it, on a model that `--onnx` names (fastembed fetches its own from a hub)."""
    import numpy as np
    import onnxruntime
    import tokenizers

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job["threads"]
    session = onnxruntime.InferenceSession(job["onnx"], options, providers=["CPUExecutionProvider"])
    tokenizer = tokenizers.Tokenizer.from_file(f"{job['model']}/tokenizer.json")
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding()
    names = {one.name for one in session.get_inputs()}

    def embed(texts: list[str]) -> Any:
        encoded = tokenizer.encode_batch(texts)
        mask = np.array([one.attention_mask for one in encoded], dtype=np.int64)
        inputs = {"input_ids": np.array([one.ids for one in encoded], dtype=np.int64), "attention_mask": mask}
        inputs["token_type_ids"] = np.zeros_like(mask)
        rows = session.run(None, {name: value for name, value in inputs.items() if name in names})[0]
        means = (rows * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    return embed, onnxruntime.__version__


def llama_cpp(job: dict[str, Any]) -> tuple[Embed, str]:
    """llama.cpp on a GGUF file that `--gguf` names, in batches of 512 tokens."""
    import llama_cpp

    model = llama_cpp.Llama(
        job["gguf"], embedding=True, n_ctx=512, n_batch=512, n_ubatch=512, flash_attn=True, n_threads=job["threads"],
        n_threads_batch=job["threads"], pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN, verbose=False,
    )  # fmt: skip
    return lambda texts: model.embed(texts, normalize=True), llama_cpp.__version__


ENGINES = {"compile-and-serve": ours, "sentence-transformers": sentence_transformers, "onnxruntime": fastembed, "llama.cpp": llama_cpp}


def main() -> None:
    job = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    embed, version = ENGINES[job["engine"]](job)
    print(json.dumps({"version": version, "start_seconds": round(time.perf_counter() - start, 2)}), flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        start = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "first": [float(value) for value in vectors[0][:8]]}), flush=True)


if __name__ == "__main__":
    main()
