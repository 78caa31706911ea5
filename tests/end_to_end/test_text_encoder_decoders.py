"""Encoder-decoders of text: tiny random checkpoints give the tokens of transformers' classes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.beam_search import BeamSearchParams
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.serve.app import create_app
from compile_and_serve.serve.settings import ServerSettings
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.text_models import MAX_LEN, greedy, write_bart, write_t5

OPTIONS: dict[str, Any] = {"load_format": "auto", "skip_tokenizer_init": True}
PROMPTS = {"a": [7, 9, 11, 2], "b": [5], "c": list(range(20, 20 + MAX_LEN)), "d": list(range(30, 60)), "e": [7, 9, 11, 2]}
WRITERS: dict[str, Callable[[Path], Any]] = {"bart": write_bart, "t5": write_t5, "t5-gated": partial(write_t5, gated=True)}


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, WRITERS[request.param](folder)


def requests(count: int, **params: Any) -> list[EngineRequest]:
    return [request(name, prompt, max_tokens=count, ignore_eos=True, **params) for name, prompt in PROMPTS.items()]


def expected(model: Any, count: int) -> dict[str, list[int]]:
    return {name: greedy(model, prompt, count) for name, prompt in PROMPTS.items()}


def test_tokens_are_those_of_transformers(model: tuple[Path, Any]) -> None:
    """Prompts of different lengths together; equal ones are encoded once. Steps have room for one long prompt."""
    folder, reference = model
    core = EngineCore(tiny_config(folder, **OPTIONS, max_encoder_tokens=MAX_LEN + 4))
    wanted = expected(reference, 32)
    assert tokens_of(run_requests(core, requests(32))) == wanted
    assert core._scheduler.encoder is not None
    assert core._scheduler.encoder.num_encoded == 4
    assert tokens_of(run_requests(core, requests(32))) == wanted
    for wrong, sentence in (
        (request("x", list(range(MAX_LEN + 1))), "the model's encoder reads 1 to"),
        (request("x", [5], prompt_logprobs=0), "leave out prompt_logprobs"),
    ):
        with pytest.raises(ValueError, match=sentence):
            core.add_request(wrong)
    core.shutdown()


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
def test_preemption_changes_no_token(model: tuple[Path, Any]) -> None:
    folder, reference = model
    core = EngineCore(tiny_config(folder, **OPTIONS, num_kv_blocks=46))
    assert tokens_of(run_requests(core, requests(40))) == expected(reference, 40)
    assert core._scheduler.stats().num_preemptions > 0
    core.shutdown()


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
def test_offline(model: tuple[Path, Any]) -> None:
    """The prompt and the output have a limit each."""
    folder, reference = model
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "device": "cpu", "num_threads": 1, "skip_tokenizer_init": True}
    with LLM(str(folder), **options) as llm:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS.values()]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False))
        assert {name: one.outputs[0].token_ids for name, one in zip(PROMPTS, outputs, strict=True)} == expected(reference, 32)
        assert [len(one.prompt_token_ids) for one in outputs] == [len(prompt) for prompt in PROMPTS.values()]
        for params, sentence in (
            (SamplingParams(max_tokens=MAX_LEN), "its decoder gives"),
            (SamplingParams(prompt_logprobs=0), "leave them"),
        ):
            with pytest.raises(ValueError, match=sentence):
                llm.generate(prompts, params)
        with pytest.raises(ValueError, match="Beam search does not run"):
            llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=4))


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["bart"])
@pytest.mark.asyncio
async def test_over_http(model: tuple[Path, Any]) -> None:
    folder, reference = model
    client = AsyncEngineClient(tiny_config(folder, **OPTIONS))
    await client.start()
    app = create_app(client, None, ServerSettings(served_model_names=("m",), access_log=False, throughput_log=0))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as http:

            async def ask(prompt: list[int], **fields: Any) -> httpx.Response:
                body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **fields}
                return await http.post("/v1/completions", json=body)

            answers = await asyncio.gather(*(ask(prompt) for prompt in PROMPTS.values()))
            tokens = {name: one.json()["choices"][0]["token_ids"] for name, one in zip(PROMPTS, answers, strict=True)}
            assert tokens == expected(reference, 32)
            assert [one.json()["usage"]["prompt_tokens"] for one in answers] == [len(prompt) for prompt in PROMPTS.values()]
            for fields, sentence in (
                ({"max_tokens": MAX_LEN}, "its decoder gives"),
                ({"prompt_logprobs": 1}, "leave them out"),
                ({"use_beam_search": True, "n": 2}, "Beam search does not run"),
            ):
                refused = await ask([5], **fields)
                assert refused.status_code == 400, refused.text
                assert sentence in refused.json()["error"]["message"]


@pytest.mark.slow
def test_compiled(model: tuple[Path, Any]) -> None:
    folder, reference = model
    core = EngineCore(tiny_config(folder, **OPTIONS, enforce_eager=False))
    assert tokens_of(run_requests(core, requests(32))) == expected(reference, 32)
    core.shutdown()


@pytest.mark.exhaustive
def test_on_two_ranks(model: tuple[Path, Any]) -> None:
    folder, reference = model
    config = tiny_config(folder, **OPTIONS, tensor_parallel_size=2)
    if folder.name.startswith("t5"):
        with pytest.raises(ValueError, match="tensor parallel size of 1"):
            EngineCore(config)
        return
    core = EngineCore(config)
    assert tokens_of(run_requests(core, requests(32))) == expected(reference, 32)
    core.shutdown()
