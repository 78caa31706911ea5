"""Which decodes FlashMLA takes, and what it is given: its library is a reference with the same signatures, on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.attention import flash_mla, mla_triton
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from tests.support import attention_cases as cases
from tests.support.latent_cases import SIZES, arguments, expanded, interpreted
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
SCHEMAS = (  # of sgl-flash-mla 1.0.0
    "get_mla_decoding_metadata(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, bool is_fp8_kvcache, int? topk) -> "
    "Tensor[]",
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, float softmax_scale, bool is_causal, "
    "Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits) -> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)",
)
calls: list[str] = []


def schedule(lengths: torch.Tensor, rows: int, h_k: int, h_q: int, is_fp8: bool, topk: int | None) -> list[torch.Tensor]:
    """The lengths that it was made for, and their number with the rows of each."""
    assert (h_k, h_q, is_fp8, topk) == (1, SIZES["heads"], False, None)
    assert lengths.dtype == torch.int32
    calls.append(f"{len(lengths)} sequences of {rows // h_q}")
    return [lengths.clone(), torch.tensor([len(lengths), rows])]


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    latent_size: int,
    lengths: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    is_causal: bool,
    made_for: torch.Tensor,
    numbers: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    assert q.is_contiguous()
    assert cache.dim() == 4
    assert made_for.tolist() == lengths.tolist(), "the schedule is of another step"
    assert numbers.tolist() == [q.shape[0], q.shape[1] * q.shape[2]]
    calls.append("attend")
    out = q.new_zeros(*q.shape[:3], latent_size)
    for s, length in enumerate(lengths.tolist()):
        entries = cache[table[s].long(), :, 0].flatten(0, 1)[:length].double()
        for i in range(q.shape[1] if length else 0):
            seen = entries[: length - (q.shape[1] - 1 - i if is_causal else 0)]
            out[s, i] = (q[s, i].double() @ seen.T * scale).softmax(-1) @ seen[:, :latent_size]
    return out, q.new_empty(0), None, None


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if hasattr(torch.ops.flash_mla_legacy, "dense_decode_fwd"):
        pytest.skip("the real library is loaded")
    library = torch.library.Library("flash_mla_legacy", "DEF")
    for schema, function in zip(SCHEMAS, (schedule, attend), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    monkeypatch.setattr(mla_triton, "flash_mla_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(flash_mla, "_LATENT", SIZES["latent"])
    calls.clear()
    yield
    library._destroy()


def run_layers(metadata: AttentionMetadata, caches: list[torch.Tensor], padding: int = 0) -> None:
    """A step of several layers in float32, and the check of each."""
    for cache in caches:
        args = [*arguments(metadata.num_tokens + padding, 1, 1, **SIZES)[:-1], cache]
        out = metadata.backend.mla_forward(LatentOperands(*args, 0.2), metadata)
        assert relative_error(out[: metadata.num_tokens], expanded(args, 0.2, True, metadata)) < 2e-6
        assert not out[metadata.num_tokens :].any()


@interpreted
@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "made"),
    [
        ((1, 1, 1), (1, 64, 65), "3 sequences of 1"),
        ((3, 3), (70, 3), "2 sequences of 3"),
        ((1, 1, 4, 20), (63, 130, 20, 40), "2 sequences of 1"),
        ((1, 2), (17, 9), "1 sequences of 1"),
        ((2, 5), (17, 9), None),
        ((20,), (40,), None),
    ],
    ids=["decodes", "drafts", "before prompts", "before drafts of others", "drafts of unequal number", "a prompt"],
)
def test_it_takes_leading_sequences_of_equal_lengths(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], made: str | None) -> None:
    torch.manual_seed(3)
    backend = TritonAttention()
    metadata, pages = cases.make_metadata(cases.Batch(query_lens=query_lens, seq_lens=seq_lens, padding=2), backend)
    caches = [torch.randn(pages, 16, SIZES["latent"] + SIZES["rope"]) for _ in range(2)]
    run_layers(metadata, caches, padding=2)
    assert calls == ([made, "attend", "attend"] if made else [])  # one schedule for both layers


@interpreted
@pytest.mark.usefixtures("_library")
def test_every_run_of_a_step_has_its_own_schedule() -> None:
    """As when a graph is captured: the same metadata with other lengths, and `plan` is not called. Padding gets zeros."""
    torch.manual_seed(4)
    backend = TritonAttention()
    metadata, pages = cases.make_metadata(cases.Batch(query_lens=(1, 1, 1), seq_lens=(40, 33, 17)), backend)
    caches = [torch.randn(pages, 16, SIZES["latent"] + SIZES["rope"]) for _ in range(2)]
    for lengths in ((40, 33, 17), (41, 34, 17)):
        metadata.seq_lens.copy_(torch.tensor(lengths))
        run_layers(metadata, caches)
    assert calls == ["3 sequences of 1", "attend", "attend"] * 2
    metadata.seq_lens[2], metadata.slot_mapping[2] = 0, -1
    args = [*arguments(3, 1, 1, **SIZES)[:-1], caches[0]]
    out = backend.mla_forward(LatentOperands(*args, 0.2), metadata)
    assert out[:2].any(-1).all()
    assert not out[2].any()


@interpreted
@pytest.mark.usefixtures("_library")
def test_steps_launch_kernels_that_were_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead come the steps of `compile_kernels`: FlashMLA runs all of them alone, except one. No kernel runs here."""
    from compile_and_serve.custom_ops.attention import triton_mla_decode, triton_mla_prefill

    launched: set[tuple[Any, ...]] = set()
    for module in (triton_mla_decode, triton_mla_prefill):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **options: launched.add((kernel.fn.__name__, *sorted(options.items()))))
    monkeypatch.setattr(triton_mla_decode, "supports_pdl", lambda _: True)
    monkeypatch.setattr(triton_mla_decode, "num_sms", lambda _: 132)

    def kernels_of(*steps: tuple[int, ...]) -> set[tuple[Any, ...]]:
        launched.clear()
        for query_lens in steps:
            metadata, pages = cases.make_metadata(cases.Batch(query_lens=query_lens, seq_lens=query_lens), TritonAttention())
            args = arguments(metadata.num_tokens, pages, 16, **SIZES)
            metadata.backend.mla_forward(LatentOperands(*args, 0.2), metadata)
        return set(launched)

    for module in (mla_triton, triton_mla_prefill):
        monkeypatch.setattr(module, "is_compiling_ahead", lambda: True)
    ahead = kernels_of((2,) * 256, (1, 1, 2, 254, 254), (8,), *((1,) * count for count in (1, 16, 32, 64, 256)))
    assert not any(("MAX_QUERY", 1) in kernel for kernel in ahead)  # FlashMLA runs single query tokens
    for module in (mla_triton, triton_mla_prefill):
        monkeypatch.setattr(module, "is_compiling_ahead", lambda: False)
    later = kernels_of(*(((1,) * few + (11, 20)) for few in (0, 4, 11, 50, 64)), (2, 5), (2, 3) * 100, (1,) * 64, (3, 3), (20, 4))
    assert {dict(kernel[1:]).get("MAX_QUERY") for kernel in later} == {None, 4, 16}
    assert later <= ahead


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"capability": (10, 0)}, "FlashMLA runs on Hopper only, not on cpu"),
        ({"dtype": torch.float16}, "FlashMLA is used for queries in bfloat16, not torch.float16"),
        ({"cache_dtype": torch.float8_e4m3fn}, "FlashMLA is used for a cache in bfloat16, not torch.float8_e4m3fn"),
        ({"latent_size": 256}, "FlashMLA's kernels are for latents of 512 and keys of 64, not 256 and 64"),
        ({"page_size": 16}, "FlashMLA needs pages of 64 tokens, not 16"),
    ],
    ids=lambda one: next(iter(one), "all fits") if isinstance(one, dict) else "",
)
def test_what_it_runs(changes: dict[str, object], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "runs_cuda_kernels", True)
    monkeypatch.setattr(CpuPlatform, "compute_capability", changes.pop("capability", (9, 0)))
    monkeypatch.setattr(flash_mla, "_load", lambda: None)
    fits: dict[str, object] = {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16, "latent_size": 512, "rope_size": 64, "page_size": 64}
    assert flash_mla.flash_mla_unsupported_reason(CPU, **(fits | changes)) == reason  # type: ignore[arg-type]


def test_why_it_does_not_run_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = tmp_path / "flash_mla" / "_C_legacy.abi3.so"
    library.parent.mkdir()
    library.write_bytes(b"not a library")

    installed: list[str | None] = []

    def found(name: str) -> object:
        if installed[-1] is None:
            raise PackageNotFoundError(name)
        return SimpleNamespace(version=installed[-1], locate_file=tmp_path.joinpath)

    monkeypatch.setattr(flash_mla, "distribution", found)
    for version, reason in (
        (None, "is not installed (package sgl-flash-mla)"),
        ("1.1.0", "how the ops of sgl-flash-mla 1.1.0 are called is not known: install sgl-flash-mla==1.0.0"),
        ("1.0.0", "could not be loaded"),
    ):
        installed.append(version)
        flash_mla._load.cache_clear()
        for _ in range(2):
            assert reason in str(flash_mla._load())
    flash_mla._load.cache_clear()
    assert caplog.text.count("is not known") == caplog.text.count("could not be loaded") == 1
    assert "is not installed" not in caplog.text


@interpreted
def test_decodes_elsewhere_use_triton(caplog: pytest.LogCaptureFixture) -> None:
    backend = TritonAttention()
    metadata, pages = cases.make_metadata(cases.Batch(query_lens=(1,), seq_lens=(20,)), backend)
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        run_layers(metadata, [torch.randn(pages, 16, SIZES["latent"] + SIZES["rope"]) for _ in range(2)])
    assert caplog.text.count("decodes of latent attention use Triton: FlashMLA runs on Hopper only, not on cpu") == 1
