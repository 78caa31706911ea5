"""Model folders as they are found: files that contradict or lack what another file says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import WeightError, read_config
from tests.support.loaded_checkpoints import load
from tests.support.tiny_models import plain_logits
from tests.support.transformers_models import write_random_model

TOKENS = [(7 * i * i + 3 * i + 11) % 320 for i in range(40)]
HEADS = {"GPT2LMHeadModel": "lm_head.weight", "BioGptForCausalLM": "output_projection.weight"}


def edit(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in remove}))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def found(folder: Path) -> torch.Tensor:
    return plain_logits(load(folder).spec, TOKENS, torch.float32)  # type: ignore[attr-defined]


def expected(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def assert_equals_transformers(folder: Path) -> None:
    torch.testing.assert_close(found(folder), expected(folder), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("architecture", "is_tied"), [("LlamaForCausalLM", False), ("Gemma3ForCausalLM", True)])
@pytest.mark.parametrize("says", [319, 400])
def test_the_rows_of_the_embedding_are_the_number_of_tokens(
    architecture: str, is_tied: bool, says: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_random_model(tmp_path, architecture, tie_word_embeddings=is_tied)
    right = expected(folder)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(found(edit(folder, vocab_size=says)), right, rtol=2e-4, atol=2e-4)
    assert f"holds 320 rows of model.embed_tokens.weight: they are used, although config.json has vocab_size {says}." in caplog.text


def test_a_head_of_another_size_is_one_sentence(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=False)
    write(edit(folder, vocab_size=300), {**tensors_of(folder), "lm_head.weight": torch.ones(310, 64)})
    with pytest.raises(WeightError, match=r"lm_head.weight in .* has shape \[310, 64\], but the model's config makes it \[300, 64\]"):
        load(folder)


class TestTying:
    @pytest.mark.parametrize(
        ("architecture", "without"),
        [
            ("LlamaForCausalLM", ()),
            ("Gemma3ForCausalLM", ()),
            ("Qwen3MoeForCausalLM", ()),
            ("GPT2LMHeadModel", ("intermediate_size", "num_key_value_heads", "head_dim")),
            ("BioGptForCausalLM", ("num_key_value_heads", "head_dim")),
        ],
    )
    def test_a_stored_head_that_differs_is_used(
        self, architecture: str, without: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "Moe" in architecture else {}
        folder = write_random_model(tmp_path, architecture, without, tie_word_embeddings=True, **experts)
        head = torch.randn(320, 64, generator=torch.Generator().manual_seed(1)) * 0.3
        write(folder, {**tensors_of(folder), HEADS.get(architecture, "lm_head.weight"): head})
        with caplog.at_level(logging.WARNING):
            assert_equals_transformers(edit(folder, tie_word_embeddings=True))
        assert "which differs from" in caplog.text

    def test_a_stored_head_that_is_equal_stays_tied(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = write_random_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
        write(folder, {**tensors_of(folder), "lm_head.weight": tensors_of(folder)["model.embed_tokens.weight"].clone()})
        assert read_config(folder)["tie_word_embeddings"] is True
        assert_equals_transformers(folder)
        assert "differs" not in caplog.text

    def test_a_stored_head_of_another_dtype_is_used(self, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
        write(folder, {**tensors_of(folder), "lm_head.weight": torch.ones(320, 64, dtype=torch.bfloat16)})
        assert read_config(folder)["tie_word_embeddings"] is False

    @pytest.mark.parametrize("says", [False, None])
    def test_without_a_stored_head_the_embedding_is_used(self, says: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = write_random_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
        right = expected(folder)
        edit(folder, *([] if says is None else [()]), **({} if says is None else {"tie_word_embeddings": False}))
        if says is None:
            edit(folder, ("tie_word_embeddings",))
        torch.testing.assert_close(found(folder), right, rtol=2e-4, atol=2e-4)
        assert ("holds no output head" in caplog.text) == (says is False)

    def test_a_drafter_without_a_head_stays_as_it_is(self, tmp_path: Path) -> None:
        folder = edit(write_random_model(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True), tie_word_embeddings=False)
        assert read_config(folder, is_whole=False)["tie_word_embeddings"] is False

    def test_a_folder_without_weights_has_its_config(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true}')
        assert read_config(tmp_path)["tie_word_embeddings"] is True


class TestNames:
    @pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM"])
    @pytest.mark.parametrize(
        "prefix",
        [
            "",
            "_orig_mod.model.",
            "module.model.",
            "base_model.model.model.",
            "thinker.model.",
            "language_model.model.",
            "model.language_model.",
        ],
    )
    def test_other_prefixes(self, architecture: str, prefix: str, tmp_path: Path) -> None:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "Moe" in architecture else {}
        folder = write_random_model(tmp_path, architecture, tie_word_embeddings=True, **experts)
        right = expected(folder)
        write(folder, {prefix + name.removeprefix("model."): tensor for name, tensor in tensors_of(folder).items()})
        torch.testing.assert_close(found(folder), right, rtol=2e-4, atol=2e-4)

    def test_a_base_class_that_generates(self, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True)
        right = expected(folder)
        write(folder, {name.removeprefix("model."): tensor for name, tensor in tensors_of(folder).items()})
        torch.testing.assert_close(found(edit(folder, architectures=["Qwen3Model"])), right, rtol=2e-4, atol=2e-4)


class TestArchitecture:
    @pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GraniteForCausalLM"])
    @pytest.mark.parametrize("names", ["absent", None, [], ["NoSuchForCausalLM"]])
    def test_the_model_type_decides(self, architecture: str, names: Any, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path, architecture, ("head_dim",))
        right = expected(folder)
        edit(folder, ("architectures",) if names == "absent" else (), **({} if names == "absent" else {"architectures": names}))
        torch.testing.assert_close(found(folder), right, rtol=2e-4, atol=2e-4)

    @pytest.mark.parametrize("names", ["LlamaForCausalLM", [7], {"a": 1}])
    def test_names_of_a_wrong_type_are_one_sentence(self, names: Any, tmp_path: Path) -> None:
        folder = edit(write_random_model(tmp_path, "LlamaForCausalLM"), architectures=names, model_type="nothing")
        with pytest.raises(ModelConfigError, match="names no architecture"):
            build_model(read_config(folder), dtype=torch.float32)


class TestPickledWeights:
    @pytest.mark.parametrize("num_files", [1, 2])
    def test_pytorch_model_bin(self, num_files: int, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path, "LlamaForCausalLM")
        right, tensors = expected(folder), tensors_of(folder)
        (folder / "model.safetensors").unlink()
        if num_files == 1:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            files = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(tensors)}
            for file in set(files.values()):
                torch.save({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
        torch.testing.assert_close(found(folder), right, rtol=2e-4, atol=2e-4)

    def test_files_that_hold_code_are_refused(self, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path, "LlamaForCausalLM")
        (folder / "model.safetensors").unlink()
        torch.save({"model.norm.weight": print}, folder / "pytorch_model.bin")
        with pytest.raises(WeightError, match="is not a file of plain tensors"):
            load(folder)

    def test_shards_without_an_index(self, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path, "LlamaForCausalLM")
        right, tensors = expected(folder), tensors_of(folder)
        (folder / "model.safetensors").unlink()
        for part in range(2):
            save_file(dict(list(tensors.items())[part::2]), folder / f"weights-{part}.safetensors")
        torch.testing.assert_close(found(folder), right, rtol=2e-4, atol=2e-4)


class TestLengths:
    @pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM"])
    @pytest.mark.parametrize(("limit", "longest"), [(80, 256), (256, 256), (1000, 1000)])
    def test_yarn_extends_the_original_length(self, architecture: str, limit: int, longest: int, tmp_path: Path) -> None:
        folder = write_random_model(tmp_path, architecture, ("head_dim",))
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        edit(folder, ("rope_parameters",), rope_theta=10000, rope_scaling=scaling, max_position_embeddings=limit)
        assert build_model(read_config(folder), dtype=torch.float32).max_model_len == longest
        assert_equals_transformers(folder)


class TestQuantizersFiles:
    @pytest.mark.parametrize(
        ("name", "content", "method"),
        [
            ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
            ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
            ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
        ],
    )
    def test_they_stand_for_quantization_config(self, name: str, content: dict[str, Any], method: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (tmp_path / name).write_text(json.dumps(content))
        assert read_config(tmp_path)["quantization_config"]["quant_method"] == method
