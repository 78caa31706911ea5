"""Who takes which step where FlashInfer is in use, without FlashInfer: its modules are fakes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.attention import flashinfer_backend, flashinfer_modules
from compile_and_serve.custom_ops.attention.flashinfer_backend import (
    EXPANDED_BYTES,
    FA3_MIN_QUERY_LEN,
    FA3_MIN_TOKENS,
    WORKSPACE_BYTES,
    FlashInferAttention,
)
from compile_and_serve.custom_ops.attention.flashinfer_prefill import AttentionShape
from compile_and_serve.custom_ops.attention.triton_expand import expand_pages
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from tests.support import attention_cases as cases

CPU = torch.device("cpu")
SHAPE = AttentionShape(8, 2, 64, 16, torch.bfloat16, torch.bfloat16, 0.125)


class Module:
    """A built module: notes the arguments of its calls."""

    def __init__(self) -> None:
        self.planned: list[tuple[Any, ...]] = []
        self.runs: list[tuple[str, tuple[Any, ...]]] = []

    def plan(self, *args: Any) -> list[int]:
        self.planned.append(args)
        return [7]

    def ragged_run(self, *args: Any) -> None:
        self.runs.append(("ragged", args))

    def paged_run(self, *args: Any) -> None:
        self.runs.append(("paged", args))


class FakeModules:
    def __init__(self, variants: tuple[str, ...]) -> None:
        self.variants = variants
        self.module = Module()

    def load(self, variant: str) -> Module:
        return self.module

    def status(self) -> dict[str, str]:
        return {}


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_modules, "version", lambda name: "0.6.13")


def with_modules(*variants: str) -> tuple[FlashInferAttention, Module]:
    backend = FlashInferAttention(build=False)
    modules = FakeModules(variants)
    backend.modules = lambda *_: modules  # type: ignore[assignment, method-assign, return-value]
    return backend, modules.module


def step(backend: FlashInferAttention, lengths: Sequence[int], *, cached: int = 0) -> AttentionMetadata:
    """Prompts of so many tokens, each after `cached` others."""
    batch = cases.Batch(query_lens=tuple(lengths), seq_lens=tuple(cached + length for length in lengths))
    return cases.make_metadata(batch, backend)[0]


def variant(backend: FlashInferAttention, shape: AttentionShape, metadata: AttentionMetadata) -> str | None:
    """The variant of FlashInfer that takes the step; None: Triton."""
    prefill = backend.planned_prefill(shape, CPU, metadata)
    return None if prefill is None else prefill.variant


def choices(variants: tuple[str, ...], kv_cache_dtype: torch.dtype) -> dict[str, str | None]:
    """Kind of step → the variant that takes it."""
    backend, _ = with_modules(*variants)
    shape = replace(SHAPE, kv_cache_dtype=kv_cache_dtype)
    few = FA3_MIN_TOKENS // 512
    kinds = {"short": [FA3_MIN_QUERY_LEN - 1], "some": [512] * (few - 1), "many": [512] * few, "long": [FA3_MIN_QUERY_LEN]}
    return {
        f"{kind} {state}": variant(backend, shape, step(backend, lengths, cached=cached))
        for kind, lengths in kinds.items()
        for state, cached in (("fresh", 0), ("continued", 16))
    }


@pytest.mark.parametrize("kv_cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_on_hopper_long_prompts_run_in_fa3(kv_cache_dtype: torch.dtype) -> None:
    assert choices(("fa2", "fa3"), kv_cache_dtype) == {
        "short fresh": None,
        "short continued": None,
        "some fresh": None,
        "some continued": None,
        "many fresh": "fa3",
        "many continued": None,
        "long fresh": "fa3",
        "long continued": "fa3",
    }


@pytest.mark.slow
def test_float8_context_too_large_to_expand_is_left_to_triton(caplog: pytest.LogCaptureFixture) -> None:
    backend, _ = with_modules("fa3")
    fitting = EXPANDED_BYTES // (2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2)
    chosen = {}
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for tokens in (fitting, fitting + 1, fitting + 2):
                metadata = step(backend, [FA3_MIN_QUERY_LEN], cached=tokens - FA3_MIN_QUERY_LEN)
                chosen[dtype, tokens - fitting] = variant(backend, replace(SHAPE, kv_cache_dtype=dtype), metadata)
    assert [key for key, choice in chosen.items() if choice is None] == [(torch.float8_e4m3fn, 1), (torch.float8_e4m3fn, 2)]
    assert caplog.text.count("would take more than 512 MiB") == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_expanded_pages_are_the_cached_context(dtype: torch.dtype) -> None:
    """Sequences of 5, 16 and 1040 tokens in pages of 16."""
    backend, module = with_modules("fa3")
    lengths = (5, 16, FA3_MIN_QUERY_LEN + 16)
    batch = cases.Batch(query_lens=(2, 2, FA3_MIN_QUERY_LEN), seq_lens=lengths)
    metadata, num_blocks = cases.make_metadata(batch, backend)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(num_blocks, 2, 3, 16, 40, generator=generator).to(torch.float8_e4m3fn)
    expected_cache = cache.float()
    if dtype == torch.int8:
        cache = cases.random_int8_cache(num_blocks, 3, 16, 40)
        expected_cache = cases.dequantized(cache).float()
    assert variant(backend, replace(SHAPE, kv_cache_dtype=dtype), metadata) == "fa3"
    [arguments] = module.planned
    assert arguments[4].tolist() == [0, *np.cumsum(lengths)]
    assert backend.planned_step is not None
    assert backend.planned_step.pages_3J is not None
    keys, values = expand_pages(cache, backend.planned_step.pages_3J, sum(lengths), torch.float32)
    for part, expanded in enumerate((keys, values)):
        whole = expected_cache[:, part].transpose(1, 2)  # [N, P, K, E]
        rows = zip(metadata.block_table, lengths, strict=True)
        expected = torch.cat([whole[row.long()].flatten(0, 1)[:n] for row, n in rows])
        torch.testing.assert_close(expanded, expected, rtol=0, atol=0)


def test_modules_are_not_used_where_nothing_may_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = with_modules("fa3")
    with monkeypatch.context() as patch, backend.without_modules():
        patch.setattr(FakeModules, "load", lambda modules, variant: pytest.fail("loaded a module"))
        assert variant(backend, SHAPE, step(backend, [FA3_MIN_QUERY_LEN])) is None
    assert variant(backend, SHAPE, step(backend, [FA3_MIN_QUERY_LEN])) == "fa3"


def test_a_plan_is_not_written_over_before_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Event:
        def __init__(self) -> None:
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("wait")

    monkeypatch.setattr(Module, "plan", lambda module, *args: happened.append("plan"))
    monkeypatch.setattr(CpuPlatform, "record_event", lambda platform: Event())
    backend, _ = with_modules("fa3")
    prefills = {backend.planned_prefill(SHAPE, CPU, step(backend, [FA3_MIN_QUERY_LEN])) for _ in range(3)}
    assert len(prefills) == 1
    assert happened == ["plan", "record", *["wait", "plan", "record"] * 2]


def test_its_workspace_is_known_before_it_is_there() -> None:
    backend, _ = with_modules("fa3")
    assert backend.pending_workspace_bytes == WORKSPACE_BYTES
    assert variant(backend, SHAPE, step(backend, [FA3_MIN_QUERY_LEN])) == "fa3"
    assert backend.pending_workspace_bytes == 0
    with backend.without_modules():
        backend.planned_prefill(replace(SHAPE, kv_cache_dtype=torch.float8_e4m3fn), CPU, step(backend, [8]))
    assert backend.pending_workspace_bytes == EXPANDED_BYTES


def test_elsewhere_all_float8_prompts_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        assert set(choices(("fa2",), torch.bfloat16).values()) == {"fa2"}
        assert set(choices(("fa2",), torch.float8_e4m3fn).values()) == {None}
    assert caplog.text.count("prompts use Triton: FlashInfer fa2 does not read 8-bit") == 1


def test_windows_and_caps_are_planned_and_choose_their_modules() -> None:
    asked: list[frozenset[str]] = []
    backend, made = FlashInferAttention(build=False), FakeModules(("fa3",))

    def modules(dtype: object, head_dim: object, device: object, features: frozenset[str]) -> FakeModules:
        asked.append(features)
        return made

    backend.modules = modules  # type: ignore[assignment, method-assign]
    prefill = backend.planned_prefill(replace(SHAPE, window=1024, soft_cap=50.0), CPU, step(backend, [FA3_MIN_QUERY_LEN]))
    assert asked == [frozenset(["window", "soft_cap"])]
    assert made.module.planned[0][-1] == 1023  # FlashInfer does not count the token itself
    assert prefill is not None
    prefill.run(*[torch.empty(FA3_MIN_QUERY_LEN)] * 4)
    [(_, arguments)] = made.module.runs
    assert arguments[-13:] == (None, 1, 0, 1023, False, None, None, None, None, 50.0, SHAPE.scale, 1.0, 0)


@pytest.mark.parametrize(
    ("chosen", "cached", "kind", "planned", "num_arguments"),
    [
        ("fa3", 0, "ragged", [1, False, 64, 64, True, -1], 22),
        ("fa3", 16, "paged", [16, False, 64, 64, True, -1], 24),
        ("fa2", 0, "paged", [16, False, 64, 64, True, -1, -1, False, 0], 29),
        ("fa2", 16, "paged", [16, False, 64, 64, True, -1, -1, False, 0], 29),
    ],
)
def test_a_module_is_called_as_its_version_expects(chosen: str, cached: int, kind: str, planned: list[object], num_arguments: int) -> None:
    """By the signatures in FlashInfer 0.6.13's bindings; on a GPU, the results are compared."""
    backend, module = with_modules(chosen)
    lengths = [FA3_MIN_QUERY_LEN, FA3_MIN_QUERY_LEN + 8]
    prefill = backend.planned_prefill(SHAPE, CPU, step(backend, lengths, cached=cached))
    [arguments] = module.planned
    keys = [length + cached for length in lengths]
    counted = keys if kind == "ragged" else [-(-count // 16) for count in keys]
    assert [argument.tolist() for argument in arguments[3:6]] == [[0, *np.cumsum(lengths)], [0, *np.cumsum(counted)], keys]
    assert all(argument.dtype == torch.int32 for argument in arguments[3:6])
    assert list(arguments[6:]) == [sum(lengths), 2, SHAPE.num_heads, SHAPE.num_kv_heads, *planned]
    assert prefill is not None
    prefill.run(*[torch.empty(sum(lengths))] * 4)
    [(called, run)] = module.runs
    assert (called, len(run), run[2]) == (kind, num_arguments, [7])
    if kind == "paged":
        assert run[8].numel() == sum(counted)  # the pages of all prompts
        assert run[9].tolist() == [count - (number - 1) * 16 for count, number in zip(keys, counted, strict=True)]


@pytest.mark.parametrize("feature", ["sinks", "alibi", "chunks"])
def test_what_it_has_no_kernel_for_is_said(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "flashinfer_unavailable_reason", lambda device: None)
    reason = FlashInferAttention().unsupported_reason(
        device=CPU,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        head_dim=128,
        num_heads=8,
        num_kv_heads=8,
        block_size=16,
        features=frozenset([feature]),  # type: ignore[list-item]
    )
    assert feature in str(reason)
