"""`make_engine_config`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from compile_and_serve.option_fields import at_least, make_config, option, options_of, signature_of
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.serve.cli.config_file import apply_config_file
from compile_and_serve.serve.cli.flags import arguments_of_flags, flag_parameters


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
    assert (config.mesh.size, config.num_processes) == (1, 2)


def test_only_a_compiled_model_is_sharded(tiny_llama_dir: Path) -> None:
    config = make_engine_config(str(tiny_llama_dir), tensor_parallel_size=4, data_parallel_size=2)
    assert (config.compile.tensor_parallel_size, config.mesh.size, config.num_processes) == (4, 4, 8)
    for name, value in (("enforce_eager", True), ("profile_tokens", [1])):
        with pytest.raises(ValueError, match=f"tensor_parallel_size.*{name}|{name}.*tensor_parallel_size"):
            make_engine_config(str(tiny_llama_dir), tensor_parallel_size=2, **{name: value})


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartConfig:
    layers: int = option(2, "Number of layers.", panel="Model", checks=(at_least(1),))


@dataclass(frozen=True, kw_only=True, slots=True)
class _TestConfig:
    part: _PartConfig = field(default_factory=_PartConfig)
    order: Literal["up", "down"] = option("up", "Order of the layers.")


def test_a_field_is_a_flag_an_argument_and_a_key_of_the_config_file(tmp_path: Path) -> None:
    options = options_of(_TestConfig)
    found: list[_TestConfig] = []

    def show(**flags: Any) -> None:
        found.append(make_config(_TestConfig, arguments_of_flags(options.values(), {"layers": flags["layers"], "order": flags["order"]})))

    config_flag = Annotated[Path | None, typer.Option(callback=apply_config_file, is_eager=True)]
    parameters = [
        *flag_parameters(options.values()).values(),
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config_flag),
    ]
    show.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    show.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer()
    app.command()(show)
    file = tmp_path / "options.yaml"
    file.write_text("layers: 5\n")

    help_text = CliRunner().invoke(app, ["--help"]).output
    assert "Number of layers. [default: 2]" in " ".join(help_text.replace("│", " ").split())
    assert CliRunner().invoke(app, ["--layers", "3", "--order", "down"]).exit_code == 0
    assert CliRunner().invoke(app, ["--config", str(file)]).exit_code == 0
    assert found == [_TestConfig(part=_PartConfig(layers=3), order="down"), _TestConfig(part=_PartConfig(layers=5))]
    assert CliRunner().invoke(app, ["--order", "left"]).exit_code == 2

    assert list(signature_of(_TestConfig).parameters) == ["layers", "order"]
    assert make_config(_TestConfig, {"layers": 4}) == _TestConfig(part=_PartConfig(layers=4))
    for name, value, expected in (("layers", 0, "at least 1"), ("order", "left", "one of up, down")):
        with pytest.raises(ValueError, match=f"{name} must be {expected}, got {value!r}"):
            make_config(_TestConfig, {name: value})


def test_an_unknown_option_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_sizes'"):
        make_engine_config(str(tiny_llama_dir), block_sizes=4)
    assert "block_size: int | None = None" in str(inspect.signature(make_engine_config))


def test_replicas_are_groups_of_one_engine_where_experts_are_spread(tiny_llama_dir: Path) -> None:
    config = make_engine_config(str(tiny_llama_dir), data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True)
    assert (config.parallel.data_parallel_size, config.mesh.data, config.mesh.size, config.num_processes) == (1, 2, 4, 4)
    with pytest.raises(ValueError, match="enable_expert_parallel is a pass of the compiler: remove enforce_eager"):
        make_engine_config(str(tiny_llama_dir), data_parallel_size=2, enforce_eager=True, enable_expert_parallel=True)
