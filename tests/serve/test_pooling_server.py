"""A server process that pools, and one that searches with beams, on a tiny model."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from compile_and_serve import LLM
from compile_and_serve.runtime.beam_search import BeamSearchParams
from tests.runtime.pooling.test_embeddings import hidden_states, pooled
from tests.support.server_process import ServerProcess

OPTIONS = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--enforce-eager", "--max-model-len", "128",
           "--num-gpu-blocks-override", "256", "--num-threads", "1")  # fmt: skip
TEXTS = ["Hello there", "the quick brown fox jumps over the lazy dog", "a"]


@pytest.mark.slow
def test_embeddings_of_a_server(tiny_llama_dir: Path) -> None:
    chunks = ("--max-num-batched-tokens", "12", "--max-num-seqs", "4")
    server = ServerProcess(str(tiny_llama_dir), "--runner", "pooling", "--pooling-type", "mean", *OPTIONS, *chunks)
    try:
        with server.client() as http:
            tokens = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
            answer = http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"}).json()
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 501
            info = http.get("/metrics").text
        for one, rows in zip(answer["data"], hidden_states(tiny_llama_dir, tokens), strict=True):
            ours = np.frombuffer(base64.b64decode(one["embedding"]), dtype="<f4")
            np.testing.assert_allclose(ours, pooled(rows, "mean"), atol=2e-5)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
        assert 'request_success_total{finished_reason="stop"' in info
    finally:
        assert server.stop() == 0, server.output


@pytest.mark.slow
def test_beam_search_of_a_server(tiny_llama_dir: Path) -> None:
    server = ServerProcess(str(tiny_llama_dir), *OPTIONS, "--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs")
    try:
        with server.client() as http:
            body = {"prompt": TEXTS[0], "max_tokens": 5, "use_beam_search": True, "n": 3, "return_token_ids": True}
            choices = http.post("/v1/completions", json=body).json()["choices"]
            one = {"prompt": TEXTS[0], "max_tokens": 1, "temperature": 0.7, "top_k": 2, "logprobs": -1, "seed": 1}
            [top] = http.post("/v1/completions", json=one).json()["choices"][0]["logprobs"]["top_logprobs"]
    finally:
        assert server.stop() == 0, server.output
    assert sum(value > -9999 for value in top.values()) == 2
    assert len(top) > 100
    options = {"max_num_seqs": 8, "max_model_len": 128, "num_kv_blocks": 256, "num_threads": 1, "enforce_eager": True}
    with LLM(str(tiny_llama_dir), dtype="float32", device="cpu", **options) as llm:
        [output] = llm.beam_search(TEXTS[0], BeamSearchParams(beam_width=3, max_tokens=5))
        prompt = llm.get_tokenizer().encode(TEXTS[0])
    assert [[*prompt, *choice["token_ids"]] for choice in choices] == [one.tokens for one in output.sequences]
