"""`cas::linear_attention`: its reference beside transformers' functions, and its kernels beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.recurrent import linear_attention  # noqa: F401  registers the op
from compile_and_serve.custom_ops.recurrent.layer_state import LinearAttentionState
from tests.support.recurrent_steps import SCRIPT, Slots

T = 320


def make_inputs(
    heads: int, key_heads: int, key_dim: int, value_dim: int, *, delta: bool, per_channel: bool, dtype: torch.dtype
) -> list[Any]:
    """q, k, v, log decay and beta of three sequences of T tokens each: [3, T, …]."""
    torch.manual_seed(heads * key_dim + value_dim)
    q, k = (torch.nn.functional.normalize(torch.randn(3, T, key_heads, key_dim), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(3, T, heads, value_dim).to(dtype)
    decay = -torch.rand(3, T, heads, *[key_dim] * per_channel) * 0.3
    beta = torch.rand(3, T, heads) if delta else None
    return [q, k, v, decay, beta]


def op_of(reference: bool) -> Any:
    return torch.ops.cas.linear_attention_reference if reference else torch.ops.cas.linear_attention


def run_script(inputs: list[Any], state: LinearAttentionState, *, op: Any, device: str = "cpu") -> list[torch.Tensor]:
    """The output of each step of the script, on the CPU. op: takes the arguments of `cas::linear_attention`."""
    torch.manual_seed(1)
    slots = Slots(state, 3, device=device)
    tensors = [tensor for part in slots.parts for tensor in part]
    outs = []
    for spans, moving in SCRIPT:
        rows = [None if x is None else torch.cat([x[s, begin:end] for s, (begin, end) in spans.items()]).to(device) for x in inputs]
        outs.append(slots.step(spans, lambda rows=rows: op(*rows, *tensors), moving).cpu())
    return outs


def expected(outs: list[torch.Tensor], whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what the steps gave and what a computation of whole sequences gives, [3, T, H, V]."""
    pairs = []
    for (spans, _), out in zip(SCRIPT, outs, strict=True):
        wanted = torch.cat([whole[s, begin:end] for s, (begin, end) in spans.items()])
        pairs.append((out, wanted))
    return pairs


def state_of(inputs: list[Any], dtype: torch.dtype) -> LinearAttentionState:
    q, _, v, decay, _ = inputs
    return LinearAttentionState(
        num_heads=v.shape[2],
        num_key_heads=q.shape[2],
        key_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=dtype,
        decay_per_channel=decay.dim() == 4,
    )


def gated_delta_rule(inputs: list[Any]) -> torch.Tensor:
    """transformers' function over whole sequences."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    q, k, v, decay, beta = inputs
    repeats = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)
    out, _ = torch_recurrent_gated_delta_rule(q * q.shape[-1] ** 0.5, k, v, decay, beta, initial_state=None, output_final_state=False)
    return out


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "value_dim"), [(4, 2, 16, 32), (2, 2, 128, 128), (3, 1, 48, 80)])
def test_gated_delta_rule_equals_transformers(heads: int, key_heads: int, key_dim: int, value_dim: int, reference: bool) -> None:
    inputs = make_inputs(heads, key_heads, key_dim, value_dim, delta=True, per_channel=False, dtype=torch.float32)
    outs = run_script(inputs, state_of(inputs, torch.float32), op=op_of(reference))
    for number, (out, wanted) in enumerate(expected(outs, gated_delta_rule(inputs))):
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, number=number: f"step {number}: {text}")


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_kernel_equals_the_reference(delta: bool, per_channel: bool, dtype: torch.dtype) -> None:
    assert load_cpu_kernels()
    inputs = make_inputs(4, 2, 32, 48, delta=delta, per_channel=per_channel, dtype=dtype)
    state = state_of(inputs, dtype)
    wanted = run_script(inputs, state, op=op_of(True))
    for out, want in zip(run_script(inputs, state, op=op_of(False)), wanted, strict=True):
        limit = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out, want, rtol=limit, atol=limit)


@pytest.mark.parametrize("reference", [True, False])
def test_ssd_equals_its_formula(reference: bool) -> None:
    """h = exp(dt A) h + dt x ⊗ B, y = h C, where two heads share B and C."""
    c, b, x, _, _ = make_inputs(4, 2, 32, 16, delta=False, per_channel=False, dtype=torch.float32)
    dt, a = torch.rand(3, T, 4) + 0.1, -torch.rand(4)
    state, rows = torch.zeros(3, 4, 16, 32), []
    for t in range(T):
        b_t, c_t = (part[:, t].repeat_interleave(2, 1)[:, :, None] for part in (b, c))
        state = state * (dt[:, t] * a).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b_t
        rows.append((state * c_t).sum(-1))
    inputs = [c, b, x * dt[..., None], dt * a, None]
    outs = run_script(inputs, state_of(inputs, torch.float32), op=op_of(reference))
    for out, wanted in expected(outs, torch.stack(rows, 1)):
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
