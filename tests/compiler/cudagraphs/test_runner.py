"""Which steps replay which graph, with a fake in place of CUDA's graphs."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compile_and_serve.compiler.cudagraphs.graph_capture import GraphCaptureError
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.piecewise import max_piecewise_tokens
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, capture_order, default_sizes, piecewise_sizes
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.pieces.plan import PieceStep
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.step import Step
from tests.support.decode_models import Backend, Buffers, compiled, make, run
from tests.support.fake_graphs import FakeDevice
from tests.support.tiny_models import PAGE_SIZES, caches, step


class NotCapturable(Backend):
    name = "plain"
    decode_capturable = False


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

    assert max_piecewise_tokens(layers(150_000_000, 15_000_000, 15_000_000)) == 4096
    assert max_piecewise_tokens(layers(15_000_000, 218_000_000, 218_000_000)) == 2048
    assert [max_piecewise_tokens(layers(15_000_000), longest) for longest in (1000, 3000, 5000, 16384)] == [2048, 4096, 8192, 8192]


def test_padding() -> None:
    runner, *_ = make()
    assert [runner.padded_size(n, n, 1) for n in (1, 2, 3, 5, 9, 17, 40)] == [1, 2, 4, 8, 16, 24, 40]
    assert runner.padded_size(41, 41, 1) is None
    assert runner.padded_size(5, 2, 4) is None
    assert runner.max_padded_size == 40


def test_sizes_far_apart_are_captured_first() -> None:
    assert capture_order((1, 2, 4, 8, 16, 24, 32, 40, 64, 72)) == [72, 1, 64, 16, 4, 32, 8, 2, 40, 24]
    assert capture_order((1, 2, 4, 8)) == [8, 1, 4, 2]


def test_capturing_begins_with_the_largest_and_goes_on_with_what_lost_most() -> None:
    runner, model, buffers, device = make()
    assert runner.capture(3) == 3
    assert model.sizes_run == [40, 1, 16]
    run(runner, buffers.inputs(8))
    assert runner.capture_next()
    assert model.sizes_run[-1] == 8
    runner.capture()
    assert not runner.capture_next()
    assert runner.report()["full_graphs"] == len(runner.sizes)
    assert runner.report()["used_bytes"] == device.used
    assert runner.stats.capture_seconds == pytest.approx(0.5 * len(runner.sizes))


def test_decodes_run_in_the_next_captured_size_until_their_own_is_due() -> None:
    runner, _, buffers, _ = make()
    runner.capture(3)  # 40, 1, 16
    assert [runner.padded_size(n, n, 1) for n in (1, 2, 16, 17, 40)] == [1, 16, 16, 40, 40]
    padded = replace(buffers.inputs(16), num_tokens=10, num_seqs=10)
    due = [runner.run(padded).is_capture_due for _ in range(40)]  # each loses nothing: 16 is their own size
    assert not any(due)
    padded = replace(buffers.inputs(40), num_tokens=24, num_seqs=24)
    due = [runner.run(padded).is_capture_due for _ in range(30)]
    assert due.index(True) in (23, 24)  # of 24 sequences, each step loses 40 / 24 - 1 of one; a capture takes 16
    assert runner.stats.replays["full"] == 70
    assert runner.capture_next()
    assert runner.padded_size(20, 20, 1) == 24


def test_steps_before_the_first_capture_ask_for_nothing() -> None:
    runner, model, buffers, _ = make()
    run(runner, buffers.inputs(1))
    runner.capture(1)
    assert model.sizes_run[-1] == 40  # the first size in order, not the step's


def test_a_capture_is_due_once_steps_without_it_have_lost_as_much() -> None:
    runner, _, buffers, _ = make(sizes=(4, 40))
    runner.capture(1)
    due = [runner.run(buffers.inputs(4)).is_capture_due for _ in range(9)]
    assert due == [*[False] * 3, *[True] * 6]
    assert runner.capture_next()
    assert not runner.run(buffers.inputs(4)).is_capture_due


def test_a_step_without_sampling_gets_a_graph_of_its_own() -> None:
    runner, _, buffers, _ = make(decode_tail=lambda outputs, inputs: (outputs["logits"].argmax(1),), sizes=(4,))
    runner.capture()
    assert runner.run(buffers.inputs(4)).sampled is not None
    for number in range(1, 5):
        before = runner.run(buffers.inputs(4), with_sampling=False)
        assert before.sampled is None
        assert before.is_capture_due == (number == 4)
    assert runner.stats.plain_steps == 4
    assert runner.capture() == 1
    after = runner.run(buffers.inputs(4), with_sampling=False)
    assert after.sampled is None
    assert not after.is_capture_due
    assert torch.equal(after.outputs["logits"], before.outputs["logits"])
    assert runner.stats.plain_steps == 4


def test_decodes_of_several_tokens_are_padded_with_whole_sequences() -> None:
    runner, *_ = make(query_len=3, sizes=(1, 4, 8))
    assert [runner.padded_size(3 * n, n, 3) for n in (1, 2, 8)] == [3, 12, 24]
    assert runner.padded_size(4, 4, 1) is None
    assert runner.max_padded_size == 24


def test_graphs_stay_with_the_buffers_that_they_were_captured_on() -> None:
    runner, _, buffers, _ = make()
    runner.bind(None)
    runner.bind(buffers.inputs)
    runner.capture(1)
    with pytest.raises(AssertionError, match="of other buffers"):
        runner.bind(buffers.inputs)


def test_replay_reads_the_buffers_of_now() -> None:
    runner, model, buffers, _ = make(decode_tail=lambda outputs, inputs: (outputs["logits"].argmax(1),))
    runner.capture()
    ran = len(model.sizes_run)
    buffers.input_ids[:4] = torch.tensor([5, 6, 7, 0])
    buffers.seq_lens[:4] = torch.tensor([9, 80, 3, 0])
    result = runner.run(buffers.inputs(4))
    assert result.outputs["logits"].tolist() == [[10, 9], [12, 80], [14, 3], [0, 0]]
    assert result.sampled is not None
    assert result.sampled[0].tolist() == [0, 1, 0, 0]
    assert runner.stats.replays["full"] == 1
    assert runner.stats.plain_steps == 0
    assert model.sizes_run[ran:] == [4]  # the fake's replay


def test_what_a_graph_does_not_cover_runs_as_it_is() -> None:
    runner, _, buffers, _ = make(decode_tail=lambda outputs, inputs: (outputs["logits"],))
    runner.capture()
    four = buffers.inputs(4)
    elsewhere = replace(four, inputs={**four.inputs, "input_ids": four.inputs["input_ids"].clone()})
    other_cache = replace(four, state={"kv_caches.0": buffers.caches[0].clone()})
    prefill = replace(four, max_query_len=4)
    unpadded = buffers.inputs(5)
    for count, inputs in enumerate((elsewhere, other_cache, prefill, unpadded), start=1):
        assert runner.run(inputs).sampled is None
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


def test_estimate_of_piecewise_graphs(shared_cache_dir: Path) -> None:
    """What the graphs of a size keep is what its capture holds; the others' share is by their length."""
    spec, model = compiled(shared_cache_dir)
    state = caches(spec, torch.float32)

    def prompt(size: int) -> Step:
        return make_step(spec.inputs, spec.state, [(0, size)], state=state, tokens_per_page=PAGE_SIZES, writes_state=False)

    runner = CudaGraphRunner(
        model, mode="piecewise", max_num_seqs=8, backends=[TorchAttention()], device=FakeDevice(), sizes=(8, 16, 32, 64)
    )
    runner.bind(Buffers(Backend()).inputs, prompt)
    estimate = runner.estimate_bytes(40, 4000)
    piecewise = runner._piecewise
    assert piecewise is not None
    kept = piecewise.kept_bytes(prompt(16))
    held = piecewise._capture(prompt(16), runner.stats)
    alive = [value for name, value in held.values.items() if re.fullmatch(r"v\d+", name)]
    # the last attention's output, and the residual
    assert len({value.data_ptr() for value in alive}) == len(alive) == 2
    assert kept == sum(value.nbytes for value in (*held.inputs.values(), *alive))
    assert estimate == 3200 + sum(kept * size // 16 + 10 for size in (8, 16, 32))


def test_piecewise_replays_equal_plain_steps(shared_cache_dir: Path) -> None:
    """A compiled model, piece by piece: prompts of the same padded size with other tokens, rows of logits and lengths."""
    spec, model = compiled(shared_cache_dir)
    runner = CudaGraphRunner(model, mode="piecewise", max_num_seqs=8, backends=[TorchAttention()], device=FakeDevice())
    ours, theirs = caches(spec, torch.float32), caches(spec, torch.float32)
    for number, length in enumerate((*[8, 16] * 4, 9, 8)):
        tokens = [(number * 31 + i * 7) % 320 for i in range(length)]
        expected = step(model, tokens, number * 3, theirs)
        torch.testing.assert_close(step(runner, tokens, number * 3, ours), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours["kv_caches.0"], theirs["kv_caches.0"])
    assert runner.stats.replays == {"full": 0, "piecewise": 3}
    assert runner.stats.plain_steps == 7
    assert runner.padded_size(9, 1, 9) == 16
    assert runner.padded_size(3, 3, 1) == 8  # captured, and no more than twice as many


def test_sizes_of_an_octave_share_its_first_graph(shared_cache_dir: Path) -> None:
    """Each octave is captured after four plain steps."""
    spec, model = compiled(shared_cache_dir)
    runner = CudaGraphRunner(
        model,
        mode="piecewise",
        max_num_seqs=8,
        backends=[TorchAttention()],
        device=FakeDevice(),
        sizes=(16, 20, 24, 28, 32, 40, 48, 56, 64),
    )
    state = caches(spec, torch.float32)
    for length in (20, 24, 28, 20, 32, 40, 64, 56, 48, 64):
        step(runner, list(range(length)), 0, state)
    assert {n: runner.padded_size(n, 1, n) for n in (17, 20, 32, 33, 60)} == {17: 32, 20: 32, 32: 32, 33: 64, 60: 64}
    assert runner.stats.plain_steps == 8


def test_decodes_beyond_the_sizes_of_their_own_graphs_are_replayed_piece_by_piece(shared_cache_dir: Path) -> None:
    spec, model = compiled(shared_cache_dir)
    runner = CudaGraphRunner(model, mode="full_and_piecewise", max_num_seqs=8, backends=[Backend()], device=FakeDevice(), sizes=(1, 2))
    assert runner.padded_size(3, 3, 1) == 4
    made = make_step(
        spec.inputs,
        spec.state,
        [(0, 1)] * 4,
        state=caches(spec, torch.float32),
        tokens_per_page=PAGE_SIZES,
        token_ids=np.array([5, 6, 7, 8]),
    )
    for _ in range(4):
        logits = run(runner, made)
    torch.testing.assert_close(logits, model(made)["logits"], rtol=1e-5, atol=1e-5)
    assert runner.stats.replays == {"full": 0, "piecewise": 1}


def test_decodes_that_lie_elsewhere_are_replayed_piece_by_piece(shared_cache_dir: Path) -> None:
    """Beside prompts of one token, decodes have the shape of decodes, but not the memory that their graphs read."""
    spec, model = compiled(shared_cache_dir)
    state = caches(spec, torch.float32)

    def decodes(size: int) -> Step:
        return make_step(spec.inputs, spec.state, [(0, 1)] * size, state=state, tokens_per_page=PAGE_SIZES)

    runner = CudaGraphRunner(model, mode="full_and_piecewise", max_num_seqs=8, backends=[Backend()], device=FakeDevice(), sizes=(4, 8))
    runner.bind(decodes)
    runner.capture()
    elsewhere = decodes(4)
    for number in range(6):
        result = runner.run(elsewhere)
        assert (result.kind, result.miss) == (("plain", "addresses") if number < 3 else ("piecewise", ""))
        assert result.sampled is None
        assert not result.is_capture_due
    torch.testing.assert_close(result.outputs["logits"], model(elsewhere)["logits"], rtol=1e-5, atol=1e-5)
    unsampled = [runner.run(decodes(size), with_sampling=False) for size in (4, 8)]
    assert [one.kind for one in unsampled] == ["piecewise", "plain"]  # they ask for a graph of their own, and for no second one
    assert runner.capture() == 2


def test_a_capture_that_fails_says_of_what() -> None:
    class Full(FakeDevice):
        error: Exception = torch.OutOfMemoryError("CUDA out of memory")

        def capture(self, *args: object, **options: object) -> object:  # type: ignore[override]
            raise self.error

    runner, *_ = make(device=Full())
    with pytest.raises(torch.OutOfMemoryError, match=r"graph of 40 decodes could not be captured: .*out of memory \(--cudagraph-mode none"):
        runner.capture_next()
    Full.error = ValueError("odd")
    runner, *_ = make(device=Full())
    with pytest.raises(GraphCaptureError, match="ValueError: odd"):
        runner.capture_next()


def test_idle_moments_capture_every_piecewise_size_once(shared_cache_dir: Path) -> None:
    spec, model = compiled(shared_cache_dir)
    runner = CudaGraphRunner(
        model, mode="full_and_piecewise", max_num_seqs=8, backends=[Backend()], device=FakeDevice(), sizes=(1, 2, 4, 8)
    )
    wanted = []
    while (size := runner.next_piecewise_size()) is not None and len(wanted) < 1000:
        wanted.append(size)
    assert wanted == sorted(piecewise_sizes(8, None, 4096), reverse=True)

    piecewise = CudaGraphRunner(model, mode="piecewise", max_num_seqs=8, backends=[TorchAttention()], device=FakeDevice())
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


def test_graphs_are_captured_again_once_and_serve_until_then() -> None:
    runner, model, buffers, device = make()
    runner.capture()
    sizes, memory = list(runner.sizes), device.used
    runner.renew()
    assert runner.num_waiting == len(sizes)
    run(runner, buffers.inputs(2))
    assert runner.stats.replays["full"] == 1
    model.sizes_run.clear()
    assert runner.capture() == len(sizes)
    assert sorted(model.sizes_run) == sizes
    assert device.used == 2 * memory  # of the fake, which frees nothing
    assert runner.stats.captured["full"] == len(sizes)
    assert runner.padded_size(3, 3, 1) == 4
    run(runner, buffers.inputs(2))
    assert runner.stats.replays["full"] == 2
    assert runner.stats.plain_steps == 0


def test_pieces_are_captured_again_by_the_next_steps_of_their_sizes(shared_cache_dir: Path) -> None:
    spec, model = compiled(shared_cache_dir)
    runner = CudaGraphRunner(model, mode="piecewise", max_num_seqs=8, backends=[TorchAttention()], device=FakeDevice())
    while (size := runner.next_piecewise_size()) is not None:
        if size == 16:
            step(runner, [7] * 16, 0, caches(spec, torch.float32))
    captured = runner.stats.captured["piecewise"]
    runner.renew()
    step(runner, [7] * 16, 0, caches(spec, torch.float32))
    assert runner.stats.captured["piecewise"] == captured  # replayed as they are
    assert runner.next_piecewise_size() == 16
    step(runner, [7] * 16, 0, caches(spec, torch.float32))
    assert runner.stats.captured["piecewise"] == 2 * captured
    assert runner.next_piecewise_size() is None


def test_a_size_that_waits_for_its_kernels_is_captured_for_the_time_being_where_steps_lose_much(shared_cache_dir: Path) -> None:
    spec, model = compiled(shared_cache_dir)
    runner = CudaGraphRunner(model, mode="piecewise", max_num_seqs=8, backends=[TorchAttention()], device=FakeDevice(), sizes=(8, 16, 24))
    runner.capture_pieces_up_to(8)
    state = caches(spec, torch.float32)
    for _ in range(35):
        step(runner, [7] * 16, 0, state)
    assert (runner.stats.plain_steps, runner.stats.replays["piecewise"]) == (31, 4)
    captured = runner.stats.captured["piecewise"]
    runner.capture_pieces_up_to(None)
    step(runner, [7] * 16, 0, state)
    assert (runner.stats.plain_steps, runner.stats.captured["piecewise"]) == (31, captured)  # its graphs go on,
    assert [runner.next_piecewise_size() for _ in range(3)] == [24, 16, 8]  # and are wanted again
    for _ in range(2):
        step(runner, [7] * 16, 0, state)
    assert (runner.stats.plain_steps, runner.stats.captured["piecewise"]) == (31, 2 * captured)
    assert runner.stats.replays["piecewise"] == 7


def test_octaves_are_captured_whatever_the_limit_and_serve_every_step(shared_cache_dir: Path) -> None:
    spec, model = compiled(shared_cache_dir)
    runner = CudaGraphRunner(
        model, mode="piecewise", max_num_seqs=8, backends=[TorchAttention()], device=FakeDevice(), sizes=(8, 12, 16, 20, 24, 28, 32)
    )
    runner.capture_pieces_up_to(8)
    state = caches(spec, torch.float32)
    octaves = GraphRunners([runner]).want_octaves()
    assert octaves == [32, 16, 8]
    for size in octaves:
        step(runner, [7] * size, 0, state)
    padded = [runner.padded_size(length, 1, length) for length in (5, 8, 9, 16, 17, 32)]
    assert padded == [8, 8, 16, 16, 32, 32]
    for size in octaves:
        step(runner, [7] * size, 0, state)
    assert (runner.stats.plain_steps, runner.stats.replays["piecewise"]) == (0, 6)


def test_two_plans_capture_in_turns_and_the_one_that_loses_more_goes_first() -> None:
    device, stats = FakeDevice(), GraphStats()
    runner, _, buffers, _ = make(device=device, stats=stats)
    plain, _, _, _ = make(device=device, stats=stats)
    graphs = GraphRunners([runner, plain])
    graphs.bind(buffers.inputs)
    graphs.capture(2)
    assert stats.captured["full"] == 4
    assert graphs.report()["waiting"] == graphs.num_to_capture == 2 * (len(runner.sizes) - 2)
    for _ in range(3):
        run(plain, buffers.inputs(8))  # which has no graph yet: it is padded to none of the captured ones
    assert plain.largest_loss > runner.largest_loss == 0
    before = plain.num_waiting
    assert graphs.capture_next()
    assert (plain.num_waiting, runner.num_waiting) == (before - 1, len(runner.sizes) - 2)
    while graphs.capture_next():
        pass
    assert stats.captured["full"] == 2 * len(runner.sizes)
