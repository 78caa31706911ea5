"""Load weights into a compiled model: through its transforms, from one file or shards, and the error messages."""

from __future__ import annotations

import json
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compile_and_serve.compiler.passes  # noqa: F401 (registers the functions of shards)
from compile_and_serve.compiler.weights.transforms import WeightTransform
from compile_and_serve.custom_ops.mesh import TENSOR
from compile_and_serve.custom_ops.weight_functions import TensorSpec
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.weights import LoadReport, WeightError, load_weights, loader, read_config


class RecordingTarget:
    """A compiled model that merges each layer's q, k and v rows, and records what it is assigned."""

    def __init__(self, spec: ModelSpec, *, merge_qkv: bool = True) -> None:
        parameters = dict(spec.module.named_parameters())
        self.source_specs = {n: TensorSpec(shape=tuple(p.shape), dtype=p.dtype) for n, p in parameters.items()}
        self.source_specs |= {n: TensorSpec(shape=tuple(b.shape), dtype=b.dtype) for n, b in spec.buffers.items()}
        transforms: list[WeightTransform] = []
        for name, tensor in self.source_specs.items():
            if merge_qkv and name.endswith("q_proj.weight"):
                parts = [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
                rows = sum(self.source_specs[part].shape[0] for part in parts)
                merged = TensorSpec(shape=(rows, tensor.shape[1]), dtype=tensor.dtype)
                target = name.replace("q_proj", "qkv_proj")
                transforms.append(WeightTransform(expression=("cat", *parts), target=target, spec=merged))
            elif not (merge_qkv and name.endswith(("k_proj.weight", "v_proj.weight"))):
                transforms.append(WeightTransform(expression=name, target=name, spec=tensor))
        self.transforms = tuple(transforms)
        self.assigned: dict[str, torch.Tensor] = {}
        self.finished = False

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self.assigned, f"{name} assigned twice"
        self.assigned[name] = tensor.clone()

    def finish_loading(self) -> None:
        assert {t.target for t in self.transforms} == set(self.assigned)
        self.finished = True


def load(path: Path, *, config: dict[str, Any] | None = None, **options: Any) -> tuple[RecordingTarget, LoadReport]:
    spec = build_model(config or read_config(path), dtype=options.get("dtype", torch.float32))
    target = RecordingTarget(spec)
    defaults = {"load_format": "auto", "device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    return target, load_weights(target, spec, path, **(defaults | options))


def test_single_file_through_transforms(tiny_llama_dir: Path) -> None:
    target, report = load(tiny_llama_dir)
    tensors = load_file(tiny_llama_dir / "model.safetensors")
    attn = "model.layers.1.self_attn."
    expected = torch.cat([tensors[f"{attn}{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(target.assigned[f"{attn}qkv_proj.weight"], expected)
    assert torch.equal(target.assigned["lm_head.weight"], tensors["lm_head.weight"])
    assert target.assigned["model.rotary_emb.inv_freq"].dtype == torch.float32
    assert target.finished
    assert report.num_tensors == len(tensors)
    assert report.num_bytes == sum(t.nbytes for t in tensors.values())
    assert report.unexpected == ()


def test_shards_load_the_same_as_one_file(tiny_llama_dir: Path, tmp_path: Path) -> None:
    whole, _ = load(tiny_llama_dir)
    sharded, _ = load(shard(tiny_llama_dir, tmp_path, num_shards=3))
    assert whole.assigned.keys() == sharded.assigned.keys()
    assert all(torch.equal(whole.assigned[name], sharded.assigned[name]) for name in whole.assigned)


def test_tensors_are_converted_and_buffers_are_not(tiny_llama_dir: Path) -> None:
    target, _ = load(tiny_llama_dir, dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in target.assigned.items()}
    assert dtypes.pop("model.rotary_emb.inv_freq") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_a_source_is_dropped_after_its_last_transform(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the inputs of one unfinished merge are in memory, whatever the number of layers."""
    alive: dict[str, weakref.ref[torch.Tensor]] = {}
    most_alive = 0

    def watched(tensors: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal most_alive
        for name, tensor in tensors(*args, **kwargs):
            alive[name] = weakref.ref(tensor)
            most_alive = max(most_alive, sum(ref() is not None for ref in alive.values()))
            yield name, tensor
            del tensor

    original = loader.dummy_tensors
    monkeypatch.setattr(loader, "dummy_tensors", lambda *args, **kwargs: watched(original, *args, **kwargs))
    load(tiny_llama_dir, load_format="dummy", config=read_config(tiny_llama_dir) | {"num_hidden_layers": 12})
    assert len(alive) > 100
    assert most_alive <= 4  # q and k wait for v, and the loop holds one more


class ShardedTarget(RecordingTarget):
    """A `RecordingTarget` for one of two ranks: columns of the output projections, and rows of the other linears."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.transforms = tuple(self._sharded(transform) for transform in self.transforms)

    def _sharded(self, transform: WeightTransform) -> WeightTransform:
        rows, *columns = transform.spec.shape
        expression = transform.expression
        if not columns:
            return transform
        if transform.target.endswith(("o_proj.weight", "down_proj.weight")):
            shape = (rows, columns[0] // 2)
            expression = ("shard_columns", expression, 2)
        else:
            shape = (rows // 2, *columns)
            sharded = [("shard_rows", source, 2, 2) for source in transform.sources]
            expression = ("cat", *sharded) if len(sharded) > 1 else sharded[0]
        spec = TensorSpec(shape=shape, dtype=transform.spec.dtype)
        return WeightTransform(expression=expression, target=transform.target, spec=spec)


@pytest.mark.parametrize("source", ["auto", "dummy"])
def test_a_rank_reads_and_holds_only_its_shard(source: str, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks together read each sharded byte once. A shard that waits for a merge holds only its own memory."""
    whole, report = load(tiny_llama_dir, load_format=source)
    spec = build_model(read_config(tiny_llama_dir), dtype=torch.float32)
    options: dict[str, Any] = {"load_format": source, "device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    ranks, reports = [], []
    for rank in range(2):
        target = ShardedTarget(spec)
        reports.append(load_weights(target, spec, tiny_llama_dir, coordinates={TENSOR: rank}, **options))
        ranks.append(target.assigned)
    norms = sum(t.nbytes for name, t in whole.assigned.items() if name.endswith("norm.weight"))
    assert [one.num_bytes for one in reports] == [(report.num_bytes + norms) // 2] * 2
    q, k = 64 * 64 * 4, 32 * 64 * 4
    # A rank's q and k wait for v. Whole tensors would be q + k.
    assert [one.max_waiting_bytes for one in reports] == [(q + k) // 2] * 2
    for name, tensor in whole.assigned.items():
        parts = [assigned[name] for assigned in ranks]
        if "qkv_proj" in name:  # each rank's rows are its query, key and value heads
            splits = [part.split((32, 16, 16)) for part in parts]
            joined = torch.cat([torch.cat(pair) for pair in zip(*splits, strict=True)])
        elif tensor.dim() == 1:
            joined = parts[1]
        else:
            joined = torch.cat(parts, dim=1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)
        assert torch.equal(joined, tensor), name


def test_unused_tensors_are_named_in_a_warning(tiny_llama_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = rewrite(tiny_llama_dir, tmp_path, lambda tensors: tensors | {"vision.patch.weight": torch.zeros(2)})
    with caplog.at_level(logging.WARNING):
        _, report = load(folder)
    assert report.unexpected == ("vision.patch.weight",)
    assert "vision.patch.weight" in caplog.text


def test_ignored_scales_of_an_fp8_cache_are_reported(tiny_llama_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = {f"model.layers.{i}.self_attn.{name}_scale": torch.ones(1) for i in range(2) for name in "kv"}
    with caplog.at_level(logging.WARNING):
        _, report = load(rewrite(tiny_llama_dir, tmp_path, lambda tensors: tensors | scales))
    assert set(report.unexpected) == set(scales)
    [record] = caplog.records
    assert "scales of the KV cache are not used" in record.message


def test_a_tied_head_in_the_checkpoint_is_not_unexpected(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    target, report = load(rewrite(tiny_qwen3_dir, tmp_path, add_head))
    assert report.unexpected == ()
    assert "lm_head.weight" not in target.assigned


def test_dummy_weights_depend_only_on_name_and_seed(tiny_llama_dir: Path) -> None:
    config = read_config(tiny_llama_dir)
    first, report = load(tiny_llama_dir, load_format="dummy")
    again, _ = load(tiny_llama_dir, load_format="dummy", config=config | {"num_hidden_layers": 1})
    other, _ = load(tiny_llama_dir, load_format="dummy", seed=1)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(first.assigned[name], again.assigned[name])
    assert not torch.equal(first.assigned[name], other.assigned[name])
    assert not torch.equal(first.assigned[name], first.assigned[name.replace("layers.0", "layers.1")])
    assert first.assigned["model.embed_tokens.weight"].std().item() == pytest.approx(config["initializer_range"], rel=0.05)
    assert torch.equal(first.assigned["model.norm.weight"], torch.ones(64))
    assert report.num_tensors == 21


def rewrite(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    save_file(change(load_file(folder / "model.safetensors")), to / "model.safetensors", metadata={"format": "pt"})
    return to


def shard(folder: Path, to: Path, *, num_shards: int) -> Path:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::num_shards]}
        save_file(part, to / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shutil.copy(folder / "config.json", to)
    return to


def without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return damage


def with_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, folder / "model.safetensors")


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def truncated_in_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def index_names_absent_shard(folder: Path) -> None:
    weight_map = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_names_absent_tensor(folder: Path) -> None:
    weight_map = {"model.elsewhere.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_is_not_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def quantized(folder: Path) -> None:
    config = read_config(folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{'a': 1}")


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def config_without_architecture(folder: Path) -> None:
    config = read_config(folder)
    del config["architectures"], config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight, which the model's"),
        (with_wrong_shape, "model.norm.weight in {} has shape [65], but the model's config makes it [64]"),
        (truncated, "model.safetensors is truncated or not a safetensors file"),
        (truncated_in_header, "model.safetensors is truncated or not a safetensors file"),
        (empty_file, "model.safetensors is truncated or not a safetensors file"),
        (no_weights, "has neither model.safetensors nor model.safetensors.index.json"),
        (index_names_absent_shard, "names model-00002-of-00002.safetensors, which is not in"),
        (index_names_absent_tensor, "lacks model.elsewhere.weight, although model.safetensors.index.json lists it there"),
        (index_is_not_json, 'must be a JSON object with a "weight_map"'),
        (quantized, "quant_method 'hqq' is not supported: use a checkpoint in the format auto-round, awq"),
        (no_config, "has no config.json"),
        (config_is_not_json, "config.json is not valid JSON"),
        (config_is_a_list, "must hold a JSON object, got a list"),
        (config_without_architecture, "names no architecture"),
    ],
)
def test_the_error_of_a_damaged_model_is_one_sentence(
    damage: Callable[[Path], None], message: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    damage(folder)
    with pytest.raises(ValueError) as error:
        load(folder)
    assert message.format(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert type(error.value) is WeightError or "architecture" in message or "quant_method" in message
