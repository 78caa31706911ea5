"""The layer for multi-token prediction of Qwen3-Next and Qwen3.5, which transformers ignores: each draft is what the definition says.

Shape legend: T tokens, D hidden size.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.models.families import known_families
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.weights import read_config
from tests.runtime.drafting.test_heads import record_drafts
from tests.support.drafters import draft_in_turns
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.recurrent_models import write_recurrent
from tests.support.transformers_models import greedy_tokens

MODELING = {
    "Qwen3_5ForCausalLM": "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5",
    "Qwen3NextForCausalLM": "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3Next",
}


@pytest.fixture(scope="module", params=MODELING)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers whose checkpoint has `mtp` tensors, too."""
    folder = write_recurrent(tmp_path_factory.mktemp("mtp") / "model", request.param)
    build = known_families()[request.param].build_mtp_layer
    assert build is not None
    spec = build(read_config(folder), torch.float32, 0, True)
    torch.manual_seed(3)
    own = {name: parameter for name, parameter in spec.module.named_parameters() if "embed_tokens" not in name and "lm_head" not in name}
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: torch.randn(shape) * 0.2 for name, one in own.items() if (shape := one.shape) and "experts." not in name}
    for name, part in spec.parts.items():
        tensors[name] = torch.randn(part.num_rows, *own[part.parameter].shape[2:]) * 0.2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Definition:
    """The layer, made of transformers' own layers: fc(norm(embedding), norm(hidden)), a layer with attention, a norm, the output head."""

    def __init__(self, folder: Path) -> None:
        from importlib import import_module

        from transformers import AutoModelForCausalLM

        target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        file, _, prefix = MODELING[target.config.architectures[0]].rpartition(".")
        classes = import_module(file)
        self.target, self.tensors = target, load_file(folder / "model.safetensors")
        config = copy.deepcopy(target.config)
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.mlp_only_layers = []
        self.has_planes = prefix == "Qwen3_5"  # positions are those of images, too
        self.layer = getattr(classes, f"{prefix}DecoderLayer")(config, 0).eval()
        parts = {n.removeprefix("mtp.layers.0."): t for n, t in self.tensors.items() if n.startswith("mtp.layers.0.")}
        if experts := sorted({int(n.split(".")[2]) for n in parts if n.startswith("mlp.experts.")}):
            of = {leaf: [parts.pop(f"mlp.experts.{e}.{leaf}_proj.weight") for e in experts] for leaf in ("gate", "up", "down")}
            pairs = zip(of["gate"], of["up"], strict=True)
            parts["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            parts["mlp.experts.down_proj"] = torch.stack(of["down"])
        self.layer.load_state_dict(parts)
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = getattr(classes, f"{prefix}RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
            self.norms[name].load_state_dict({"weight": self.tensors[f"mtp.{name}.weight"]})

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The drafts behind `tokens`."""
        base = self.target.model
        hidden_TD = base(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        known = list(tokens[1:])
        for _ in range(count):
            embedded_TD = self.norms["pre_fc_norm_embedding"](base.embed_tokens(torch.tensor(known)))
            joined_TD = torch.cat((embedded_TD, self.norms["pre_fc_norm_hidden"](hidden_TD)), dim=-1)
            x_1TD = torch.nn.functional.linear(joined_TD, self.tensors["mtp.fc.weight"])[None]
            size = x_1TD.shape[1]
            mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
            positions = torch.arange(size).expand(3, 1, -1) if self.has_planes else torch.arange(size)[None]
            rope = base.rotary_emb(x_1TD, positions)
            out = self.layer(x_1TD, position_embeddings=rope, attention_mask=mask)
            out_D = self.norms["norm"](out[0] if isinstance(out, tuple) else out)[0, -1]
            known.append(int(self.target.lm_head(out_D).argmax()))
            hidden_TD = torch.cat((hidden_TD, out_D[None]))
        return known[len(tokens) - 1 :]


@pytest.mark.slow
def test_drafts_are_those_of_the_definition_and_no_token_changes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_in_turns(monkeypatch)
    proposed = record_drafts(monkeypatch)
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    core = EngineCore(
        tiny_config(model, load_format="auto", block_size=16, num_kv_blocks=2048, max_num_batched_tokens=32, speculative_config=speculation)
    )
    prompts = [[(seed * 131 + i * i * 7) % 317 + 3 for i in range(length)] for seed, length in enumerate((5, 17, 70))]
    given = [request(f"r{i}", prompt, max_tokens=24, ignore_eos=True) for i, prompt in enumerate(prompts)]
    outputs = tokens_of(run_requests(core, given))
    core.shutdown()
    assert [outputs[one.request_id] for one in given] == greedy_tokens(model, prompts, 24)
    whole = {one.request_id: [*one.prompt_token_ids, *outputs[one.request_id]] for one in given}
    definition = Definition(model)
    assert len(proposed) > 30
    for name, length, draft in proposed[::7]:
        assert definition.drafts(whole[name][:length], len(draft)) == draft
