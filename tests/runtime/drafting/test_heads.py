"""EAGLE, EAGLE-3, MTP and Medusa heads and block drafters: they draft what their formulas say, and change no token.

Shape legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from compile_and_serve.compiler.cudagraphs.work_graphs import WorkGraphs
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.step import running
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.drafting.model_drafts import ModelDrafts
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from tests.runtime.drafting.test_lossless import hard_requests
from tests.support import dflash
from tests.support.drafters import capture_all, check_every_draft, draft_in_turns, use_fake_graphs
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.platforms import OwnMemory
from tests.support.tiny_models import zero_state

METHODS = ("eagle", "eagle3", "mtp", "mtp of glm", "medusa", "dflash")
KINDS = ("eagle3", "mtp", "medusa", "dflash")  # drafts in turn, from the target's own layer, all from one pass, and a block of them
D, V, DRAFT_V, HEADS = 64, 320, 80, 4
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "initializer_range": 0.3,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 2,
    "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
GLM: dict[str, Any] = {
    **DEEPSEEK,
    "architectures": ["Glm4MoeForCausalLM"],
    "num_key_value_heads": 2,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
TARGETS = {"mtp": ("deepseek", DEEPSEEK), "mtp of glm": ("glm", GLM)}  # of the other methods: Llama
HEAD_CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": {**LLAMA, "num_hidden_layers": 1},
    "eagle3": {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_V,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    },
    "medusa": {"medusa_num_heads": HEADS, "medusa_num_layers": 1},
    "dflash": dflash.CONFIG,
}


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)
        if "norm" in name
        else torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, inputs: int = D) -> dict[str, tuple[int, ...]]:
    attention = {f"{prefix}.self_attn.{name}_proj.weight": (size, inputs) for name, size in (("q", 64), ("k", 32), ("v", 32))}
    return attention | {
        f"{prefix}.self_attn.o_proj.weight": (D, 64),
        f"{prefix}.mlp.gate_proj.weight": (96, D),
        f"{prefix}.mlp.up_proj.weight": (96, D),
        f"{prefix}.mlp.down_proj.weight": (D, 96),
        f"{prefix}.post_attention_layernorm.weight": (D,),
    }


def head_tensors(method: str) -> dict[str, torch.Tensor]:
    """A head's tensors under their published names."""
    if method == "eagle":
        return random_tensors({"embed_tokens.weight": (V, D), "fc.weight": (D, 2 * D), **layer_shapes("layers.0")})
    if method == "eagle3":
        tensors = random_tensors(
            {
                "fc.weight": (D, 3 * D),
                **layer_shapes("midlayer", 2 * D),
                "midlayer.hidden_norm.weight": (D,),
                "midlayer.input_layernorm.weight": (D,),
                "norm.weight": (D,),
                "lm_head.weight": (DRAFT_V, D),
            }
        )
        own = torch.arange(DRAFT_V)
        known = torch.zeros(V, dtype=torch.bool)
        known[own * 4 + 1] = True
        return tensors | {"d2t": own * 4 + 1 - own, "t2d": known}
    if method == "dflash":
        return random_tensors(dflash.shapes())
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        shapes |= {
            f"medusa_head.{head}.0.linear.weight": (D, D),
            f"medusa_head.{head}.0.linear.bias": (D,),
            f"medusa_head.{head}.1.weight": (V, D),
        }
    return random_tensors(shapes)


def write_model(folder: Path, config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def target_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of a checkpoint of the target, with its layer for multi-token prediction."""
    spec = build_model(config, dtype=torch.float32)
    tensors = checkpoint_of(spec)
    if "num_nextn_predict_layers" in config:
        layer = f"model.layers.{config['num_hidden_layers']}"
        given = {n.replace("model.layers.1.", f"{layer}."): t for n, t in tensors.items() if n.startswith("model.layers.1.")}
        more = random_tensors(
            {
                f"{layer}.enorm.weight": (D,),
                f"{layer}.hnorm.weight": (D,),
                f"{layer}.eh_proj.weight": (D, 2 * D),
                f"{layer}.shared_head.norm.weight": (D,),
                f"{layer}.shared_head.head.weight": (config["vocab_size"], D),
            },
            seed=7,
        )
        tensors |= {name: tensor.flip(0).contiguous() for name, tensor in given.items()} | more
    return tensors


def checkpoint_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Random tensors under the checkpoint's names."""
    shapes = {name: tuple(parameter.shape) for name, parameter in spec.module.named_parameters()}
    parts = {one.parameter for one in spec.parts.values()}
    whole = {name: shape for name, shape in shapes.items() if name not in parts}
    for name, part in spec.parts.items():
        whole[name] = (part.num_rows, shapes[part.parameter][-1])
    return random_tensors(whole, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("heads"))


def write_folders(root: Path) -> dict[str, Path]:
    """Checkpoints: "llama", "deepseek", "glm", and those of the heads."""
    made = {name: write_model(root / name, HEAD_CONFIGS[name], head_tensors(name)) for name in HEAD_CONFIGS}
    for name, config in (("llama", LLAMA), *TARGETS.values()):
        made[name] = write_model(root / name, config, target_tensors(config))
    return made


def engine(
    folders: Mapping[str, Path],
    method: str,
    num_tokens: int = 3,
    *,
    drafts: bool = True,
    speculation: Mapping[str, Any] = {},
    **options: Any,
) -> EngineCore:
    """speculation: more of its config."""
    speculation = {"method": method.split()[0], "num_speculative_tokens": num_tokens, **speculation}
    if method in folders:
        speculation["model"] = str(folders[method])
    given: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 64} | options
    if method in TARGETS:
        given["attention_backend"] = "torch"  # Triton's kernels would run in the interpreter
    target = folders[TARGETS[method][0] if method in TARGETS else "llama"]
    return EngineCore(tiny_config(target, speculative_config=speculation if drafts else None, **given))


def requests() -> list[EngineRequest]:
    lengths = (5, 30, 90, 90, 17)
    return [request(f"q{i}", prompt_of(i // 2, length), max_tokens=14 + 3 * i) for i, length in enumerate(lengths)]


class Reference:
    """A target and its head, which compute a whole sequence in one pass."""

    def __init__(self, core: EngineCore) -> None:
        worker = core.executor.worker  # type: ignore[attr-defined]
        self.compiled = worker.loaded.drafter
        self.target = worker.loaded.model

    def pass_over(self, model: Any, tokens: np.ndarray, hidden: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Outputs at every position."""
        spec, count = model.spec, len(tokens)
        sizes = {group.name: count for group in spec.state}
        step = make_step(
            spec.inputs,
            spec.state,
            [(0, count)],
            state=zero_state(spec.state, 1, sizes, torch.float32),
            tokens_per_page=sizes,
            token_ids=tokens,
            row_indices=np.arange(count),
        )
        if hidden is not None:
            step.inputs["hidden_states"] = hidden
        with torch.no_grad(), running(step.metadata):
            return model(step)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What the head says behind `tokens`."""
        drafter, extras = self.compiled.drafter, self.compiled.extras
        known = np.array(tokens, dtype=np.int64)
        hidden = self.pass_over(self.target, known[:-1])["hidden_states"]
        if drafter.context is not None:
            embedding, head = (self.target.spec.module.get_parameter(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
            return dflash.drafts(head_tensors("dflash"), embedding, head, hidden, tokens[-1], count)
        if not drafter.spec.state:
            return self.pass_over(self.compiled.model, known[-2:-1], hidden[-1:])["draft_tokens"][0, :count].tolist()
        if drafter.combine:
            hidden = F.linear(hidden, extras["fc.weight"])
        drafts: list[int] = []
        for _ in range(count):
            given = self.pass_over(self.compiled.model, np.array([*tokens[1:], *drafts]), hidden)
            draft = int(given["logits"][-1].argmax())
            drafts.append(draft + int(extras["d2t"][draft]) if "d2t" in extras else draft)
            hidden = torch.cat((hidden, given["hidden_states"][-1:]))
        return drafts


def layer_of_one_token(tensors: Mapping[str, torch.Tensor], prefix: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """A decoder layer at position 0: attention gives the value, and RoPE changes nothing."""
    t = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    values = F.linear(x, t["self_attn.v_proj.weight"]).view(2, 16).repeat_interleave(2, dim=0).flatten()
    y = residual + F.linear(values, t["self_attn.o_proj.weight"])
    z = F.rms_norm(y, (D,), t["post_attention_layernorm.weight"], 1e-5)
    gated = F.silu(F.linear(z, t["mlp.gate_proj.weight"])) * F.linear(z, t["mlp.up_proj.weight"])
    return y + F.linear(gated, t["mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("method", "changes"),
    [("eagle", {}), ("eagle3", {}), ("eagle3", {"norm_before_residual": True}), ("medusa", {})],
    ids=["eagle", "eagle3", "eagle3 with norm_before_residual", "medusa"],
)
def test_a_head_computes_the_papers_formula(method: str, changes: dict[str, Any], folders: dict[str, Path], tmp_path: Path) -> None:
    if changes:
        changed = write_model(tmp_path / method, HEAD_CONFIGS[method] | changes, head_tensors(method))
        folders = folders | {method: changed}
    token, hidden = 7, torch.randn(D, generator=torch.Generator().manual_seed(1))
    core = engine(folders, method)
    reference = Reference(core)
    given = reference.pass_over(reference.compiled.model, np.array([token]), hidden[None])
    core.shutdown()
    t, of_target = head_tensors(method), target_tensors(LLAMA)
    if method == "medusa":
        for head, draft in enumerate(given["draft_tokens"][0].tolist()):
            block = f"medusa_head.{head}.0.linear"
            x = hidden + F.silu(F.linear(hidden, t[f"{block}.weight"], t[f"{block}.bias"]))
            assert draft == int(F.linear(x, t[f"medusa_head.{head}.1.weight"]).argmax())
        return
    if method == "eagle":
        x = F.linear(torch.cat((t["embed_tokens.weight"][token], hidden)), t["fc.weight"])
        expected = layer_of_one_token(t, "layers.0", x, x)
        logits = F.linear(expected, of_target["lm_head.weight"])
    else:
        embedding = of_target["model.embed_tokens.weight"][token]
        normed = F.rms_norm(hidden, (D,), t["midlayer.hidden_norm.weight"], 1e-5)
        x = torch.cat((F.rms_norm(embedding, (D,), t["midlayer.input_layernorm.weight"], 1e-5), normed))
        expected = layer_of_one_token(t, "midlayer", x, normed if changes else hidden)
        logits = F.linear(F.rms_norm(expected, (D,), t["norm.weight"], 1e-5), t["lm_head.weight"])
    torch.testing.assert_close(given["hidden_states"][0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given["logits"][0], logits, rtol=1e-4, atol=1e-4)


_propose = ModelDrafts.propose


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[int]]]:
    """Drafts made from now on: the request, its tokens so far, the draft."""
    proposed: list[tuple[str, int, list[int]]] = []

    def recorded(self: ModelDrafts, last_tokens: Any, wanted: Any, *, is_ahead: bool) -> None:
        _propose(self, last_tokens, wanted, is_ahead=is_ahead)
        drafts = self.known_drafts(wanted)
        proposed.extend((name, last_tokens[name][0], draft) for name, draft in drafts.items())

    monkeypatch.setattr(ModelDrafts, "propose", recorded)
    return proposed


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", METHODS)
def test_a_head_drafts_what_a_pass_over_the_whole_sequence_says(
    method: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the steps before: chunks of prompts, prefix hits, preemptions, wrong and right drafts, none at all."""
    draft_in_turns(monkeypatch)
    proposed = record_drafts(monkeypatch)
    core = engine(folders, method, num_kv_blocks=90, async_scheduling=True)
    given = requests()
    outputs = tokens_of(run_requests(core, given))
    reference = Reference(core)
    whole = {one.request_id: [*one.prompt_token_ids, *outputs[one.request_id]] for one in given}
    assert len(proposed) > 40
    differ = 0
    for name, length, draft in proposed[::2]:
        differ += reference.drafts(whole[name][:length], len(draft)) != draft
    # The last cached entry of a shared prefix was computed with the token behind it in the other sequence. A context has no such token.
    assert differ <= (0 if method == "dflash" else 2), f"{differ} of {len(proposed) // 2}"
    assert core.stats().prefix_cache_hits > 0
    core.shutdown()


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["dflash"])
@pytest.mark.parametrize("method", METHODS)
def test_no_token_changes(method: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine(folders, method, drafts=False)
    plain = tokens_of(run_requests(expected, hard_requests()))
    expected.shutdown()
    check_every_draft(monkeypatch)
    core = engine(folders, method)
    assert tokens_of(run_requests(core, hard_requests())) == plain
    stats = core.stats()
    assert stats.spec_decode_num_draft_tokens > 400
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


def test_the_experts_of_a_head_are_not_counted(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    core = engine(folders, "mtp", expert_metrics=True)
    run_requests(core, requests()[:2])
    assert core.stats().spec_decode_num_draft_tokens > 0
    assert core.executor.worker._expert_load.num_layers == 1  # type: ignore[attr-defined]
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_a_device_with_memory_of_its_own_drafts_the_same(method: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after it has slept and read the weights again."""
    check_every_draft(monkeypatch)
    given = {**folders, "draft_model": folders["llama"]}
    found = []
    for make in (CpuPlatform, OwnMemory):
        register_platform("cpu", make)
        try:
            proposed = record_drafts(monkeypatch)
            core = engine(given, method, async_scheduling=True)
            if make is OwnMemory:
                core.sleep(2)
                core.wake_up()
            found.append((tokens_of(run_requests(core, requests()[:3])), proposed))
            core.shutdown()
        finally:
            register_platform("cpu", CpuPlatform)
    assert found[0] == found[1]
    assert len(found[0][1]) > 10


@pytest.fixture(params=[CpuPlatform, pytest.param(OwnMemory, marks=pytest.mark.slow)])
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines run on a device that shares the host's memory, or has its own."""
    register_platform("cpu", request.param)
    yield
    register_platform("cpu", CpuPlatform)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("method", KINDS)
def test_captured_passes_draft_the_same(method: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after steps without drafts, whose passes are captured too, and for sequences that get none."""
    pytest.importorskip("triton")
    check_every_draft(monkeypatch)
    found = []
    for is_captured in (False, True):
        draft_in_turns(monkeypatch)
        made = use_fake_graphs(monkeypatch, 3) if is_captured else []
        proposed = record_drafts(monkeypatch)
        core = engine(folders, method, max_num_seqs=8)
        for graphs in made:
            capture_all(graphs)
        given = [*requests(), request("none", prompt_of(9, 8), max_tokens=40, speculate=False)]
        found.append((tokens_of(run_requests(core, given)), proposed))
        core.shutdown()
    assert found[0][0] == found[1][0]
    # Steps that run ahead come at other lengths and may have fewer drafts.
    plain, captured = ({(name, length): draft for name, length, draft in drafts} for _, drafts in found)
    common = plain.keys() & captured.keys()
    assert len(common) > 20
    if method == "dflash":  # a block's drafts depend on its length
        common = {one for one in common if len(plain[one]) == len(captured[one])}
        assert len(common) > 20
    for one in common:
        count = min(len(plain[one]), len(captured[one]))
        assert plain[one][:count] == captured[one][:count], one
    assert len(proposed) > 30
    assert made[0].stats.replays["draft"] > 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_compiled_head_drafts_the_same(
    method: str, folders: dict[str, Path], shared_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind steps of which it only kept the keys and values: with graphs and without, and for more sequences than get drafts."""
    check_every_draft(monkeypatch)
    replay, replayed = WorkGraphs.replay, []
    run, kept_state_only = ModelDrafts._run, []

    def recorded(self: WorkGraphs, name: str, size: int, addresses: tuple[int, ...] = ()) -> bool:
        is_found = replay(self, name, size, addresses)
        replayed.extend([(name, size)] * is_found)
        return is_found

    def counted(self: ModelDrafts, *given: Any, keeps_state_only: bool = False, **options: Any) -> Any:
        kept_state_only.append(keeps_state_only)
        return run(self, *given, keeps_state_only=keeps_state_only, **options)

    monkeypatch.setattr(WorkGraphs, "replay", recorded)
    monkeypatch.setattr(ModelDrafts, "_run", counted)
    found, num_kept = [], []
    for mode in ("eager", "compiled", "captured"):
        draft_in_turns(monkeypatch)
        made = use_fake_graphs(monkeypatch, 3, max_drafted_seqs=2) if mode == "captured" else []
        proposed = record_drafts(monkeypatch)
        core = engine(folders, method, enforce_eager=mode == "eager", cache_dir=shared_cache_dir, max_num_seqs=8)
        for graphs in made:
            capture_all(graphs)
        kept_state_only.clear()
        outputs = tokens_of(run_requests(core, requests()))
        found.append((outputs, core.stats().spec_decode_num_accepted_tokens_per_pos, proposed))
        num_kept.append(sum(kept_state_only))
        core.shutdown()
    assert found[0] == found[1] == found[2]
    assert num_kept[0] == 0 < num_kept[1]
    assert ("follow 1, state only", 8) in replayed


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", KINDS)
def test_drawn_tokens_follow_the_target(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of 20 000 tokens, in pairs, of a vocabulary of 8. Their drafts are often right."""
    small, count = 8, 1_250
    family, config = TARGETS.get(method, ("llama", LLAMA))
    sizes = config | {"vocab_size": small}
    given_tensors = target_tensors(sizes)
    given_tensors["lm_head.weight"] *= 0.2  # so that every token is likely
    folders = {family: write_model(tmp_path / "target", sizes, given_tensors)}
    if method not in TARGETS:
        tensors = {n: t[:small] if t.shape[:1] in ((V,), (DRAFT_V,)) else t for n, t in head_tensors(method).items()}
        if method == "eagle3":
            tensors |= {"d2t": torch.zeros(small, dtype=torch.int64), "t2d": torch.ones(small, dtype=torch.bool)}
        own = HEAD_CONFIGS[method] | {"vocab_size": small, "draft_vocab_size": small}
        folders[method] = write_model(tmp_path / method, own, tensors)
    check_every_draft(monkeypatch)
    core = engine(folders, method, max_num_seqs=250, max_num_batched_tokens=1024)
    prompt = [1, 2, 3]
    seen = np.zeros((small, small))
    for first in range(0, 8 * count, count):
        given = [request(f"c{first + i}", prompt, temperature=1.0, max_tokens=3, seed=first + i) for i in range(count)]
        for tokens in tokens_of(run_requests(core, given)).values():
            seen[tokens[1], tokens[2]] += 1  # both are compared with drafts
    assert core.stats().spec_decode_num_accepted_tokens > 500
    reference = Reference(core)

    def behind(tokens: list[int]) -> np.ndarray:
        logits = reference.pass_over(reference.target, np.array(tokens, dtype=np.int64))["logits"][-1]
        return logits.double().softmax(-1).numpy()

    first_p = behind(prompt)
    joint = np.zeros((small, small))
    for a in range(small):
        for b, p_b in enumerate(behind([*prompt, a])):
            joint[b] += first_p[a] * p_b * behind([*prompt, a, b])
    core.shutdown()
    wanted = joint.reshape(-1) * 8 * count
    common = wanted >= 5
    counts = np.append(seen.reshape(-1)[common], seen.reshape(-1)[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    freedom = len(wanted) - 1
    excess = (((counts - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum() - freedom) / np.sqrt(2 * freedom)
    assert excess < 4


MISFITS: list[tuple[str, str, dict[str, Any], str]] = [
    ("eagle", "eagle3", {}, "is an EAGLE-3 head: use the method eagle3"),
    ("eagle3", "eagle", {}, "has no tensors of an EAGLE-3 head"),
    ("eagle", "eagle", {"hidden_size": 32}, "hidden size is 32 and the model's 64: use a head that was trained for"),
    ("eagle3", "eagle3", {"vocab_size": 100}, "has a vocabulary of 100 tokens and the model one of 320"),
    ("eagle3", "eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, "layers 2, 16, 29, but the model has 3"),
    ("eagle3", "eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, "layers 2, 16, 29, but the model has 3"),
    ("eagle3", "eagle3", {"eagle_aux_hidden_state_layer_ids": "all"}, "must be a list of layer numbers, got 'all'"),
    ("eagle3", "eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight in .* has shape \[64, 192\], but"),
    ("eagle3", "eagle3", {"target_hidden_size": 32}, "reads hidden states of 32 features and the model has 64"),
    ("medusa", "medusa", {"medusa_num_heads": 2}, "makes 2 tokens at a time, but num_speculative_tokens is 3: lower it"),
    ("medusa", "medusa", {"medusa_num_heads": 6}, "lacks medusa_head.4.0.linear.weight"),
    ("medusa", "medusa", {"hidden_size": 128}, "are for a hidden size of 128 and 320 tokens, and the model has 64 and 320"),
    ("medusa", "eagle", {}, "medusa_num_heads in the model's config must be a positive integer"),
]


@pytest.mark.parametrize(("method", "head", "changes", "message"), MISFITS)
def test_a_head_that_does_not_fit_is_one_sentence(
    method: str, head: str, changes: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "head", HEAD_CONFIGS[head] | changes, head_tensors(head))
    with pytest.raises(ValueError, match=message) as error:
        engine({**folders, method: folder}, method)
    assert str(error.value).count("\n") == 0


def test_drafts_that_the_model_does_not_know_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    beyond = head_tensors("eagle3") | {"d2t": torch.full((DRAFT_V,), V)}
    folder = write_model(tmp_path / "head", HEAD_CONFIGS["eagle3"], beyond)
    with pytest.raises(ValueError, match=r"d2t in .* maps tokens to ids outside of the model's 320: use a drafter of this"):
        engine({**folders, "eagle3": folder}, "eagle3")


def test_a_model_without_the_layer_says_so(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="brings no layer for multi-token prediction"):
        engine({**folders, "deepseek": folders["llama"]}, "mtp")


def test_older_files_are_read_without_running_their_code(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in head_tensors("medusa").items()}
    (tmp_path / "config.json").write_text(json.dumps(HEAD_CONFIGS["medusa"]))
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    core = engine({**folders, "medusa": tmp_path}, "medusa")
    drafter = core.executor.worker.loaded.drafter  # type: ignore[attr-defined]
    assert torch.equal(drafter.model.module.medusa_head[1][1].weight, tensors["1.1.weight"])
    core.shutdown()
    torch.save({"0.0.linear.weight": print}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="is not a file of plain tensors"):
        engine({**folders, "medusa": tmp_path}, "medusa")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"PK broken")
    with pytest.raises(ValueError, match="is not a file of plain tensors"):
        engine({**folders, "medusa": tmp_path}, "medusa")


def test_random_weights_need_only_the_configs(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    for method in METHODS:
        core = engine(folders, method, load_format="dummy")
        run_requests(core, requests()[:2])
        assert core.stats().spec_decode_num_draft_tokens > 20
        core.shutdown()
