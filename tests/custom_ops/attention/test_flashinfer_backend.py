"""Who takes which step where FlashInfer is in use, without FlashInfer: its modules are fakes."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.attention import flashinfer_backend
from compile_and_serve.custom_ops.attention.flashinfer_backend import (
    FA3_MIN_QUERY_LEN,
    FA3_MIN_TOKENS,
    WORKSPACE_BYTES,
    FlashInferAttention,
    _Shape,
    _StepPlan,
)
from compile_and_serve.custom_ops.platform import CpuPlatform
from tests.support import attention_cases as cases

CPU = torch.device("cpu")
SHAPE = _Shape(8, 2, 64, 16, torch.bfloat16, torch.bfloat16, 0.125)


class FakeModules:
    def __init__(self, variants: tuple[str, ...], *, is_loading: bool = False) -> None:
        self.variants, self.is_loading = variants, is_loading

    def is_built(self, variant: str) -> bool:
        return True

    def status(self) -> dict[str, str]:
        return {}


def choices(
    variants: tuple[str, ...], kv_cache_dtype: torch.dtype, *, is_loading: bool = False
) -> dict[str, str | None]:
    """Kind of step → the variant of FlashInfer that takes it, None: Triton."""
    backend = FlashInferAttention(build=False)
    backend.modules = lambda *_: FakeModules(variants, is_loading=is_loading)  # type: ignore[assignment, method-assign, return-value]
    shape = _Shape(8, 2, 64, 16, torch.bfloat16, kv_cache_dtype, 0.125)
    metadata, _ = cases.make_metadata(cases.BATCHES["prefill"], backend)
    result: dict[str, str | None] = {}
    least = FA3_MIN_TOKENS // 512
    for kind, lengths in {
        "short": [FA3_MIN_QUERY_LEN - 1], "some": [512] * (least - 1), "many": [512] * least, "long": [FA3_MIN_QUERY_LEN]
    }.items():  # fmt: skip
        for is_fresh in (True, False):
            step = _StepPlan(
                metadata=metadata, num_single=0, max_query_len=max(lengths), query_start_loc=np.cumsum([0, *lengths]),
                seq_lens=np.array(lengths), is_fresh=is_fresh, wrappers={},
            )  # fmt: skip
            result[f"{kind} fresh" if is_fresh else f"{kind} continued"] = backend._choose(shape, CPU, step)
    return result


def test_no_step_waits_for_modules_that_are_loading() -> None:
    assert "fa3" in choices(("fa3",), torch.bfloat16).values()
    assert set(choices(("fa3",), torch.bfloat16, is_loading=True).values()) == {None}


def test_on_hopper_float8_pages_are_left_to_triton(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        assert choices(("fa2", "fa3"), torch.bfloat16) == {
            "short fresh": None, "short continued": None, "some fresh": None, "some continued": None,
            "many fresh": "fa3", "many continued": None, "long fresh": "fa3", "long continued": "fa3",
        }  # fmt: skip
        assert "float8" not in caplog.text
        assert choices(("fa2", "fa3"), torch.float8_e4m3fn) == {
            "short fresh": None, "short continued": None, "some fresh": None, "some continued": None,
            "many fresh": "fa3", "many continued": None, "long fresh": "fa3", "long continued": None,
        }  # fmt: skip
    assert caplog.text.count("long prompts with a cached prefix use Triton: FlashInfer fa3 does not read float8") == 1


def some_step(backend: FlashInferAttention, lengths: list[int]) -> _StepPlan:
    metadata, _ = cases.make_metadata(cases.BATCHES["prefill"], backend)
    return _StepPlan(
        metadata=metadata, num_single=0, max_query_len=max(lengths), query_start_loc=np.cumsum([0, *lengths]),
        seq_lens=np.array(lengths), is_fresh=True, wrappers={},
    )  # fmt: skip


def test_it_is_not_looked_at_where_nobody_is_to_wait_for_it() -> None:
    backend = FlashInferAttention()
    step = some_step(backend, [FA3_MIN_QUERY_LEN])
    backend.modules = lambda *_: pytest.fail("asked for modules")  # type: ignore[assignment, method-assign]
    with backend.without_modules():
        assert backend._choose(SHAPE, CPU, step) is None
    backend.modules = lambda *_: FakeModules(("fa3",))  # type: ignore[assignment, method-assign, return-value]
    assert backend._choose(SHAPE, CPU, step) == "fa3"


def test_a_plan_is_not_written_over_before_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Wrapper:
        def plan(self, *args: object, **options: object) -> None:
            happened.append("plan")

    class Event:
        def __init__(self) -> None:
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("wait")

    monkeypatch.setattr(CpuPlatform, "record_event", lambda platform: Event())
    backend = FlashInferAttention(build=False)
    backend._workspace = torch.empty(1)
    wrapper = backend._wrappers["fa3", True] = Wrapper()
    for _ in range(3):
        assert backend._plan_wrapper("fa3", SHAPE, CPU, some_step(backend, [FA3_MIN_QUERY_LEN])) is wrapper
    assert happened == ["plan", "record", *["wait", "plan", "record"] * 2]


def test_its_workspace_is_known_before_it_is_there() -> None:
    backend = FlashInferAttention(build=False)
    assert backend.workspace_to_come == WORKSPACE_BYTES
    backend._workspace = torch.empty(1)
    assert backend.workspace_to_come == 0


def test_elsewhere_all_float8_prompts_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="compile_and_serve.custom_ops"):
        assert set(choices(("fa2",), torch.bfloat16).values()) == {"fa2"}
        assert set(choices(("fa2",), torch.float8_e4m3fn).values()) == {None}
    assert caplog.text.count("prompts use Triton: FlashInfer fa2 does not read float8") == 1


def test_windows_and_caps_are_planned_and_choose_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[dict[str, object]] = []
    asked: list[frozenset[str]] = []

    class Wrapper:
        def plan(self, *args: object, **options: object) -> None:
            planned.append(options)

    backend = FlashInferAttention(build=False)
    backend._workspace = torch.empty(1)
    backend._wrappers["fa3", True] = Wrapper()

    def modules(dtype: object, head_dim: object, device: object, features: frozenset[str]) -> FakeModules:
        asked.append(features)
        return FakeModules(("fa3",))

    backend.modules = modules  # type: ignore[assignment, method-assign]
    shape = replace(SHAPE, window=1024, soft_cap=50.0)
    step = some_step(backend, [FA3_MIN_QUERY_LEN])
    assert backend._choose(shape, CPU, step) == "fa3"
    assert asked == [frozenset(["window", "soft_cap"])]
    backend._plan_wrapper("fa3", shape, CPU, step)
    assert planned[0]["window_left"] == 1023  # FlashInfer does not count the token itself
    assert planned[0]["logits_soft_cap"] == 50.0


@pytest.mark.parametrize("feature", ["sinks", "alibi", "chunks"])
def test_what_it_has_no_kernel_for_is_said(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "flashinfer_unavailable_reason", lambda device: None)
    reason = FlashInferAttention().unsupported_reason(
        device=CPU, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16, head_dim=128, num_heads=8, num_kv_heads=8,
        block_size=16, features=frozenset([feature]),  # type: ignore[list-item]
    )  # fmt: skip
    assert feature in str(reason)
