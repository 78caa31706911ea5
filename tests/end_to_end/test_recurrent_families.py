"""Recurrent and hybrid models that transformers wrote: the same greedy tokens, however prompts are cut, batched and reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner.state_memory import PageLayout
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.recurrent_models import FAMILIES, write_recurrent
from tests.support.transformers_models import greedy_tokens

LENGTHS = (1, 15, 16, 17, 400)
NUM_TOKENS = 40
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 131 + i * i * 7 + i * 31) % 317 + 3 for i in range(length)]


def engine(model: Path, **options: Any) -> EngineCore:
    """An eager engine with the model's weights."""
    # The kernels of latent attention would run in Triton's interpreter, which takes a minute a test.
    backend = {"attention_backend": "torch"} if "KimiLinear" in (model / "config.json").read_text() else {}
    return EngineCore(tiny_config(model, load_format="auto", block_size=16, **backend, **options))


def pages_of(model: Path) -> PageLayout:
    """The layout of the model's pages, at 16 tokens a block."""
    probe = engine(model, num_kv_blocks=4096)
    pages: PageLayout = probe.executor.worker.loaded.pages  # type: ignore[attr-defined]
    probe.shutdown()
    return pages


PROMPTS = [prompt_of(seed, length) for seed, length in enumerate(LENGTHS)]


# A convolution, the delta rule, SSD beside attention in each layer, a selective scan with experts, and KDA with latent attention.
QUICK = ("Lfm2ForCausalLM", "Qwen3_5ForCausalLM", "FalconH1ForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM")
WITH_SLOW = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(scope="module", params=WITH_SLOW)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent(tmp_path_factory.mktemp("recurrent") / "model", request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return greedy_tokens(model, PROMPTS, NUM_TOKENS)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["Jamba", "KimiLinear", "Lfm2ForCausalLM", "Mamba2ForCausalLM-plain"])
@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["plain", "ngram"])
def test_batches_and_chunks(model: Path, expected: list[list[int]], speculative_config: dict[str, Any] | None) -> None:
    """Prompts in chunks beside decodes, in a pool with little room."""
    common: dict[str, Any] = {"max_num_batched_tokens": 96, "speculative_config": speculative_config}
    pages = pages_of(model)
    slot, per_page = sum(pages.pages_per_slot.values()), max(pages.tokens_per_page.values(), default=16)
    room = 2 * slot + -(-500 // per_page) + 2 * slot  # for the longest request, and a little more
    core = engine(model, **common, max_model_len=500, num_kv_blocks=room)
    requests = [request(f"r{i}", prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    outputs = tokens_of(run_requests(core, requests))
    assert [outputs[one.request_id] for one in requests] == expected
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["KimiLinear"])
@pytest.mark.parametrize("model", QUICK, indirect=True, scope="module")
def test_preemptions(model: Path) -> None:
    """Three sequences outgrow a pool that has room for one of them at its full length."""
    pages = pages_of(model)
    slot, per_page = sum(pages.pages_per_slot.values()), max(pages.tokens_per_page.values(), default=0)
    if not per_page:
        pytest.skip("its state does not grow, so that nothing is preempted")
    prompts, num_tokens = [prompt_of(seed, per_page - 1 - seed) for seed in range(3)], 3 * per_page
    core = engine(model, max_model_len=4 * per_page, num_kv_blocks=3 * slot + 7)
    requests = [request(f"r{i}", prompt, max_tokens=num_tokens, ignore_eos=True) for i, prompt in enumerate(prompts)]
    outputs = tokens_of(run_requests(core, requests))
    assert [outputs[one.request_id] for one in requests] == greedy_tokens(model, prompts, num_tokens)
    assert core.stats().num_preemptions
    core.shutdown()


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["KimiLinear", "Mamba2"])
def test_turns_and_branches_reuse_their_prefix(model: Path) -> None:
    core = engine(model, num_kv_blocks=4096, max_num_batched_tokens=512)
    sizes = core.executor.worker.loaded.pages.tokens_per_page  # type: ignore[attr-defined]
    block = max(sizes.values(), default=16)  # a page holds a unit of the state, so that it may have room for more than 16 tokens

    def check(name: str, prompt: list[int], least_cached: int) -> list[int]:
        one = request(name, prompt, max_tokens=16, ignore_eos=True)
        outputs = run_requests(core, [one])
        assert max(output.num_cached_tokens for output in outputs[name]) >= least_cached
        made = tokens_of(outputs)[name]
        assert made == greedy_tokens(model, [prompt], 16)[0]
        return [*prompt, *made]

    history = check("turn 1", prompt_of(7, 200), 0)
    for turn in (2, 3):
        history = check(f"turn {turn}", [*history, *prompt_of(turn, 40)], len(history) - block - 1)
    check("branch 1", [*prompt_of(7, 150), *prompt_of(8, 30)], 0)
    # Where prefixes part is seen in the groups that keep tokens.
    check("branch 2", [*prompt_of(7, 150), *prompt_of(9, 30)], 150 // block * block if sizes else 0)
    core.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.slow)], indirect=True, scope="module")
def test_compiled(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """`test_two_ranks` compiles the others."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 5}
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(str(model), **options, cache_dir=tmp_path / "cache", max_num_batched_tokens=96) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    assert outputs == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", QUICK[2:])
def test_two_ranks(architecture: str, tmp_path: Path) -> None:
    """Ranks share the heads of attention and of recurrent layers, and a convolution's channels."""
    model = write_recurrent(tmp_path / "model", architecture)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 5}
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]
    with LLM(str(model), **options, cache_dir=tmp_path / "cache", tensor_parallel_size=2) as llm:
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    assert outputs == greedy_tokens(model, PROMPTS[:4], 24)
