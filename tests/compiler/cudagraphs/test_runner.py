"""Which steps replay which graph, with a fake in place of CUDA's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.cudagraphs.graph_capture import GraphCaptureError
from compile_and_serve.compiler.cudagraphs.piecewise import most_piecewise_tokens
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, StepInputs, default_sizes, piecewise_sizes
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pieces.plan import PieceStep
from compile_and_serve.custom_ops.attention.attention import AttentionMetadata, attention_metadata
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.models.spec import ModelSpec
from tests.support.fake_graphs import FakeDevice
from tests.support.tiny_models import caches, fill, step, tiny_spec


class Backend:
    name = "fake"
    decode_capturable = True


class NotCapturable(Backend):
    name = "plain"
    decode_capturable = False


class Model:
    """logits[s, 0] = 2 · input id, logits[s, 1] = length of the sequence."""

    def __init__(self) -> None:
        self.sizes_run: list[int] = []

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        from compile_and_serve.custom_ops.attention.attention import current_metadata

        self.sizes_run.append(len(input_ids))
        lengths = torch.zeros_like(input_ids)
        metadata = current_metadata()
        lengths[: len(metadata.seq_lens)] = metadata.seq_lens
        return torch.stack([2 * input_ids, lengths], 1).float()[logits_indices]


@dataclass
class Buffers:
    """What a runner owns: the arrays that every step of decodes is written into."""

    backend: Backend

    def __post_init__(self) -> None:
        self.input_ids = torch.zeros(64, dtype=torch.int64)
        self.indices = torch.arange(64)
        self.starts = torch.arange(65, dtype=torch.int32)
        self.seq_lens = torch.zeros(64, dtype=torch.int32)
        self.table = torch.zeros(64, 4, dtype=torch.int32)
        self.slots = torch.full((64,), -1)
        self.caches = [torch.zeros(4, 2, 1, 16, 8)]

    def inputs(self, size: int) -> StepInputs:
        metadata = AttentionMetadata(
            backend=self.backend,  # type: ignore[arg-type]
            query_start_loc=self.starts[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.table[:size],
            slot_mapping=self.slots[:size],
            num_seqs=size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=50,
        )
        return StepInputs(
            input_ids=self.input_ids[:size],
            positions=self.input_ids[:size],
            kv_caches=self.caches,
            logits_indices=self.indices[:size],
            metadata=metadata,
        )


def run(runner: CudaGraphRunner, inputs: StepInputs) -> torch.Tensor:
    with attention_metadata(inputs.metadata):
        return runner(inputs.input_ids, inputs.positions, inputs.kv_caches, inputs.logits_indices)


def make(
    backend: Backend | None = None, device: FakeDevice | None = None, **options: object
) -> tuple[CudaGraphRunner, Model, Buffers, FakeDevice]:
    model, buffers, device = Model(), Buffers(backend or Backend()), device or FakeDevice()
    runner = CudaGraphRunner(
        model,
        mode="full",
        max_num_seqs=40,
        backend=buffers.backend,
        device=device,
        **options,  # type: ignore[arg-type]
    )
    runner.bind(buffers.inputs)
    return runner, model, buffers, device


def compiled(cache_dir: Path) -> tuple[ModelSpec, CompiledModel]:
    """A tiny model in pieces, with weights."""
    spec, kernels = tiny_spec(), frozenset({"rope_attention", "fused_linear"})
    config = CompileConfig(cache_dir=cache_dir)
    model = compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float32, kernels=kernels)
    assert isinstance(model, CompiledModel)
    fill(model)
    return spec, model


def test_sizes() -> None:
    assert default_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_sizes(3) == (1, 2, 3)
    assert default_sizes(64, (1, 5, 200, 5)) == (1, 5)


def test_piecewise_sizes_waste_little() -> None:
    sizes = piecewise_sizes(256)
    assert sizes[-1] == 2048
    assert max(b / a for a, b in pairwise(sizes) if a >= 64) <= 1.125
    assert piecewise_sizes(256, (16, 4)) == (4, 16)
    assert piecewise_sizes(256, None, 4096)[: len(sizes)] == sizes
    assert piecewise_sizes(256, None, 4096)[-1] == 4096


def test_steps_over_small_layers_are_worth_graphs_for_longer() -> None:
    def layers(*num_weights: int) -> SimpleNamespace:
        weights = {f"w{i}": torch.empty(number, device="meta") for i, number in enumerate(num_weights)}
        steps = [PieceStep(piece="p", inputs=("v1", f"weight.{name}"), outputs=("v2",)) for name in weights]
        return SimpleNamespace(weights=weights, plan=SimpleNamespace(steps=steps))

    assert most_piecewise_tokens(layers(150_000_000, 15_000_000, 15_000_000)) == 4096
    assert most_piecewise_tokens(layers(15_000_000, 218_000_000, 218_000_000)) == 2048


def test_padding() -> None:
    runner, *_ = make()
    assert [runner.padded_size(n, n, 1) for n in (1, 2, 3, 5, 9, 17, 40)] == [1, 2, 4, 8, 16, 24, 40]
    assert runner.padded_size(41, 41, 1) is None
    assert runner.padded_size(5, 2, 4) is None
    assert runner.max_padded_size == 40


def test_largest_is_captured_first_then_one_then_downwards_unless_asked() -> None:
    runner, model, buffers, device = make()
    assert runner.capture(3) == 3
    assert model.sizes_run == [40, 1, 32]
    run(runner, buffers.inputs(8))
    assert runner.capture_next()
    assert model.sizes_run[-1] == 8
    runner.capture()
    assert not runner.capture_next()
    assert runner.report()["full_graphs"] == len(runner.sizes)
    assert runner.report()["used_bytes"] == device.used
    assert runner.stats.capture_seconds == pytest.approx(0.5 * len(runner.sizes))


def test_steps_before_the_first_capture_ask_for_nothing() -> None:
    runner, _, buffers, _ = make()
    run(runner, buffers.inputs(1))
    runner.capture(1)
    assert list(runner._full) == [40]


def test_a_step_is_missed_while_its_graph_may_still_come() -> None:
    runner, _, buffers, _ = make(sizes=(4, 40))
    missed = []
    for size in (4, 3):  # nothing pads in this test: there will never be a graph of 3
        run(runner, buffers.inputs(size))
        missed.append(runner.is_missed)
    runner.capture()
    run(runner, buffers.inputs(4))
    assert [*missed, runner.is_missed] == [True, False, False]


def test_graphs_stay_with_the_buffers_that_they_were_captured_on() -> None:
    runner, _, buffers, _ = make()
    runner.bind(None)
    runner.bind(buffers.inputs)
    runner.capture(1)
    with pytest.raises(AssertionError, match="of other buffers"):
        runner.bind(buffers.inputs)


def test_replay_reads_the_buffers_of_now() -> None:
    runner, model, buffers, _ = make(decode_tail=lambda logits, inputs: (logits.argmax(1),))
    runner.capture()
    ran = len(model.sizes_run)
    buffers.input_ids[:4] = torch.tensor([5, 6, 7, 0])
    buffers.seq_lens[:4] = torch.tensor([9, 80, 3, 0])
    logits = run(runner, buffers.inputs(4))
    assert logits.tolist() == [[10, 9], [12, 80], [14, 3], [0, 0]]
    assert runner.tail is not None
    assert runner.tail[0].tolist() == [0, 1, 0, 0]
    assert runner.stats.replays["full"] == 1
    assert runner.stats.plain_steps == 0
    assert model.sizes_run[ran:] == [4]  # the fake's replay


def test_what_a_graph_does_not_cover_runs_as_it_is() -> None:
    runner, _, buffers, _ = make(decode_tail=lambda logits, inputs: (logits,))
    runner.capture()
    four = buffers.inputs(4)
    elsewhere = replace(four, input_ids=four.input_ids.clone())
    other_cache = replace(four, kv_caches=[buffers.caches[0].clone()])
    prefill = replace(four, metadata=replace(four.metadata, max_query_len=4))
    unpadded = buffers.inputs(5)
    for count, inputs in enumerate((elsewhere, other_cache, prefill, unpadded), start=1):
        run(runner, inputs)
        assert runner.tail is None
        assert runner.stats.plain_steps == count
    assert runner.stats.replays["full"] == 0


def test_backend_that_cannot_be_captured_gets_no_full_graph(caplog: pytest.LogCaptureFixture) -> None:
    runner, _, buffers, _ = make(NotCapturable())
    assert "plain cannot be captured" in caplog.text
    assert runner.padded_size(3, 3, 1) is None
    assert runner.capture() == 0
    run(runner, buffers.inputs(3))
    assert runner.stats.plain_steps == 1


def test_estimate() -> None:
    runner, *_ = make()
    assert runner.estimate_bytes(64, 10**6) == 777 + 10 * len(runner.sizes)
    assert runner.report()["estimated_bytes"] == runner.estimate_bytes(64, 10**6)


def test_estimate_of_piecewise_graphs(tmp_path: Path) -> None:
    """What the graphs of a size keep is what its capture holds; the others' share is by their length."""
    spec = tiny_spec()
    model = compile_model(
        spec, CompileConfig(cache_dir=tmp_path), device=torch.device("cpu"), dtype=torch.float32,
        kernels=frozenset({"rope_attention"}),
    )  # fmt: skip
    fill(model)
    kv_caches = caches(spec, torch.float32)

    def prompt(size: int) -> StepInputs:
        zeros, starts = torch.zeros(size, dtype=torch.int64), torch.tensor([0, size], dtype=torch.int32)
        metadata = AttentionMetadata(
            backend=TorchAttention(), query_start_loc=starts, seq_lens=starts[1:], block_table=torch.zeros(1, 8, dtype=torch.int32),
            slot_mapping=torch.full((size,), -1), num_seqs=1, num_tokens=size, max_query_len=size, max_seq_len=size,
        )  # fmt: skip
        return StepInputs(
            input_ids=zeros, positions=zeros, kv_caches=kv_caches, logits_indices=zeros[:1], metadata=metadata
        )

    runner = CudaGraphRunner(
        model, mode="piecewise", max_num_seqs=8, backend=TorchAttention(), device=FakeDevice(), sizes=(8, 16, 32, 64)
    )
    runner.bind(Buffers(Backend()).inputs, prompt)
    estimate = runner.estimate_bytes(40, 4000)
    piecewise = runner._piecewise
    assert piecewise is not None
    step_of_16 = prompt(16)
    with attention_metadata(step_of_16.metadata):
        kept = piecewise.kept_bytes(step_of_16.input_ids, step_of_16.positions, kv_caches)
        held = piecewise._capture(step_of_16.input_ids, step_of_16.positions, kv_caches, runner.stats)
    alive = [value for name, value in held.values.items() if name.startswith("v")]
    assert (
        len({value.data_ptr() for value in alive}) == len(alive) == 2
    )  # what the last attention gave, and the residual
    assert kept == held.input_ids.nbytes + held.positions.nbytes + sum(value.nbytes for value in alive)
    assert estimate == 3200 + sum(kept * size // 16 + 10 for size in (8, 16, 32))


def test_piecewise_replays_equal_plain_steps(tmp_path: Path) -> None:
    """A compiled model, piece by piece: prompts of the same padded size with other tokens, rows of logits and lengths."""
    spec, model = compiled(tmp_path)
    runner = CudaGraphRunner(model, mode="piecewise", max_num_seqs=8, backend=TorchAttention(), device=FakeDevice())
    ours, theirs = caches(spec, torch.float32), caches(spec, torch.float32)
    for number, length in enumerate((8, 16, 8, 8, 8, 16, 16, 9, 8)):
        tokens = [(number * 31 + i * 7) % 320 for i in range(length)]
        expected = step(model, tokens, number * 3, theirs)
        torch.testing.assert_close(step(runner, tokens, number * 3, ours), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[0], theirs[0])
    assert runner.stats.replays == {"full": 0, "piecewise": 4}
    assert runner.stats.plain_steps == 5
    assert runner.padded_size(9, 1, 9) == 16
    assert runner.padded_size(3, 3, 1) == 4


def test_decodes_beyond_the_sizes_of_their_own_graphs_are_replayed_piece_by_piece(tmp_path: Path) -> None:
    spec, model = compiled(tmp_path)
    runner = CudaGraphRunner(
        model, mode="full_and_piecewise", max_num_seqs=8, backend=Backend(), device=FakeDevice(), sizes=(1, 2)
    )
    assert runner.padded_size(3, 3, 1) == 4
    backend, kv = TorchAttention(), caches(spec, torch.float32)
    lengths = torch.ones(4, dtype=torch.int32)
    metadata = AttentionMetadata(
        backend=backend, query_start_loc=torch.arange(5, dtype=torch.int32), seq_lens=lengths, num_seqs=4, num_tokens=4,
        block_table=torch.arange(4, dtype=torch.int32)[:, None], slot_mapping=torch.arange(4) * kv[0].shape[3],
        max_query_len=1, max_seq_len=1,
    )  # fmt: skip
    ids, zeros = torch.tensor([5, 6, 7, 8]), torch.zeros(4, dtype=torch.int64)
    for _ in range(3):
        with attention_metadata(metadata):
            logits = runner(ids, zeros, kv, torch.arange(4))
    with attention_metadata(metadata):
        torch.testing.assert_close(logits, model(ids, zeros, kv, torch.arange(4)), rtol=1e-5, atol=1e-5)
    assert runner.stats.replays == {"full": 0, "piecewise": 1}


def test_a_capture_that_fails_says_of_what() -> None:
    class Full(FakeDevice):
        error: Exception = torch.OutOfMemoryError("CUDA out of memory")

        def capture(self, *args: object, **options: object) -> object:  # type: ignore[override]
            raise self.error

    runner, *_ = make(device=Full())
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"graph of 40 decodes could not be captured: .*out of memory \(--cudagraph-mode none",
    ):
        runner.capture_next()
    Full.error = ValueError("odd")
    runner, *_ = make(device=Full())
    with pytest.raises(GraphCaptureError, match="ValueError: odd"):
        runner.capture_next()


def test_idle_moments_capture_every_piecewise_size_once(tmp_path: Path) -> None:
    spec, model = compiled(tmp_path)
    runner = CudaGraphRunner(
        model, mode="full_and_piecewise", max_num_seqs=8, backend=Backend(), device=FakeDevice(), sizes=(1, 2, 4, 8)
    )
    wanted = []
    while (size := runner.next_piecewise_size()) is not None and len(wanted) < 1000:
        wanted.append(size)
    assert wanted == sorted(piecewise_sizes(8, None, 4096), reverse=True)

    piecewise = CudaGraphRunner(model, mode="piecewise", max_num_seqs=8, backend=TorchAttention(), device=FakeDevice())
    size = piecewise.next_piecewise_size()
    assert size is not None
    step(piecewise, [7] * 16, 0, caches(spec, torch.float32))
    assert piecewise.stats.replays["piecewise"] == 0  # 16 was not the one that was wanted
    while size != 16:
        size = piecewise.next_piecewise_size()
        assert size is not None
    piecewise.capture_pieces_up_to(8)
    for _ in range(5):  # often enough to be captured without being wanted, too
        step(piecewise, [7] * 16, 0, caches(spec, torch.float32))
    assert piecewise.stats.replays["piecewise"] == 0
    piecewise.capture_pieces_up_to(None)
    step(piecewise, [7] * 16, 0, caches(spec, torch.float32))
    assert piecewise.stats.replays["piecewise"] == 1
