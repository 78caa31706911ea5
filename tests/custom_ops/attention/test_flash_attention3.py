"""Which prompts FlashAttention-3 takes, and what it is given: its library is a reference with the same signature, on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.attention import encoder_attention as encoder
from compile_and_serve.custom_ops.attention import flash_attention3, flashinfer_backend, mla_triton, triton_backend
from compile_and_serve.custom_ops.attention.flash_attention3 import FlashAttention3Prompts
from compile_and_serve.custom_ops.attention.flashinfer_backend import FA3_MIN_QUERY_LEN, FlashInferAttention
from compile_and_serve.custom_ops.attention.flashinfer_prefill import AttentionShape
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.mla_triton import StepParts
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.attention.triton_expand import expand_pages
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import SEQUENCES, running
from tests.support import attention_cases as cases
from tests.support.latent_cases import SIZES, arguments, expanded, interpreted
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 48, 16, torch.bfloat16, torch.bfloat16, 48**-0.5)
SCHEMA = (  # of fa3-fwd 0.0.3
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,Tensor(out!)? out = None,"
    "Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,"
    "Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,Tensor? page_table = None,Tensor? kv_batch_idx = None,"
    "Tensor? leftpad_k = None,Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,"
    "Tensor? k_descale = None,Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,bool is_rotary_interleaved = False,"
    "Tensor? scheduler_metadata = None,int num_splits = 0,bool? pack_gqa = None,int sm_margin = 0) -> "
    "(Tensor(out!), Tensor, Tensor, Tensor)"
)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *further: Any) -> tuple[torch.Tensor, ...]:
    """What the library computes, segment by segment. Of the arguments at the end, those with a default are not passed on."""
    arguments = torch._C.parse_schema("fa3_fwd::" + SCHEMA).arguments
    options: dict[str, Any] = {one.name: one.default_value for one in arguments} | dict(
        zip((one.name for one in arguments[3:]), further, strict=False)
    )
    starts, key_starts = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    assert (np.diff(starts).max(), np.diff(key_starts).max()) == (options["max_seqlen_q"], options["max_seqlen_k"])
    assert options["cu_seqlens_q"].dtype == options["cu_seqlens_k"].dtype == torch.int32
    assert options["num_splits"] == 1
    group = q.shape[1] // k.shape[1]
    for number in range(len(starts) - 1):
        rows, keys = slice(*starts[number : number + 2]), slice(*key_starts[number : number + 2])
        k_HLE, v_HLE = (x[keys].double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores_HTL = q[rows].double().transpose(0, 1) @ k_HLE.transpose(1, 2) * options["softmax_scale"]
        if cap := options["softcap"]:
            scores_HTL = cap * (scores_HTL / cap).tanh()
        if options["is_causal"]:
            length, count = scores_HTL.shape[1:]
            scores_HTL = scores_HTL.masked_fill(~torch.ones(length, count).tril(count - length).bool(), float("-inf"))
        options["out"][rows] = (scores_HTL.softmax(-1) @ v_HLE).transpose(0, 1).to(q.dtype)
    return options["out"], q.new_empty(0), q.new_empty(0), q.new_empty(0)


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if hasattr(torch.ops.fa3_fwd, "fwd"):
        pytest.skip("the real library is loaded")
    library = torch.library.Library("fa3_fwd", "DEF")
    library.define(SCHEMA)
    library.impl("fwd", reference, "CPU")
    for module in (flashinfer_backend, encoder):
        monkeypatch.setattr(module, "flash_attention3_runs", lambda device, dtype, head_dim: dtype == torch.bfloat16)
    monkeypatch.setattr(mla_triton, "flash_attention3_unsupported_reason", lambda *_: None)
    yield
    library._destroy()


class Modules:
    """FlashInfer's, none of which is built."""

    variants = ("fa3",)

    def load(self, variant: str) -> None:
        return None

    def status(self) -> dict[str, str]:
        return {"fa3": "not built"}


def backend() -> FlashInferAttention:
    made = FlashInferAttention(build=False)
    made.modules = lambda *_: Modules()  # type: ignore[assignment, method-assign, return-value]
    return made


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("cached", [0, 37])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_prompts_are_those_of_the_reference(cached: int, soft_cap: float) -> None:
    """Two prompts, and their first layer's keys in pages."""
    used = backend()
    lengths = (FA3_MIN_QUERY_LEN, 40)
    batch = cases.Batch(query_lens=lengths, seq_lens=tuple(cached + length for length in lengths))
    metadata, num_blocks = cases.make_metadata(batch, used)
    generator = torch.Generator().manual_seed(0)
    H, K, E = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    q, k, v = torch.randn(sum(lengths), H + 2 * K, E, generator=generator).bfloat16().split((H, K, K), dim=1)
    cache = torch.randn(num_blocks, 2, K, 16, E, generator=generator).bfloat16()
    from compile_and_serve.custom_ops.attention.attention import Scores

    scores = Scores(soft_cap=soft_cap)
    expected = TorchAttention().forward(q, k, v, cache, SHAPE.scale, metadata, scores)  # writes the keys, too
    prefill = used.planned_prefill(replace(SHAPE, soft_cap=soft_cap), CPU, metadata)
    assert isinstance(prefill, FlashAttention3Prompts)
    keys, values = k, v
    if cached:
        assert used.planned_step is not None
        assert used.planned_step.pages_3J is not None
        keys, values = expand_pages(cache, used.planned_step.pages_3J, used.planned_step.num_keys, torch.bfloat16)
    out = torch.empty(q.shape, dtype=q.dtype)
    prefill.run(q, keys, values, out)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    ("shape", "cached", "takes"),
    [
        (SHAPE, 0, True),
        (SHAPE, 16, True),
        (replace(SHAPE, kv_cache_dtype=torch.float8_e4m3fn), 16, True),
        (replace(SHAPE, head_dim=96), 0, True),  # FlashInfer has no module of this size
        (replace(SHAPE, window=64), 0, False),
        (replace(SHAPE, dtype=torch.float16), 0, False),
        (SHAPE, 2048, False),
    ],
    ids=["fresh", "continued", "8-bit pages", "other head size", "window", "float16", "too much to expand"],
)
def test_it_takes_what_it_has_kernels_for(shape: AttentionShape, cached: int, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2048 * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2  # the context of as many tokens
    monkeypatch.setattr(flashinfer_backend, "EXPANDED_BYTES", most)
    used = backend()
    batch = cases.Batch(query_lens=(FA3_MIN_QUERY_LEN,), seq_lens=(cached + FA3_MIN_QUERY_LEN,))
    prefill = used.planned_prefill(shape, CPU, cases.make_metadata(batch, used)[0])
    assert isinstance(prefill, FlashAttention3Prompts) is takes
    assert takes or prefill is None  # nothing is built
    assert used.prompt_steps == {"fa3-fwd" if takes else "triton": 1}
    assert used.pending_workspace_bytes >= most or not takes


LATENT_BATCH = cases.Batch(query_lens=(2, 30, 1, 17), seq_lens=(5, 50, 20, 17), padding=2)


def latent_step(batch: cases.Batch, backend: TritonAttention, layers: int = 1) -> None:
    """A step of latent attention in float32, and its check."""
    torch.manual_seed(1)
    metadata, pages = cases.make_metadata(batch, backend)
    for _ in range(layers):
        args = arguments(metadata.num_tokens + batch.padding, pages, batch.block_size, **SIZES)
        out = backend.mla_forward(LatentOperands(*args, 0.2), metadata)
        assert relative_error(out[: metadata.num_tokens], expanded(args, 0.2, True, metadata)) < 2e-6
        assert not out[metadata.num_tokens :].any()


@pytest.mark.slow
@interpreted
@pytest.mark.usefixtures("_library")
def test_latent_prompts_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts with and without a cached prefix, and a decode between them, which is one of them: 48 tokens, 87 keys."""
    monkeypatch.setattr(mla_triton, "FA3_MIN_TOKENS", 48)
    backend = TritonAttention()
    with backend.without_modules():
        latent_step(LATENT_BATCH, backend)
    assert backend.prompt_steps == {}
    assert backend.pending_workspace_bytes == flash_attention3.EXPANDED_BYTES
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        latent_step(LATENT_BATCH, backend, layers=2)
        assert backend.prompt_steps == {"fa3-fwd": 1}
        monkeypatch.setattr(triton_backend, "EXPANDED_BYTES", 87 * 4 * (24 + 8 + 3 * (2 * 16 + 8 + 20)) - 1)
        latent_step(LATENT_BATCH, backend)
    assert backend.prompt_steps == {"fa3-fwd": 1, "triton": 1}
    assert caplog.text.count("use FlashAttention-3") == caplog.text.count("would take more than") == 1


@pytest.mark.parametrize(("query_lens", "is_worth"), [((1023, 17), False), ((1, 1024), True), ((17, 1000) * 4, False), ((1020,) * 5, True)])
def test_which_latent_prompts_are_worth_it(query_lens: tuple[int, ...], is_worth: bool) -> None:
    batch = cases.Batch(query_lens=query_lens, seq_lens=query_lens)
    assert StepParts.of_step(cases.make_metadata(batch, TorchAttention())[0]).is_worth_flash_attention3 is is_worth


@interpreted
def test_latent_prompts_elsewhere_use_triton(caplog: pytest.LogCaptureFixture) -> None:
    backend = TritonAttention()
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        latent_step(LATENT_BATCH, backend)
    assert backend.prompt_steps == {"triton": 1}
    assert backend.pending_workspace_bytes == 0
    assert "prompts of latent attention use Triton: FlashAttention-3 computes in bfloat16, not torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((128, None), None),
        ((192, 128), None),
        ((192, 192), None),
        ((100, None), "a multiple of 8"),
        ((264, None), "at most 256"),
        ((96, 64), "no kernel for keys of 96 and values of 64"),
        ((192, 64), "no kernel for keys of 192 and values of 64"),
    ],
)
def test_what_sizes_it_has(sizes: tuple[int, int | None], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention3, "flash_attention3_unavailable_reason", lambda device: None)
    found = flash_attention3.flash_attention3_unsupported_reason(CPU, torch.bfloat16, *sizes)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.usefixtures("_library")
def test_it_needs_no_flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without FlashInfer, prompts that FlashAttention-3 does not have run in Triton's kernel; layers with windows all do."""
    monkeypatch.setattr(flashinfer_backend, "flashinfer_unavailable_reason", lambda device: "FlashInfer is not installed")
    monkeypatch.setattr(TritonAttention, "unsupported_reason", lambda backend, **_: None)
    monkeypatch.setattr(CpuPlatform, "compute_capability", (9, 0))
    used = FlashInferAttention(tmp_path)
    fits = {"device": CPU, "kv_cache_dtype": torch.bfloat16, "head_dim": 48, "num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    assert used.unsupported_reason(dtype=torch.bfloat16, features=frozenset(["soft_cap"]), **fits) is None
    for dtype, features in ((torch.float16, []), (torch.bfloat16, ["window"])):
        assert used.unsupported_reason(dtype=dtype, features=frozenset(features), **fits) == "FlashInfer is not installed"
    batch = cases.Batch(query_lens=(FA3_MIN_QUERY_LEN,), seq_lens=(16 + FA3_MIN_QUERY_LEN,))
    assert isinstance(used.planned_prefill(SHAPE, CPU, cases.make_metadata(batch, used)[0]), FlashAttention3Prompts)
    monkeypatch.setattr(flashinfer_backend, "EXPANDED_BYTES", 0)
    shape = replace(SHAPE, head_dim=64)
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        assert used.planned_prefill(shape, CPU, cases.make_metadata(batch, used)[0]) is None
    assert "long prompts use Triton; modules: {'fa3': 'FlashInfer is not installed'}" in caplog.text
    modules = used.modules(torch.bfloat16, 64, CPU)
    modules.build("fa3")
    assert modules.export_to(tmp_path / "exported") == [] == modules.import_from(tmp_path)
    assert used.prompt_steps == {"fa3-fwd": 1, "triton": 1}


@pytest.mark.usefixtures("_library")
def test_encoders_attend_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "runs_cuda_kernels", True)
    monkeypatch.setattr(encoder, "packed_attention", lambda *_: pytest.fail("took torch's kernel"))
    q, k, v = torch.randn(3, 30, 2, 16).bfloat16()
    starts, sizes = torch.tensor([0, 10, 30], dtype=torch.int32), torch.tensor([10, 20], dtype=torch.int32)
    lengths = StepLengths(query_start_loc=starts, seq_lens=sizes, num_seqs=2, num_tokens=30, max_query_len=20, max_seq_len=20)
    with running({SEQUENCES: lengths}):
        found = encoder._encoder_attention(q, k, v, 0.25)
    for rows in (slice(10), slice(10, 30)):
        weights = torch.einsum("qhe,khe->hqk", q[rows].double(), k[rows].double() * 0.25).softmax(-1)
        expected = torch.einsum("hqk,khe->qhe", weights, v[rows].double())
        torch.testing.assert_close(found[rows].double(), expected, rtol=0.02, atol=0.02)


def test_why_it_does_not_run_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "runs on Hopper only" in str(flash_attention3.flash_attention3_unavailable_reason(CPU))
    spec = ModuleSpec("fa3_fwd", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    (tmp_path / "_C.abi3.so").write_bytes(b"not a library")
    for found, reason in ((None, "package fa3-fwd, extra"), (spec, "could not be loaded")):
        monkeypatch.setattr(flash_attention3, "find_spec", lambda name, found=found: found)
        flash_attention3._load.cache_clear()
        for _ in range(2):
            assert reason in str(flash_attention3._load())
    flash_attention3._load.cache_clear()
    assert caplog.text.count("could not be loaded") == 1
