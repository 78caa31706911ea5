"""`functionalize`: each spelling of a write gives what the module gives in eager, and a write that is seen elsewhere is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.capture.capture import CapturedGraph
from compile_and_serve.compiler.compat import regions_are_reused
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.functionalize import Functionalize
from compile_and_serve.compiler.rewrite.graph_pass import PassContext, PassError, PassResult
from compile_and_serve.compiler.rewrite.pass_manager import run_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier
from compile_and_serve.models.families.llama import LlamaDecoderLayer
from tests.support.rewriting import KERNELS, compute, pass_context
from tests.support.tiny_models import caches, capture_decoder, fill, step, tiny_spec

FEATURES = 8
not_in_torch211 = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 refuses to scatter along a length that might be 1"
)
Body = Callable[["Writes", torch.Tensor], torch.Tensor]  # [T, D] → [T, …]


class Writes(nn.Module):
    def __init__(self, body: Body, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = body
        self.table = nn.Parameter(torch.empty(32, FEATURES, dtype=dtype), requires_grad=False)
        self.square = nn.Parameter(torch.empty(FEATURES, FEATURES, dtype=dtype), requires_grad=False)
        self.wide = nn.Parameter(torch.empty(FEATURES), requires_grad=False)

    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, logits_indices: torch.Tensor) -> torch.Tensor:
        return self.body(self, F.embedding(input_ids, self.table))[logits_indices]


def rewritten(module: Callable[[], nn.Module]) -> tuple[CapturedGraph, PassContext, PassResult]:
    """The graph after all passes, each of them verified, and what the first one says."""
    with torch.device("meta"):
        captured = capture_decoder(module(), torch.float32)
    ctx = pass_context(captured, torch.float32)
    records = run_passes(captured.gm, default_passes(), ctx, verifier=PassVerifier({}))
    assert all(record.verification is None or record.verification.passed for record in records)
    assert isinstance(records[0].result, PassResult)
    return captured, ctx, records[0].result


def check(module: Callable[[], nn.Module], writes: int) -> None:
    """The rewritten graph computes what the module computes, in the same dtype, and holds nothing more to rewrite."""
    captured, ctx, result = rewritten(module)
    assert result == PassResult(matched=writes)
    real = module().requires_grad_(False)
    for parameter in real.parameters():
        nn.init.normal_(parameter)
    inputs = {"input_ids": torch.randint(32, (11,)), "logits_indices": torch.tensor([2, 7, 10])}
    ours = compute(captured, ctx.weights, dict(real.named_parameters()), inputs)
    theirs = real(inputs["input_ids"], None, None, inputs["logits_indices"])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for node in captured.gm.graph.nodes:  # what is known of the result is what it is
        if node.op == "output":
            fake = node.args[0][0].meta["example_value"]
            assert (fake.dtype, fake.stride()) == (ours.dtype, ours.stride())
    before = str(captured.gm.graph)
    assert Functionalize().run(captured.gm, ctx) == PassResult(matched=0)
    assert str(captured.gm.graph) == before


def chain(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h.add_(1).mul_(2)
    return h


def operators(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h += F.linear(h, m.square)
    h -= 0.5
    h *= h
    h /= 3
    h **= 2
    h //= 0.25
    h %= 7
    return h


def product_of_matrices(m: Writes, h: torch.Tensor) -> torch.Tensor:
    before = h
    h @= m.square  # not in place
    return before + h


def another_name(m: Writes, h: torch.Tensor) -> torch.Tensor:
    residual = h
    h += F.linear(h, m.square)
    return residual * h


def read_before_and_after(m: Writes, h: torch.Tensor) -> torch.Tensor:
    before = h.sum(-1, keepdim=True)
    h.sub_(1)
    return before + h


def result_is_not_read(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h.__iadd__(1)
    torch.relu_(h)
    torch.ops.aten.mul_.Tensor(h, m.wide)
    torch.ops.aten.add_(h, 1)
    return h


def flags(m: Writes, h: torch.Tensor) -> torch.Tensor:
    y = F.linear(h, m.square)
    z = F.silu(y, inplace=True)
    nn.ReLU(inplace=True)(h)
    F.leaky_relu(z, 0.2, True)
    F.elu_(h, 0.5)
    return F.dropout(z, 0.1, False, True) + y * h


def outs(m: Writes, h: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty_like(h)
    torch.add(h, 2, out=buffer)
    torch.exp(h, out=h)
    return buffer * h


def masks_and_indices(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h.masked_fill_(h > 1, 0.5)
    h[h < 0] = 2
    return h.index_add_(1, torch.arange(FEATURES, device=h.device), h * 2).clamp_(max=3)


def overwritten(m: Writes, h: torch.Tensor) -> torch.Tensor:
    total, half, copy = h + 1, h * 2, h * 3
    total.zero_()
    half.fill_(7)
    copy.copy_(m.wide)
    copy.neg_()
    return total + half + copy + m.wide


def positions(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h[:, 0] = 0
    h[..., 2:4] = h[..., 4:6] * 2
    h[:, -1] = h[:, 1]
    h[0] = m.wide
    h[1:, 3::2] = m.wide[0]
    h[:, 1] += 5
    h[: h.shape[0] - 1, 0] = 4
    h[..., 4:] *= 3
    return h


def views_that_nobody_reads(m: Writes, h: torch.Tensor) -> torch.Tensor:
    q = F.linear(h, m.square).view(-1, 2, 4).transpose(0, 1)
    q *= 3
    q.add_(1)
    return q.transpose(0, 1).reshape(-1, FEATURES)


def parts_of_one(m: Writes, h: torch.Tensor) -> torch.Tensor:
    q, k = F.linear(h, m.square).chunk(2, dim=-1)
    q.mul_(2)
    heads = q.view(-1, 2, 2)
    k += 1
    return heads.flatten(1) * k


def one_of_two_results(m: Writes, h: torch.Tensor) -> torch.Tensor:
    scores, ids = torch.topk(h, 3, dim=-1)
    scores /= scores.sum(dim=-1, keepdim=True)  # the router of many mixtures of experts
    return scores * ids


SPELLINGS = [
    (chain, 2), (operators, 7), (product_of_matrices, 0), (another_name, 1), (read_before_and_after, 1),
    (result_is_not_read, 4), (flags, 5), (outs, 2), (masks_and_indices, 4),
    pytest.param(overwritten, 4, marks=not_in_torch211), pytest.param(positions, 10, marks=not_in_torch211),
    (views_that_nobody_reads, 2), (parts_of_one, 2), (one_of_two_results, 1),
]  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.parametrize(("body", "writes"), SPELLINGS)
def test_a_spelling_gives_what_it_gives_in_eager(body: Body, writes: int) -> None:
    check(lambda: Writes(body), writes)


def wider_operand(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h += m.wide
    h.mul_(m.wide)
    return h


def compared(m: Writes, h: torch.Tensor) -> torch.Tensor:
    return h.gt_(0)


def cast_first(m: Writes, h: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    wide *= 2  # of its own in bfloat16
    return wide + h


def wider_sum_into_a_column(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h = F.linear(h, m.square)
    h[:, 1] += h.float().sum(-1)
    return h


@pytest.mark.parametrize(
    ("body", "writes"),
    [(wider_operand, 2), (compared, 1), (cast_first, 1), pytest.param(wider_sum_into_a_column, 2, marks=not_in_torch211)],
)
def test_the_dtype_stays(body: Body, writes: int) -> None:
    check(lambda: Writes(body, torch.bfloat16), writes)


def view_taken_before(m: Writes, h: torch.Tensor) -> torch.Tensor:
    rows = h.view(-1)
    h.add_(1)
    return rows.view(-1, FEATURES)


def base_read_after(m: Writes, h: torch.Tensor) -> torch.Tensor:
    part = h[:, :4]
    part.mul_(2)
    return h


def same_tensor_after_a_cast(m: Writes, h: torch.Tensor) -> torch.Tensor:
    wide = h.float()
    wide += 1
    return h


def part_kept_after_it_is_put_back(m: Writes, h: torch.Tensor) -> torch.Tensor:
    part = h[:, 0]
    part += 1
    h[:, 0] = part
    h.mul_(2)
    return h * part[:, None]


def parameter(m: Writes, h: torch.Tensor) -> torch.Tensor:
    m.wide.add_(1)
    return h


def part_of_a_parameter(m: Writes, h: torch.Tensor) -> torch.Tensor:
    m.square[0].zero_()
    return h


def shape(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h.unsqueeze_(0)
    return h[0]


def random(m: Writes, h: torch.Tensor) -> torch.Tensor:
    return h.normal_()


def rows(m: Writes, h: torch.Tensor) -> torch.Tensor:
    h[torch.arange(2, device=h.device)] = 0
    return h


def sum_in_another_dtype(m: Writes, h: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(h[:, 0], dtype=torch.float64)
    torch.sum(h, -1, out=out)
    return out


def list_of_tensors(m: Writes, h: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([h], 1)
    return h


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            view_taken_before,
            r"^add_ at .*test_functionalize.py:\d+, in view_taken_before writes in place to a tensor that is read "
            r"through another view at .*test_functionalize.py:\d+, in view_taken_before: copy it first",
        ),
        (base_read_after, "^mul_ at .* read through another view"),
        (same_tensor_after_a_cast, "^add_ at .* read through another view"),
        (part_kept_after_it_is_put_back, "^add_ at .* read through another view"),
        (parameter, "^add_ at .* writes in place to 'wide', which is the same in every step: make a new tensor instead"),
        (part_of_a_parameter, "^zero_ at .* writes in place to 'square'"),
        (shape, r"^unsqueeze_ at .* the shape of a tensor: write `x = x.unsqueeze\(…\)`"),
        (random, "^normal_ at .* no function returns a new tensor for these arguments: build it with torch.where"),
        (rows, r"^x\[…\] = … at .* no function .* \(indices have to be numbers and slices, or one mask"),
        (sum_in_another_dtype, r"^sum\(out=…\) at .* a result of torch.float32 to a tensor of torch.float64: cast the result instead"),
        (list_of_tensors, "^_foreach_add_ at .* no function returns a new tensor"),
    ],
)
def test_what_would_be_wrong_is_refused_with_its_line(body: Body, sentence: str) -> None:
    with pytest.raises(PassError, match=sentence):
        rewritten(lambda: Writes(body))


class Block(nn.Module):
    def __init__(self, body: Callable[[Block, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.body = body
        self.proj = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.body(self, x)


class Stack(nn.Module):
    def __init__(self, body: Callable[[Block, torch.Tensor], torch.Tensor | None], outer_writes: bool = False) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(32, FEATURES), requires_grad=False)
        self.blocks = nn.ModuleList(Block(body) for _ in range(4)).requires_grad_(False)
        self.outer_writes = outer_writes

    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, logits_indices: torch.Tensor) -> torch.Tensor:
        x = embedded = F.embedding(input_ids, self.table)
        for block in self.blocks:
            out = block(x)
            x = x if out is None else out
            if self.outer_writes:
                x *= 0.5
        return (x + embedded)[logits_indices]


def on_a_fresh_tensor(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.proj(x)
    y[:, 0] = 1
    y += x
    return y * 1


def on_its_input(block: Block, x: torch.Tensor) -> torch.Tensor:
    x += block.proj(x)
    return x


def on_its_input_alone(block: Block, x: torch.Tensor) -> None:
    x += block.proj(x)


def nowhere(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x + block.proj(x)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("body", "outer_writes", "writes", "as_one"),
    [
        (on_a_fresh_tensor, False, 8, True),
        (on_its_input, False, 4, False),
        (on_its_input_alone, False, 4, True),
        (nowhere, True, 4, True),
        (on_its_input_alone, True, 8, True),
    ],
)
def test_alike_blocks_write_each_their_own(body: Any, outer_writes: bool, writes: int, as_one: bool) -> None:
    with torch.device("meta"):
        captured = capture_decoder(Stack(body, outer_writes), torch.float32)
    assert captured.regions == (4 if as_one and regions_are_reused() else 0)
    check(lambda: Stack(body, outer_writes), writes)


class Skips(Stack):
    """What each block returns is read once more at the end."""

    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, logits_indices: torch.Tensor) -> torch.Tensor:
        outs = [F.embedding(input_ids, self.table)]
        for block in self.blocks:
            outs.append(block(outs[-1]))
        return torch.stack(outs).sum(0)[logits_indices]


def on_a_sum(block: Block, x: torch.Tensor) -> torch.Tensor:
    x = x + block.proj(x)
    x += x.sin()
    return x


def test_what_alike_blocks_return_is_not_one_tensor() -> None:
    check(lambda: Skips(on_a_sum), 4)


def view_of_its_input(block: Block, x: torch.Tensor) -> torch.Tensor:
    flat = x.view(-1)
    x.add_(1)
    return block.proj(x) * flat.sum()


def through_a_view_of_its_input(block: Block, x: torch.Tensor) -> torch.Tensor:
    x.view(-1).add_(1)
    return block.proj(x)


@pytest.mark.parametrize("body", [view_of_its_input, through_a_view_of_its_input])
def test_a_view_of_a_blocks_input_is_known_in_every_copy(body: Any) -> None:
    with pytest.raises(PassError, match=f"^add_ at .* in {body.__name__} .* read through another view"):
        rewritten(lambda: Stack(body))


@torch.library.custom_op("functionalize_tests::double_into", mutates_args=("out",))
def double_into(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x * 2)


def into_an_empty_one(m: Writes, h: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(h)
    double_into(out, h)
    return out + h


def into_a_computed_one(m: Writes, h: torch.Tensor) -> torch.Tensor:
    torch.ops.functionalize_tests.double_into(h.view(-1), h.view(-1))
    return h


def test_a_custom_op_may_write_to_what_is_empty() -> None:
    check(lambda: Writes(into_an_empty_one), 0)
    with pytest.raises(PassError, match="^double_into at .* to a computed tensor: let it return a new tensor"):
        rewritten(lambda: Writes(into_a_computed_one))


def test_a_triton_kernel_is_no_op() -> None:
    captured, ctx, _ = rewritten(lambda: Writes(chain))
    output = captured.gm.graph.output_node()
    with captured.gm.graph.inserting_before(output):
        captured.gm.graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, ())
    with pytest.raises(PassError, match="does not declare what it writes: call it in a `torch.library.triton_op`"):
        Functionalize().run(captured.gm, ctx)


def in_place_layer(
    layer: LlamaDecoderLayer, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor
) -> torch.Tensor:
    x_TD += layer.self_attn(layer.input_layernorm(x_TD), cos_TE, sin_TE, kv_cache)
    return x_TD.add_(layer.mlp(layer.post_attention_layernorm(x_TD)))


def test_a_model_that_writes_in_place_compiles_to_the_same_code(shared_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(verify_passes: bool) -> tuple[torch.Tensor, CompiledModel]:
        spec = tiny_spec()
        model = compile_model(
            spec,
            CompileConfig(cache_dir=shared_cache_dir, verify_passes=verify_passes),
            device=torch.device("cpu"),
            dtype=torch.float32,
            kernels=KERNELS,
        )
        fill(model)
        return step(model, [5, 6, 7, 8], 0, caches(spec, torch.float32)), model

    expected, plain = made(verify_passes=False)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", in_place_layer)
    logits, model = made(verify_passes=True)  # another plan than the one above, of the same pieces
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert model.plan.pieces == plain.plan.pieces
    sites, plain_sites = model.report["pass_sites"], plain.report["pass_sites"]
    assert sites.pop("functionalize")["matched"] == 4
    assert all(plain_sites[name] == sites[name] for name in sites if name != "canonicalize")
