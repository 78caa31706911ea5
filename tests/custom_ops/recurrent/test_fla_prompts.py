"""Prompts through fla-core's functions, in whose place plain torch stands here: what they are given, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compile_and_serve.custom_ops.recurrent import (
    linear_attention,  # noqa: F401  registers the op
    short_convolution,  # noqa: F401  registers the op
)
from compile_and_serve.custom_ops.recurrent.layer_state import RECURRENT_STATES, ConvolutionState
from compile_and_serve.custom_ops.step import current_metadata
from tests.custom_ops.recurrent.test_linear_attention import make_inputs, state_of
from tests.support.recurrent_steps import Slots

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter on the CPU")

# Each step: sequence → (tokens before, tokens after), and who moves to new pages.
Spans = tuple[dict[int, tuple[int, int]], tuple[int, ...]]
# Whole prompts; prompts that go on, one of which passes no checkpoint, behind a decode; one that moves.
LONG: list[Spans] = [
    ({0: (0, 100), 1: (0, 97), 2: (0, 131)}, ()),
    ({1: (97, 98), 0: (100, 240), 2: (131, 290)}, (2,)),
    ({0: (240, 241), 1: (98, 115), 2: (290, 300)}, ()),
]
# Prompts of a few tokens, which are copied.
SHORT: list[Spans] = [
    ({0: (0, 40), 1: (0, 36), 2: (0, 33)}, ()),
    ({0: (40, 80), 1: (36, 72), 2: (33, 64)}, (0, 2)),
    ({0: (80, 120), 1: (72, 80), 2: (64, 100)}, ()),
]


class Given:
    """In the place of fla-core's functions: computes segment by segment, and leaves what lies outside of them unset."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, q: Any, k: Any, v: Any, g: Any, beta: Any = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append({"v": v, **options})
        starts, initial = options["cu_seqlens"].tolist(), options["initial_state"]
        assert starts == options["cu_seqlens_cpu"].tolist()
        if "chunk_indices" in options:
            wanted = [(s, c) for s, (a, b) in enumerate(pairwise(starts)) for c in range(-(-(b - a) // 64))]
            assert options["chunk_indices"].tolist() == [list(one) for one in wanted]
        out = torch.full_like(v, torch.nan)
        final = torch.empty_like(initial)
        repeats = v.shape[2] // q.shape[2]
        q, k = (x[0].float().repeat_interleave(repeats, 1) for x in (q, k))
        for s, (a, b) in enumerate(pairwise(starts)):
            state_HKV = initial[s].clone()
            for t in range(a, b):
                state_HKV = state_HKV * g[0, t].exp().view(v.shape[2], -1, 1)
                u_HV = v[0, t].float()
                if beta is not None:
                    u_HV = beta[0, t][:, None] * (u_HV - torch.einsum("hkv,hk->hv", state_HKV, k[t]))
                state_HKV = state_HKV + k[t][:, :, None] * u_HV[:, None]
                out[0, t] = torch.einsum("hkv,hk->hv", state_HKV, q[t]).to(out.dtype)
            final[s] = state_HKV
        return out, final


def run(inputs: list[Any], state: Any, steps: list[Spans], op: Callable[..., torch.Tensor], padding: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(1)
    slots = Slots(state, 3)
    tensors = [tensor for part in slots.parts for tensor in part]
    outs = []
    for spans, moving in steps:
        rows = [None if x is None else torch.cat([x[s, begin:end] for s, (begin, end) in spans.items()]) for x in inputs]
        if padding:
            rows = [None if x is None else torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)]) for x in rows]
        outs.append(slots.step(spans, partial(op, *rows, *tensors), moving))
    return outs


def through_fla(*args: Any) -> torch.Tensor:
    from compile_and_serve.custom_ops.recurrent import triton_linear_attention as kernels
    from compile_and_serve.custom_ops.recurrent.fla_prompts import Operands

    q, k, v, decay, beta, *tensors = args
    state = list(zip(tensors[::2], tensors[1::2], strict=True))
    return kernels.linear_attention(Operands(q, k, v, decay, beta, state, current_metadata(RECURRENT_STATES)))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    from compile_and_serve.custom_ops.recurrent import fla_prompts

    given = Given()
    monkeypatch.setattr(fla_prompts, "kernels", lambda device: (given, given, given))
    monkeypatch.setattr(fla_prompts, "_last", None)
    return given


@pytest.mark.parametrize(
    ("delta", "per_channel", "steps"),
    [(True, False, LONG), (True, False, SHORT), (True, True, LONG[:2]), (False, False, LONG[:2])],
    ids=["delta rule", "short", "KDA", "SSD"],
)
def test_steps_of_prompts_equal_the_reference(given: Given, delta: bool, per_channel: bool, steps: list[Spans]) -> None:
    inputs = make_inputs(2, 1 if not per_channel else 2, 16, 16, delta=delta, per_channel=per_channel, dtype=torch.bfloat16)
    wide = [None if x is None else x.float() for x in inputs]
    wanted = run(wide, state_of(wide, torch.float32), steps, torch.ops.cas.linear_attention_reference)
    outs = run(inputs, state_of(inputs, torch.bfloat16), steps, through_fla, padding=3)
    for number, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        assert not out[-3:].any(), f"step {number}: padding"
        difference = (out[:-3].float() - want).norm() / want.norm()
        assert difference < 1e-2, f"step {number}: {difference:.1e}"
    in_place = [len(call["v"][0]) == len(out) for call, out in zip(given.calls, outs, strict=False)]  # LONG's last step passes none
    assert in_place == ([False, False, True] if steps is SHORT else [True, True])


class Calls(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


VIEWS = {"slice", "select", "view", "unsqueeze", "t", "transpose", "detach", "alias"}


def test_a_layer_of_prompts_copies_and_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of prompts alone: fla-core's function gets the step's tensors and its result is the output."""
    from compile_and_serve.custom_ops.recurrent import fla_prompts, triton_linear_attention, triton_short_convolution

    launched: list[str] = []
    calls = Calls()
    given: dict[str, Any] = {}

    def gated_delta_rule(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append("fla")
        given["tensors"], given["options"] = tensors, options
        given["out"] = torch.empty_like(tensors[2])
        return given["out"], torch.empty_like(options["initial_state"])

    def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)

    for module in (triton_linear_attention, triton_short_convolution):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(fla_prompts, "kernels", lambda device: (gated_delta_rule,) * 3)
    monkeypatch.setattr(fla_prompts, "_last", None)
    inputs = [x[0, :300] for x in make_inputs(2, 1, 16, 16, delta=True, per_channel=False, dtype=torch.bfloat16)]
    slots = Slots(state_of([x[None] for x in inputs], torch.bfloat16), 3)
    tensors = [tensor for part in slots.parts for tensor in part]
    spans = {0: (0, 100), 1: (0, 100), 2: (0, 100)}

    def layers() -> torch.Tensor:
        through_fla(*inputs, *tensors)  # the first one computes what the layers of a step share
        first = given["options"]
        launched.clear()
        with calls:
            out = through_fla(*inputs, *tensors)
        assert all(given["options"][name] is first[name] for name in ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices"))
        return out

    out = slots.step(spans, layers)
    assert launched == ["_linear_attention_kernel", "fla", "_linear_attention_kernel"]
    assert set(calls.names) <= VIEWS | {"empty", "empty_like", "new_empty"}, calls.names
    assert out.data_ptr() == given["out"].data_ptr()
    assert [x.data_ptr() for x in given["tensors"]] == [x.data_ptr() for x in inputs]

    x_TD, weight_DW = torch.randn(300, 32, dtype=torch.bfloat16), torch.randn(32, 4, dtype=torch.bfloat16)
    convolution = Slots(ConvolutionState(channels=32, width=4, dtype=torch.bfloat16), 3)
    calls, launched[:] = Calls(), []

    def convolve() -> torch.Tensor:
        with calls:
            return triton_short_convolution.short_convolution(
                x_TD, weight_DW, None, convolution.parts[0], current_metadata(RECURRENT_STATES)
            )

    convolution.step(spans, convolve)
    assert launched == ["_sums_kernel", "_ring_kernel"]
    copies = [name for name in calls.names if name not in VIEWS | {"empty", "empty_like", "new_empty"}]
    assert len(copies) == 1, copies  # of the weight
