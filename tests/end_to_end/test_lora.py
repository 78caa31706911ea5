"""LoRA adapters: batches that mix adapters say what each merged model says alone; loading compiles nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve import LLM, LoRARequest, SamplingParams
from compile_and_serve.runtime.llm.llm import RequestOutput
from tests.support.adapters import ALL, merge, write_adapter
from tests.support.group_checkpoints import write_grouped
from tests.support.moe_models import write_moe
from tests.support.transformers_models import load_reference, write_random_model

PROMPTS = [[5, 17, 200, 31], [7, 8, 9, 10, 11, 12, 13, 14, 15], [44], [5, 17, 200, 31], [5, 17, 200, 31]]
NUM_TOKENS = 8
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of ranks 8, 16 and 64; the last with rsLoRA and patterns, on the embedding, linears and the output head."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(folder / "r8", model, 8, seed=1),
        write_adapter(folder / "r16", model, 16, seed=2, targets=("q_proj", "v_proj")),
        write_adapter(
            folder / "r64",
            model,
            64,
            seed=3,
            targets=(*ALL, "lm_head", "embed_tokens"),
            use_rslora=True,
            rank_pattern={"down_proj": 3},
            alpha_pattern={"down_proj": 2.0},
            target_modules=r".*\.(self_attn|mlp)\..*|lm_head",
        ),
    ]


def make_llm(model: Path, cache_dir: Path, **options: Any) -> LLM:
    given = {
        "dtype": "float32",
        "cache_dir": cache_dir,
        "num_kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "skip_tokenizer_init": True,
        "device": "cpu",
        "enable_lora": True,
        "max_loras": 3,
        "max_lora_rank": 64,
    }
    return LLM(str(model), **given | options)


def generate(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False, lora_request=adapters)


def check(output: RequestOutput, model: Path, adapter: Path | None, tolerance: float) -> None:
    """The tokens and logprobs of the merged model, one token at a time on the same text."""
    reference = load_reference(model, torch.float32)
    if adapter is not None:
        merge(reference, adapter)
    completion = output.outputs[0]
    with torch.no_grad():
        ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
        logprobs_TV = reference(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert completion.logprobs is not None
    for expected_V, token, entry in zip(logprobs_TV, completion.token_ids, completion.logprobs, strict=True):
        assert abs(entry[token].logprob - float(expected_V[token])) < tolerance
        assert float(expected_V.max() - expected_V[token]) < tolerance  # a token of the largest logit


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["one rank"])
@pytest.mark.parametrize("options", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)], ids=["one rank", "two ranks"])
def test_one_batch_mixes_the_base_and_ranks(options: dict[str, Any], model: Path, adapters: list[Path], tmp_path: Path) -> None:
    requests = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, 1)), None]
    paths = [None, *adapters, None]
    with make_llm(model, tmp_path, verify_passes=not options, **options) as llm:
        report = llm.info.compile_report
        assert report["pass_sites.apply_lora.matched"] == 3 * len(ALL) + 2  # and the embedding and the head
        assert report["pass_sites.apply_lora.expected"] == 3 * len(ALL) + 2
        outputs = generate(llm, PROMPTS, requests)
        assert outputs[0].outputs[0].token_ids != outputs[3].outputs[0].token_ids  # equal prompts, other adapters
        assert outputs[0].outputs[0].token_ids == outputs[4].outputs[0].token_ids
        for output, path in zip(outputs, paths, strict=True):
            check(output, model, path, 1e-3)


def write_rounded(model: Path, folder: Path) -> Path:
    """The checkpoint with the weights of its linears rounded row by row, as int8-weight-only does."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight_OI in tensors.items():
        if name.endswith("_proj.weight"):
            largest = weight_OI.abs().amax(1, keepdim=True)
            tensors[name] = (weight_OI * 127 / largest).round() * largest / 127
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.exhaustive
def test_a_base_that_is_quantized_here(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    """Adapters themselves are not rounded."""
    rounded = write_rounded(model, tmp_path / "rounded")
    with make_llm(model, tmp_path, quantization="int8-weight-only") as llm:
        requests = [None, LoRARequest("a", 1, str(adapters[0])), LoRARequest("b", 2, str(adapters[2]))]
        for output, path in zip(generate(llm, PROMPTS[:3], requests), [None, adapters[0], adapters[2]], strict=True):
            check(output, rounded, path, 0.05)  # kernels round activations


@pytest.mark.slow
def test_awq_bases(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    quantized, dequantized = write_grouped(model, tmp_path / "awq", AWQ)
    with make_llm(quantized, tmp_path / "cache") as llm:
        requests = [None, LoRARequest("a", 1, str(adapters[0])), LoRARequest("b", 2, str(adapters[1]))]
        for output, path in zip(generate(llm, PROMPTS[:3], requests), [None, *adapters[:2]], strict=True):
            check(output, dequantized, path, 0.05)


@pytest.mark.slow
def test_many_adapters_share_few_slots_and_nothing_is_compiled(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is as alone, though each adapter is copied into a slot that others had, and read again from its file."""
    paths = [write_adapter(tmp_path / str(i), model, 4, seed=i) for i in range(10)]
    requests: list[LoRARequest | None] = [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]
    with make_llm(model, tmp_path, max_loras=2, max_cpu_loras=3, max_lora_rank=8) as llm:
        alone = [generate(llm, [PROMPTS[0]], [request])[0].outputs[0].token_ids for request in requests]
        assert len({tuple(tokens) for tokens in alone}) > 5
        core = llm.engine.core
        assert core.adapters.num_loads == 10
        for name in ("capture", "start_piece"):  # to compile anything would fail
            monkeypatch.delattr(f"compile_and_serve.compiler.pipeline.{name}")
        weights = core.executor.worker.loaded.model.weights
        addresses = {name: tensor.data_ptr() for name, tensor in weights.items()}
        together = generate(llm, [PROMPTS[0]] * 20, [*requests, *reversed(requests)])
        assert [output.outputs[0].token_ids for output in together] == [*alone, *reversed(alone)]
        assert {name: tensor.data_ptr() for name, tensor in weights.items()} == addresses
        assert core.adapters.num_loads > 10  # host memory has room for 3
    check(together[0], model, paths[0], 1e-3)


def noted(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return run


@pytest.mark.slow
def test_steps_without_adapters_run_the_plan_of_an_engine_without_them(
    model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(model, tmp_path, enable_lora=False) as llm:
        assert "pass_sites.apply_lora.matched" not in llm.info.compile_report
        with pytest.raises(ValueError, match="use --enable-lora"):
            generate(llm, PROMPTS[:1], [LoRARequest("a", 1, str(adapters[0]))])
        model_of_base = llm.engine.core.executor.worker.loaded.model
    for _ in range(2):  # compiled, then from its artifact
        with make_llm(model, tmp_path, num_kv_blocks=66) as llm:
            runner = llm.engine.core.executor.worker.runner
            compiled = runner.steps.model
            assert compiled.plans[1].plan.steps == model_of_base.plan.steps
            assert compiled.plan.steps != model_of_base.plan.steps
            assert {t.target for t in compiled.plan.transforms} > {t.target for t in compiled.plans[1].plan.transforms}
            calls: list[str] = []
            for steps, name in ((runner.steps, "adapters"), (runner.plain_steps, "plain")):
                monkeypatch.setattr(steps, "run", noted(calls, name, steps.run))
            plain = generate(llm, PROMPTS[:2], [None, None])
            assert set(calls) == {"plain"}
            mixed = generate(llm, PROMPTS[:2], [None, LoRARequest("a", 1, str(adapters[0]))])
            assert "adapters" in calls
            assert mixed[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
            assert mixed[1].outputs[0].token_ids != plain[1].outputs[0].token_ids
            calls.clear()
            generate(llm, PROMPTS[:2], [None, None])
            assert set(calls) == {"plain"}
    assert llm.info.compile_report["artifact"] == "hit"


@pytest.mark.parametrize(
    ("family", "options"), [("Qwen3MoeForCausalLM", {}), ("MixtralForCausalLM", {"tensor_parallel_size": 2})], ids=["one rank", "two ranks"]
)
@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["one rank"])
def test_adapters_of_single_experts(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """By the names of a checkpoint that has each expert's linears; some experts keep the base's."""
    model = write_moe(tmp_path / "model", family)
    leaves = ("w1", "w3", "w2") if family.startswith("Mixtral") else ALL[-3:]
    some = [f"experts.{expert}.{leaf}" for expert in (0, 2, 3, 5) for leaf in leaves]
    paths = [
        None,
        write_adapter(tmp_path / "a", model, 8, seed=1, size=1.5, targets=("o_proj", *some)),
        write_adapter(tmp_path / "b", model, 4, seed=2, size=1.5, targets=some[1:5]),
    ]
    requests = [None if path is None else LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths)]
    with make_llm(model, tmp_path / "cache", max_loras=2, max_lora_rank=8, lora_experts=True, verify_passes=not options, **options) as llm:
        outputs = generate(llm, [PROMPTS[1]] * 3, requests)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3
    for output, path in zip(outputs, paths, strict=True):
        check(output, model, path, 1e-3)


@pytest.mark.slow
def test_wrong_adapters_are_refused_and_the_engine_goes_on(
    model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(model, tmp_path, max_lora_rank=16) as llm:
        before = generate(llm, PROMPTS[:1], [None])[0].outputs[0].token_ids
        for adapter, message in (
            (LoRARequest("big", 1, str(adapters[2])), "rank 64, but the engine takes at most 16"),
            (LoRARequest("absent", 2, str(tmp_path / "absent")), "no adapter_config.json"),
            (LoRARequest("zero", 0, str(adapters[0])), "lora_int_id 0"),
        ):
            with pytest.raises(ValueError, match=message):
                generate(llm, PROMPTS[:1], [adapter])
        generate(llm, PROMPTS[:1], [LoRARequest("good", 3, str(adapters[0]))])
        with pytest.raises(ValueError, match="give each load its own"):
            generate(llm, PROMPTS[:1], [LoRARequest("other", 3, str(adapters[1]))])
        core, unreadable = llm.engine.core, Future[Any]()
        with monkeypatch.context() as patch:
            patch.setattr(core.executor, "load_adapter", lambda _: unreadable)
            core.load_adapter(LoRARequest("pinned", 9, str(adapters[0]), pinned=True))
        assert core._scheduler.adapter_slots.is_pinned(9)
        unreadable.set_exception(OSError("the disk is gone"))
        core.poll_adapters()
        assert not core._scheduler.adapter_slots.is_pinned(9)
        core.utility("unload_adapter", LoRARequest("good", 3, ""))
        with pytest.raises(ValueError, match="not a new positive number"):
            generate(llm, PROMPTS[:1], [LoRARequest("good", 3, str(adapters[0]))])
        assert generate(llm, PROMPTS[:1], [None])[0].outputs[0].token_ids == before


@pytest.mark.slow
def test_a_class_of_transformers(tmp_path: Path) -> None:
    """With biases beside the adapters, and modules found by the names of transformers' class."""
    model = write_random_model(tmp_path / "model", "Qwen2ForCausalLM", without=("head_dim",))
    adapter = write_adapter(tmp_path / "adapter", model, 8)
    with make_llm(model, tmp_path / "cache", max_loras=1, max_lora_rank=8, model_impl="transformers") as llm:
        outputs = generate(llm, PROMPTS[:2], [None, LoRARequest("a", 1, str(adapter))])
    for output, path in zip(outputs, [None, adapter], strict=True):
        check(output, model, path, 1e-3)


@pytest.mark.exhaustive
def test_both_plans_read_one_cache_with_partial_rotary_embeddings(tmp_path: Path) -> None:
    """A prefix that a step without adapters cached is continued by steps with them, and the other way round."""
    model = write_random_model(tmp_path / "model", "StableLmForCausalLM", without=("head_dim",), partial_rotary_factor=0.5)
    adapter = write_adapter(tmp_path / "adapter", model, 8)
    with make_llm(model, tmp_path / "cache", max_loras=1, max_lora_rank=8) as llm:
        assert llm.info.compile_report["pass_sites.fuse_rope_attention.matched"] == 3
        # The second request comes with an adapter while the first, without one, decodes.
        request = LoRARequest("a", 1, str(adapter))
        outputs = generate(llm, [PROMPTS[1], PROMPTS[0]], [None, request])
        alone = generate(llm, [PROMPTS[1]], [None])
    check(outputs[0], model, None, 1e-3)
    check(outputs[1], model, adapter, 1e-3)
    check(alone[0], model, None, 1e-3)
