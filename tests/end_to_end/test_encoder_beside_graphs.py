"""Graphs of an encoder that runs beside the model, and two ranks that share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner.media_encoder import MediaEncoder
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem
from tests.support.engines import run_requests, tiny_config, tokens_of
from tests.support.fake_graphs import FakeDevice
from tests.support.looking_model import MAX_IMAGE, expected_of_mixed, image, looking_folder, mixed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with looking_folder(tmp_path_factory) as made:
        yield made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return expected_of_mixed(folder)


@pytest.mark.slow
def test_rows_are_those_without_graphs(folder: Path, tmp_path: Path) -> None:
    """The fourth step of a bucket captures its graphs; other lengths in the bucket replay them."""
    core = EngineCore(tiny_config(folder, enforce_eager=False, cache_dir=tmp_path, max_encoder_tokens=64))
    loaded = core.executor.worker.loaded  # type: ignore[attr-defined]
    side, spec, info = loaded.encoder, loaded.spec, loaded.encoder_info
    graphs = CudaGraphRunner(side.model, mode="piecewise", max_num_seqs=1, max_tokens=64, backends=(), device=FakeDevice())
    replaying, plain = (MediaEncoder(side, steps, spec, info, torch.device("cpu")) for steps in (graphs, PlainRunner(side.model)))
    for number, lengths in enumerate([(12,), (4, 9), (10,), (13,), (14,), (5, 4, 3), (11,)]):
        arrays = [{"patches": StepArray.of(image(10 * number + i, one), start=0)} for i, one in enumerate(lengths)]
        items = [EncodeItem(request_id="", position=0, length=lengths[i], page_ids=[i], arrays=one) for i, one in enumerate(arrays)]
        for encoder in (replaying, plain):
            encoder.encode(items)
        written: list[dict[str, torch.Tensor]] = [{}, {}]
        for encoder, state in zip((replaying, plain), written, strict=True):
            encoder.share(state)
        torch.testing.assert_close(*written)
        assert graphs.stats.replays["piecewise"] == max(0, number - 2)
    core.shutdown()


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["piecewise"])
@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_graphs_are_captured_in_idle_moments_and_after_sleep(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    module = "compile_and_serve.runtime.runner.cuda_graphs"
    monkeypatch.setattr(f"{module}.CudaGraphs", lambda _: FakeDevice())
    monkeypatch.setattr(f"{module}.platform_of", lambda _: SimpleNamespace(replays_graphs=True))
    dummies, run_dummy = list[int](), MediaEncoder.run_dummy
    monkeypatch.setattr(MediaEncoder, "run_dummy", lambda self, count: (dummies.append(count), run_dummy(self, count)))
    options: dict[str, Any] = {"enforce_eager": False, "cache_dir": tmp_path, "max_num_batched_tokens": 9, "max_encoder_tokens": 64}
    core = EngineCore(tiny_config(folder, cudagraph_mode=mode, **options))
    worker = core.executor.worker  # type: ignore[attr-defined]
    for level in (1, 2, 1):
        graphs = worker._graphs
        assert dummies == [MAX_IMAGE]  # the warm-up
        assert (graphs is None) == (mode == "none")
        if graphs is not None:
            sizes = [1, 2, 4, *range(8, 65, 8)]
            assert graphs.estimate_bytes(9, 0, 64) > graphs.estimate_bytes(9, 0) + 10 * len(sizes)
            while worker.idle():
                pass
            assert dummies[1:] == sizes[::-1]
            assert graphs.encoder._piecewise._captured.keys() == set(sizes)
        assert tokens_of(run_requests(core, mixed())) == expected
        core.sleep(level)
        dummies.clear()
        core.wake_up()
    core.shutdown()


@pytest.mark.exhaustive
def test_two_ranks(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    core = EngineCore(tiny_config(folder, cache_dir=tmp_path, tensor_parallel_size=2, max_num_batched_tokens=24))
    assert tokens_of(run_requests(core, mixed())) == expected
    core.shutdown()
