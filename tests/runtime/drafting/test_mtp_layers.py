"""Several layers for multi-token prediction: each draft is what the paper's formula says, and no token changes.

Shape legend: T tokens, D hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.runtime.drafting.model_drafts import ModelDrafts
from compile_and_serve.runtime.engine.core import EngineCore
from tests.runtime.drafting.test_heads import (
    DEEPSEEK,
    GLM,
    D,
    Reference,
    random_tensors,
    record_drafts,
    requests,
    target_tensors,
    write_model,
)
from tests.runtime.drafting.test_lossless import hard_requests
from tests.support.drafters import capture_all, check_every_draft, draft_in_turns, use_fake_graphs
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.platforms import OwnMemory

NUM_LAYERS = 3
FAMILIES = {"deepseek": DEEPSEEK, "glm": GLM}


def with_layers(config: dict[str, Any], count: int = NUM_LAYERS) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A config and a checkpoint with so many layers for multi-token prediction, all different."""
    first = config["num_hidden_layers"]
    tensors = target_tensors(config)
    shapes = {n: tuple(t.shape) for n, t in tensors.items() if n.startswith(f"model.layers.{first}.")}
    for number in range(first + 1, first + count):
        tensors |= random_tensors({n.replace(f".{first}.", f".{number}.", 1): shape for n, shape in shapes.items()}, seed=number)
    return config | {"num_nextn_predict_layers": count}, tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layers")
    return {name: write_model(root / name, *with_layers(config)) for name, config in FAMILIES.items()}


def engine(folder: Path, num_tokens: int = 4, *, drafts: bool = True, **options: Any) -> EngineCore:
    given: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 64, "attention_backend": "torch"}
    speculation = {"method": "mtp", "num_speculative_tokens": num_tokens} if drafts else None
    return EngineCore(tiny_config(folder, speculative_config=speculation, **given | options))


class LayersReference(Reference):
    """Drafts from passes of each layer over the whole sequence."""

    def layer(self, number: int, tokens: list[int], hidden_TD: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The draft behind the last token, and hidden states [T, D]. tokens: those that the layer embeds."""
        one = self.compiled if number == 0 else self.compiled.behind[number - 1]
        given = self.pass_over(one.model, np.array(tokens), hidden_TD)
        return int(given["logits"][-1].argmax()), given["hidden_states"]

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        target_TD = self.pass_over(self.target, np.array(tokens[:-1], dtype=np.int64))["hidden_states"]
        last_layer = len(self.compiled.behind)
        known, drafts = list(tokens[1:]), []
        hidden_TD, own_TD = target_TD, target_TD
        for number in range(count):
            if number > last_layer:  # it goes on from its own output
                hidden_TD = torch.cat((hidden_TD, own_TD[-1:]))
            draft, own_TD = self.layer(min(number, last_layer), known, hidden_TD)
            if number < last_layer:  # before the first entry there is no hidden state
                hidden_TD = torch.cat((torch.zeros(1, D), own_TD))
            drafts.append(draft)
            known.append(draft)
        return drafts


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_draft_is_that_of_its_layer(family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the steps before: chunks of prompts, preemptions, wrong and right drafts, none at all; more drafts than layers."""
    draft_in_turns(monkeypatch)
    proposed = record_drafts(monkeypatch)
    core = engine(folders[family], num_kv_blocks=90, async_scheduling=True, enable_prefix_caching=False)
    given = requests()
    outputs = tokens_of(run_requests(core, given))
    reference = LayersReference(core)
    assert len(reference.compiled.behind) == NUM_LAYERS - 1
    whole = {one.request_id: [*one.prompt_token_ids, *outputs[one.request_id]] for one in given}
    assert len(proposed) > 40
    assert max(len(draft) for _, _, draft in proposed) == 4
    for name, length, draft in proposed[::2]:
        assert reference.drafts(whole[name][:length], len(draft)) == draft
    core.shutdown()


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["glm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_changes(family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine(folders[family], drafts=False)
    plain = tokens_of(run_requests(expected, hard_requests()))
    expected.shutdown()
    check_every_draft(monkeypatch)
    core = engine(folders[family])
    assert tokens_of(run_requests(core, hard_requests())) == plain
    stats = core.stats()
    assert stats.spec_decode_num_draft_tokens > 400
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


@pytest.mark.slow
def test_drafts_behind_prefix_hits(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts share whole pages and the token behind them."""
    check_every_draft(monkeypatch)
    proposed = record_drafts(monkeypatch)
    core = engine(folders["glm"])
    given = [request(f"q{i}", [*prompt_of(0, 42), 7 + i, *prompt_of(i, i)], max_tokens=16) for i in range(4)]
    outputs: dict[str, list[int]] = {}
    for one in given:
        outputs |= tokens_of(run_requests(core, [one]))
    assert core.stats().prefix_cache_hits > 0
    reference = LayersReference(core)
    whole = {one.request_id: [*one.prompt_token_ids, *outputs[one.request_id]] for one in given}
    assert len(proposed) > 40
    for name, length, draft in proposed:
        assert reference.drafts(whole[name][:length], len(draft)) == draft
    core.shutdown()


@pytest.mark.exhaustive
def test_compiled_layers_draft_the_same(folders: dict[str, Path], shared_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer then follows the target with its keys and values alone."""
    check_every_draft(monkeypatch)
    found = []
    for is_eager in (True, False):
        draft_in_turns(monkeypatch)
        proposed = record_drafts(monkeypatch)
        core = engine(folders["glm"], enforce_eager=is_eager, cache_dir=shared_cache_dir)
        found.append((tokens_of(run_requests(core, requests())), proposed))
        core.shutdown()
    assert found[0] == found[1]


@pytest.mark.slow
def test_captured_passes_draft_the_same(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    check_every_draft(monkeypatch)
    found = []
    for is_captured in (False, True):
        draft_in_turns(monkeypatch)
        made = use_fake_graphs(monkeypatch, 4) if is_captured else []
        proposed = record_drafts(monkeypatch)
        core = engine(folders["glm"], max_num_seqs=8)
        for graphs in made:
            capture_all(graphs)
        given = [*requests(), request("none", prompt_of(9, 8), max_tokens=40, speculate=False)]
        found.append((tokens_of(run_requests(core, given)), proposed))
        core.shutdown()
    assert found[0] == found[1]
    assert len(proposed) > 30
    assert made[0].stats.replays["draft"] > 30


@pytest.mark.slow
def test_layers_that_run_ahead_of_the_host_draft_the_same(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    check_every_draft(monkeypatch)
    make_drafts, proposed, ahead = ModelDrafts._make_drafts, [], []

    def recorded(self: ModelDrafts, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None:
        make_drafts(self, num_seqs, num_drafts, size, is_ahead=is_ahead)
        ahead.append(is_ahead)
        names = {held.slot: name for name, held in self._batch._requests.items()}
        asked, lengths = self._asked.device, self._known_positions() + 1
        for slot, count, length in zip(asked["slots"].tolist(), asked["counts"].tolist(), lengths.tolist(), strict=False):
            if slot in names and count:
                proposed.append((names[slot], length, self.drafts[slot, :count].tolist()))

    monkeypatch.setattr(ModelDrafts, "_make_drafts", recorded)
    register_platform("cpu", OwnMemory)
    try:
        made = use_fake_graphs(monkeypatch, 3, samples_greedily=True)
        core = engine(folders["glm"], 3, max_num_seqs=8, async_scheduling=True, enable_prefix_caching=False)
        capture_all(made[0])
        given = requests()
        outputs = tokens_of(run_requests(core, given))
        reference = LayersReference(core)
    finally:
        register_platform("cpu", CpuPlatform)
    assert sum(ahead) > 0.6 * len(ahead) > 10
    whole = {one.request_id: [*one.prompt_token_ids, *outputs[one.request_id]] for one in given}
    checked = [one for one in proposed if one[1] <= len(whole[one[0]])]  # others are made for a sequence that has ended
    assert len(checked) > 40
    for name, length, draft in checked[::2]:
        assert reference.drafts(whole[name][:length], len(draft)) == draft
    core.shutdown()


def test_layers_that_say_what_the_target_says_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next token depends on the last one only, and all layers know how."""
    config, tensors = with_layers(GLM)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # so that every layer gives what it takes
        if "norm.weight" in name:
            tensor.fill_(1.0)
    first = config["num_hidden_layers"]
    for number in range(first, first + NUM_LAYERS):
        tensors[f"model.layers.{number}.eh_proj.weight"] = torch.cat((torch.eye(D), torch.zeros(D, D)), dim=1)
        tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    check_every_draft(monkeypatch)
    core = engine(write_model(tmp_path, config, tensors), 4)
    run_requests(core, requests())
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 60
    assert stats.spec_decode_num_accepted_tokens_per_pos[3] > 10
    core.shutdown()


def test_only_layers_that_draft_are_loaded(folders: dict[str, Path]) -> None:
    for num_tokens, num_behind in ((1, 0), (2, 1), (5, 2)):
        core = engine(folders["glm"], num_tokens)
        assert len(core.executor.worker.loaded.drafter.behind) == num_behind  # type: ignore[attr-defined]
        core.shutdown()


def test_a_wrong_number_of_layers_is_one_sentence(tmp_path: Path) -> None:
    config, tensors = with_layers(GLM, 1)
    folder = write_model(tmp_path, config, tensors)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.3\."):
        engine(folder, 2)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": -1}))
    with pytest.raises(ValueError, match="num_nextn_predict_layers in the model's config must be a positive integer, got -1"):
        engine(folder, 2)
