"""A real server with LoRA adapters: over HTTP they give the tokens that the library gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compile_and_serve import LLM, LoRARequest, SamplingParams
from tests.support.adapters import write_adapter
from tests.support.server_process import ServerProcess

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "num_threads": 1,
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
}
PROMPT = [5, 17, 200, 31]


@pytest.fixture(scope="module")
def folder(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        write_adapter(folder / name, tiny_llama_dir, 8, seed=seed, alpha=64.0)
    write_adapter(folder / "big", tiny_llama_dir, 16)
    return folder


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path, folder: Path, shared_cache_dir: Path) -> Iterator[ServerProcess]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if value is not True]
    server = ServerProcess(
        str(tiny_llama_dir), "--port", "0", "--served-model-name", "base", "--enable-lora", *flags,
        "--lora-modules", f"first={folder / 'first'}", "--lora-dir", str(folder), "--allow-lora-without-admin-key",
        "--cache-dir", str(shared_cache_dir), "--api-server-count", "2",
    )  # fmt: skip
    yield server
    assert server.stop() == 0, server.output


def complete(server: ServerProcess, model: str) -> list[httpx.Response]:
    """One request's answers over several connections, which go to any API process."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answers = []
    for _ in range(6):
        with server.client() as http:
            answers.append(http.post("/v1/completions", json=body | {"return_token_ids": True}))
    return answers


def tokens_over_http(server: ServerProcess, model: str) -> list[int]:
    first, *others = complete(server, model)
    assert first.status_code == 200, first.text
    tokens = [answer.json()["choices"][0]["token_ids"] for answer in (first, *others)]
    assert tokens == [tokens[0]] * 6
    return tokens[0]


@pytest.mark.slow
def test_adapters_answer_as_in_the_library(server: ServerProcess, tiny_llama_dir: Path, folder: Path, shared_cache_dir: Path) -> None:
    with server.client() as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "first"]
        refused = http.post("/v1/load_lora_adapter", json={"lora_name": "big", "lora_path": "big"})
        assert refused.status_code == 400
        assert "rank 16, but the engine takes at most 8" in refused.json()["error"]["message"]
        loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": "second"})
        assert loaded.status_code == 200, loaded.text
        over_http = [tokens_over_http(server, name) for name in ("base", "first", "second", "first")]
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 200
        assert {answer.status_code for answer in complete(server, "second")} == {404}
        assert tokens_over_http(server, "first") == over_http[1]
    with LLM(str(tiny_llama_dir), cache_dir=shared_cache_dir, **ENGINE) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPT}] * 3,
            SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
            use_tqdm=False,
            lora_request=[None, *(LoRARequest(name, i, str(folder / name)) for i, name in ((1, "first"), (2, "second")))],
        )
    expected = [output.outputs[0].token_ids for output in outputs]
    assert over_http == [*expected, expected[1]]
    assert len({tuple(tokens) for tokens in expected}) == 3
