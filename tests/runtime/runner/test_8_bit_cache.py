"""`--kv-cache-dtype fp8` and `int8`: the engine computes what the plain model computes over rounded keys and values, in less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.engines import prompt_of, request, run_requests, tiny_config, write_tiny_model
from tests.support.kernels import require_cpu_kernels
from tests.support.tiny_models import plain_logits

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("float8-cache") / "tiny")


def plain_logprobs(core: EngineCore, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """log softmax at every position, in one pass of the plain module over a cache of that dtype. → [T, V]"""
    spec = core.executor.worker.runner.steps.model.spec  # type: ignore[attr-defined]
    return plain_logits(spec, tokens, dtype).log_softmax(-1)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 8}, {"num_kv_blocks": 30, "max_model_len": 100, "enable_prefix_caching": False}],
    ids=["whole", "chunked", "preempting"],
)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kind", DTYPES)
def test_logprobs_are_those_of_rounded_keys_and_values(model_dir: Path, options: dict[str, object], backend: str, kind: str) -> None:
    if backend == "cpu":
        require_cpu_kernels()
    core = EngineCore(tiny_config(model_dir, kv_cache_dtype=kind, attention_backend=backend, **options))
    assert {cache.dtype for cache in core.executor.worker.runner.state.values()} == {DTYPES[kind]}  # type: ignore[attr-defined]
    prompts = {f"r{i}": prompt_of(i, 5 + 13 * i) for i in range(4)}
    for _ in range(2):  # again, from cached blocks where they are kept
        outputs = run_requests(core, [request(name, p, logprobs=0, max_tokens=20) for name, p in prompts.items()])
        ours, rounding = [], []
        for name, prompt in prompts.items():
            tokens = [token for step in outputs[name] for token in step.new_token_ids]
            found = torch.tensor([step.new_logprobs[0].logprobs[0] for step in outputs[name] if step.new_logprobs])
            rows = torch.arange(len(tokens)) + len(prompt) - 1
            expected, unrounded = (plain_logprobs(core, prompt + tokens, dtype)[rows, tokens] for dtype in (DTYPES[kind], torch.float32))
            ours.append((found - expected).abs())
            rounding.append((expected - unrounded).abs())
        # A key or value whose last bits differ may be rounded to the next float8, 2⁻³ away, or the next int8. Of the
        # thousands of elements, each with an error of up to 2⁻⁴, a last bit of 2⁻²⁴ decides that for less than one on average. So the
        # error of a few is the limit.
        assert torch.cat(ours).max() < torch.cat(rounding).max() / 2
        assert torch.cat(ours).mean() < torch.cat(rounding).mean() / 10


@pytest.mark.parametrize(("kv_cache_dtype", "head_bytes"), [("auto", 64), ("fp8", 16), ("int8", 20)])
def test_the_same_memory_holds_more(model_dir: Path, kv_cache_dtype: str, head_bytes: int) -> None:
    config = tiny_config(model_dir, kv_cache_dtype=kv_cache_dtype, num_kv_blocks=None, kv_cache_memory_bytes=1 << 20)
    core = EngineCore(config)
    expected = {"auto": "float32", "fp8": "float8_e4m3fn", "int8": "int8"}[kv_cache_dtype]
    assert core.info.compile_report["kv_cache_dtype"] == expected
    assert core.info.num_kv_blocks == (1 << 20) // (2 * 2 * 2 * 4 * head_bytes)


@pytest.mark.exhaustive
def test_artifacts_do_not_depend_on_it(model_dir: Path, tmp_path: Path) -> None:
    options = {"enforce_eager": False, "attention_backend": "torch", "cache_dir": tmp_path}
    keys = set()
    for kv_cache_dtype, artifact in (("auto", "made"), ("fp8", "hit"), ("int8", "hit")):
        core = EngineCore(tiny_config(model_dir, kv_cache_dtype=kv_cache_dtype, **options))
        assert core.info.compile_report["artifact"] == artifact
        keys.add(core.info.compile_report["artifact_key"])
        [steps] = run_requests(core, [request("a", prompt_of(1, 30))]).values()
        assert len(steps) == 16
    assert len(keys) == 1
