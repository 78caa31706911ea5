"""`make_engine_config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.options import make_engine_config


def test_options_reach_their_dataclasses(tiny_llama_dir: Path) -> None:
    config = make_engine_config(
        str(tiny_llama_dir),
        dtype="float32",
        max_model_len=64,
        num_kv_blocks=10,
        max_num_seqs=3,
        scheduling_policy="priority",
        enforce_eager=True,
        capture_sizes=[4, 1, 4],
        cache_dir="x",
        num_threads=1,
        data_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert config.model.path == tiny_llama_dir
    assert (config.model.dtype, config.model.max_model_len) == ("float32", 64)
    assert config.cache.num_blocks == 10
    assert (config.scheduler.max_num_seqs, config.scheduler.policy) == (3, "priority")
    assert (config.compile.mode, config.compile.capture_sizes, config.compile.cache_dir) == ("eager", (1, 4), Path("x"))
    assert config.num_threads == 1
    assert (config.parallel.data_parallel_size, config.parallel.executor) == (2, "mp")
    assert (config.num_ranks, config.num_processes) == (1, 2)


def test_only_a_compiled_model_is_sharded(tiny_llama_dir: Path) -> None:
    config = make_engine_config(str(tiny_llama_dir), tensor_parallel_size=4, data_parallel_size=2)
    assert (config.compile.tensor_parallel_size, config.num_ranks, config.num_processes) == (4, 4, 8)
    for option, value in (("enforce_eager", True), ("profile_tokens", [1])):
        with pytest.raises(ValueError, match=f"tensor_parallel_size.*{option}|{option}.*tensor_parallel_size"):
            make_engine_config(str(tiny_llama_dir), tensor_parallel_size=2, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("option,value", [
    ("dtype", "float64"), ("kv_cache_dtype", "fp4"), ("max_num_seqs", 0), ("block_size", -1), ("gpu_memory_utilization", 1.5),
    ("device", "tpu"),
    ("scheduling_policy", "fair"), ("max_waiting", -1), ("capture_sizes", [0]), ("num_threads", 0), ("tensor_parallel_size", 0),
    ("data_parallel_size", 0), ("distributed_executor_backend", "mpi"),
])  # fmt: skip
def test_option_out_of_range_is_named(tiny_llama_dir: Path, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        make_engine_config(str(tiny_llama_dir), **{option: value})


def test_adapters_of_experts_need_adapters(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValueError, match="together with enable_lora"):
        make_engine_config(str(tiny_llama_dir), lora_experts=True)


def test_only_one_size_of_the_kv_cache_may_be_given(tiny_llama_dir: Path) -> None:
    with pytest.raises(ValueError, match="one of them"):
        make_engine_config(str(tiny_llama_dir), num_kv_blocks=4, kv_cache_memory_bytes=1000)
