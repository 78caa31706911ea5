"""Tiny engines: a 2-layer Llama of random weights from a config alone, and a loop that runs requests through an engine core."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput, Tenant
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.step_time import StepTime

VOCAB_SIZE = 320
MAX_LEN = 256


def write_tiny_model(folder: Path) -> Path:
    """A folder with nothing but a config.json: for load_format "dummy"."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_LEN,
        "initializer_range": 0.3,  # wide enough that greedy choices are not near ties
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tiny_config(folder: Path, **options: Any) -> EngineConfig:
    """Engine options for that folder; float32 and, on one rank, eager unless said otherwise."""
    eager = options.get("tensor_parallel_size", 1) == options.get("pipeline_parallel_size", 1) == 1
    defaults = {
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": eager,
        "device": "cpu",
        "block_size": 4,
        "max_num_seqs": 32,
        "num_kv_blocks": 2048,
        "num_threads": 1,
    }
    return make_engine_config(str(folder), **(defaults | options))


def request(
    request_id: str, prompt: Sequence[int], *, stop_token_ids: Sequence[int] = (), eos_token_ids: Sequence[int] = (), **params: Any
) -> EngineRequest:
    """A request; greedy for 16 tokens unless `params` say otherwise."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | params))
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=sampling,
        stop_token_ids=list(stop_token_ids),
        eos_token_ids=list(eos_token_ids),
    )


def run_requests(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[RequestOutput]]:
    """Every output of every request, in order."""
    for one in requests:
        core.add_request(one)
    outputs: dict[str, list[RequestOutput]] = {name: [] for one in requests for name in one.request_ids}
    while core.has_work():
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    """Request → all of its tokens."""
    return {name: [token for step in steps for token in step.new_token_ids] for name, steps in outputs.items()}


def prompt_of(index: int, length: int) -> list[int]:
    return [(index * 37 + position * 11 + position * position) % VOCAB_SIZE for position in range(length)]


def mixed_requests() -> list[EngineRequest]:
    """Greedy and random, with every option that looks at logits; prompts of 1 to 60 tokens."""
    options: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"max_tokens": 40},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2, "max_tokens": 30},
        {"temperature": 1.2, "seed": 3, "top_k": 12, "logit_bias": {7: 2.0}},
        {"allowed_token_ids": list(range(50, 90)), "logprobs": 2},
        {"temperature": 0.7, "seed": 4, "bad_words_token_ids": [[5], [6, 7]], "presence_penalty": 1.0},
        {"min_tokens": 9, "max_tokens": 25},
        {"temperature": 0.9, "seed": 5, "top_p": 0.7, "max_tokens": 33, "prompt_logprobs": 1},
    ]
    lengths = [1, 7, 16, 33, 60, 4, 21, 45, 12, 29]
    return [
        request(f"r{i}", prompt_of(i, length), eos_token_ids=[11], **given)
        for i, (length, given) in enumerate(zip(lengths, options, strict=True))
    ]


def of_two_keys(requests: Sequence[EngineRequest], sits_out: pytest.MonkeyPatch) -> list[EngineRequest]:
    """The requests, of two API keys. Costly decodes of one of them sit out most steps beside decodes of the other, at random."""
    rng = random.Random(0)
    sits_out.setattr(StepTime, "may_hold", True)
    sits_out.setattr(StepTime, "is_overdrawn", lambda self, key: False)
    sits_out.setattr(StepTime, "needs_step_without", lambda self, key: key == "a" and rng.random() < 0.7)
    return [msgspec.structs.replace(one, tenant=Tenant("ab"[number % 3 == 0])) for number, one in enumerate(requests)]
