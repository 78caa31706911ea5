"""OpenVLA: a tiny random checkpoint gives the tokens, logits and actions of a reference in plain torch, offline and over HTTP.

Shape legend of the reference: P patches, L rows before them, D width.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from compile_and_serve.runtime.actions import ActionError, ActionSpace
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.llm.llm import LLM
from compile_and_serve.runtime.media.openvla import OpenVLAProcessor
from compile_and_serve.runtime.media.prepared import MediaError, place_media
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from tests.support.engines import request, run_requests, tiny_config
from tests.support.server_process import ServerProcess
from tests.support.vision_models import picture

pytest.importorskip("PIL")

from PIL.Image import Image, Resampling, fromarray

BOS, EMPTY, PLACEHOLDER, VOCAB = 1, 29871, 32000, 32000
SIDE, PATCH, PATCHES = 24, 4, 36
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB + 64}
TOWERS: list[dict[str, Any]] = [
    {"patch_size": PATCH, "embed_dim": 32, "depth": 3, "num_heads": 2, "reg_tokens": 4, "init_values": 1e-5},
    {"patch_size": PATCH, "embed_dim": 48, "depth": 4, "num_heads": 2, "class_token": False, "mlp_ratio": 2.3},
]
MEANS = [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]]
STDS = [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]]
LOW, HIGH = [-0.1, -0.2, -0.3, -1.0, -2.0, -3.0, 0.0], [0.1, 0.4, 0.2, 1.5, 2.0, 2.5, 1.0]
CONFIG: dict[str, Any] = {
    "architectures": ["OpenVLAForActionPrediction"],
    "model_type": "openvla",
    "arch_specifier": "no-align+fused-gelu-mlp",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [SIDE, SIDE],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "timm_model_args": TOWERS,
    "use_fused_vision_backbone": True,
    "n_action_bins": 256,
    "pad_token_id": PLACEHOLDER,
    "pad_to_multiple_of": 64,
    "text_config": {"model_type": "llama", "pad_token_id": PLACEHOLDER, **TEXT},
    "norm_stats": {
        "bridge": {"action": {"q01": LOW, "q99": HIGH, "mask": [True] * 6 + [False]}},
        "other": {"action": {"q01": LOW[:2], "q99": HIGH[:2]}},
    },
}


def write_openvla(folder: Path) -> tuple[transformers.LlamaForCausalLM, dict[str, torch.Tensor]]:
    """The language model, and all other tensors by their names in the checkpoint."""
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**TEXT, initializer_range=0.3, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(text).eval()
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def norm(name: str, width: int) -> None:
        shapes.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    for module, tower in zip(("featurizer", "fused_featurizer"), TOWERS, strict=True):
        top, width = f"vision_backbone.{module}", tower["embed_dim"]
        inner = int(width * tower.get("mlp_ratio", 4))
        shapes |= {f"{top}.pos_embed": (1, PATCHES, width), f"{top}.patch_embed.proj.weight": (width, 3, PATCH, PATCH)}
        shapes[f"{top}.patch_embed.proj.bias"] = (width,)
        if tower.get("reg_tokens"):
            shapes |= {f"{top}.cls_token": (1, 1, width), f"{top}.reg_token": (1, tower["reg_tokens"], width)}
        else:
            shapes[f"{top}.attn_pool.latent"] = (1, 1, width)
            for name, outputs in (("q", width), ("kv", 2 * width), ("proj", width), ("mlp.fc1", inner)):
                linear(f"{top}.attn_pool.{name}", outputs, width)
            linear(f"{top}.attn_pool.mlp.fc2", width, inner)
            norm(f"{top}.attn_pool.norm", width)
        for i in range(tower["depth"]):
            block = f"{top}.blocks.{i}"
            for name in ("norm1", "norm2"):
                norm(f"{block}.{name}", width)
            for name, outputs, inputs in (("attn.qkv", 3 * width, width), ("attn.proj", width, width)):
                linear(f"{block}.{name}", outputs, inputs)
            linear(f"{block}.mlp.fc1", inner, width)
            linear(f"{block}.mlp.fc2", width, inner)
            if tower.get("init_values"):
                shapes |= {f"{block}.ls{j}.scale_factor": (width,) for j in (1, 2)}
        norm(f"{top}.norm", width)
    width = sum(tower["embed_dim"] for tower in TOWERS)
    linear("projector.fc1", 4 * width, width)
    linear("projector.fc2", TEXT["hidden_size"], 4 * width)
    linear("projector.fc3", TEXT["hidden_size"], TEXT["hidden_size"])
    tensors = {name: torch.randn(shape) * (0.25 if len(shape) > 1 else 0.5) for name, shape in shapes.items()}
    with torch.no_grad():
        for name, one in tensors.items():
            if "norm" in name and name.endswith("weight"):
                one += 1
    save_file(
        {**tensors, **{f"language_model.{name}": one.contiguous() for name, one in model.state_dict().items()}},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return model, tensors


def write_tokenizer(folder: Path) -> None:
    """Words of Llama's vocabulary size, the last 256 of which are action tokens."""
    words = ["<unk>", "<s>", "</s>", *"In: What action should the robot take to pick up cup ? Out:".split(" ")]
    words += [f"w{i}" for i in range(len(words), VOCAB)]
    words[EMPTY] = "▁"
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Split("?", "isolated")]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<PAD>"])
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<PAD>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


# ---- the reference ----------------------------------------------------------------------------------------------------------------------


def tower_features(w: Mapping[str, torch.Tensor], tower: Mapping[str, Any], pixels: torch.Tensor) -> torch.Tensor:
    """The patches of the second last block: [P, D]. w: of the tower. pixels: normalized [3, side, side]."""
    x_PD = (
        F.conv2d(pixels[None], w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=PATCH).flatten(2)[0].T + w["pos_embed"][0]
    )
    num_leading = 0
    if "cls_token" in w:
        leading_LD = torch.cat((w["cls_token"][0], w["reg_token"][0]))
        x_PD, num_leading = torch.cat((leading_LD, x_PD)), len(leading_LD)
    heads, width = tower["num_heads"], tower["embed_dim"]
    for i in range(tower["depth"] - 1):
        b = {name.removeprefix(f"blocks.{i}."): one for name, one in w.items() if name.startswith(f"blocks.{i}.")}
        y_PD = F.layer_norm(x_PD, (width,), b["norm1.weight"], b["norm1.bias"], 1e-6)
        q, k, v = F.linear(y_PD, b["attn.qkv.weight"], b["attn.qkv.bias"]).view(-1, 3, heads, width // heads).permute(1, 2, 0, 3)
        attended = ((q @ k.mT) * (width // heads) ** -0.5).softmax(-1) @ v
        y_PD = F.linear(attended.transpose(0, 1).flatten(1), b["attn.proj.weight"], b["attn.proj.bias"])
        x_PD = x_PD + y_PD * b.get("ls1.scale_factor", 1)
        y_PD = F.layer_norm(x_PD, (width,), b["norm2.weight"], b["norm2.bias"], 1e-6)
        y_PD = F.linear(F.gelu(F.linear(y_PD, b["mlp.fc1.weight"], b["mlp.fc1.bias"])), b["mlp.fc2.weight"], b["mlp.fc2.bias"])
        x_PD = x_PD + y_PD * b.get("ls2.scale_factor", 1)
    return x_PD[num_leading:]


def image_rows(tensors: Mapping[str, torch.Tensor], image: Image) -> torch.Tensor:
    """What stands in the prompt for an image: [P, hidden size]."""
    values = torch.from_numpy(np.asarray(image.resize((SIDE, SIDE), Resampling.BICUBIC), np.float32)).permute(2, 0, 1) / 255
    features = []
    for module, tower, mean, std in zip(("featurizer", "fused_featurizer"), TOWERS, MEANS, STDS, strict=True):
        prefix = f"vision_backbone.{module}."
        w = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        pixels = (values - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
        features.append(tower_features(w, tower, pixels))
    x_PD = torch.cat(features, dim=1)
    for name in ("fc1", "fc2", "fc3"):
        x_PD = F.linear(x_PD if name == "fc1" else F.gelu(x_PD), tensors[f"projector.{name}.weight"], tensors[f"projector.{name}.bias"])
    return x_PD


@torch.no_grad()
def generated(
    model: transformers.LlamaForCausalLM, tensors: Mapping[str, torch.Tensor], ids: Sequence[int], images: Sequence[Image], count: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens behind a prompt with placeholders, and their log-probabilities."""
    embeddings = model.get_input_embeddings()
    x = embeddings(torch.tensor([ids]))
    if images:
        x[0, torch.tensor(ids) == PLACEHOLDER] = torch.cat([image_rows(tensors, image) for image in images])
    tokens, logprobs = [], []
    for _ in range(count):
        row = model(inputs_embeds=x).logits[0, -1].log_softmax(-1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
        x = torch.cat((x, embeddings(torch.tensor([tokens[-1:]]))), dim=1)
    return tokens, logprobs


def expected_action(tokens: Sequence[int]) -> list[float]:
    """Bin i of the 255 has the center -1 + (2i + 1) / 255; the last token of the vocabulary is bin 0."""
    numbers = []
    for token, low, high in zip(tokens, LOW, HIGH, strict=True):
        center = -1 + (2 * min(max(VOCAB - token - 1, 0), 254) + 1) / 255
        numbers.append(0.5 * (center + 1) * (high - low) + low)
    return [*numbers[:-1], center]


# ---- the tests --------------------------------------------------------------------------------------------------------------------------

Made = tuple[Path, transformers.LlamaForCausalLM, dict[str, torch.Tensor]]
PICTURES = [fromarray(picture(*size)) for size in ((1, 40, 24), (2, 57, 61), (3, 16, 90))]
INSTRUCTION = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
PROMPTS: dict[str, tuple[list[int], list[Image]]] = {
    "text": ([BOS, *INSTRUCTION], []),
    "first": ([BOS, *INSTRUCTION], PICTURES[:1]),
    "another": ([BOS, *INSTRUCTION[::-1], EMPTY], PICTURES[1:2]),
    "middle": ([BOS, 20, 21, PLACEHOLDER, 22, 23, 24], PICTURES[2:]),
    "three": ([BOS, *INSTRUCTION], PICTURES),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("openvla")
    write_tokenizer(folder)
    return folder, *write_openvla(folder)


def requests_of(folder: Path) -> list[EngineRequest]:
    processor = OpenVLAProcessor(read_folder_config(folder))
    requests = []
    for name, (ids, images) in PROMPTS.items():
        media = [processor.image(image, repr((name, i)).encode()) for i, image in enumerate(images)]
        tokens, items = place_media(processor.with_placeholders(ids, media), media, processor.placeholders, three_rows=False)
        assert len(tokens) - len(ids) == (PATCHES * len(images) + (ids[-1] != EMPTY) - (PLACEHOLDER in ids) if images else 0)
        one = request(name, tokens, max_tokens=8, ignore_eos=True, logprobs=0)
        one.media = items
        requests.append(one)
    return requests


def check(made: Made, **options: Any) -> None:
    """All requests at once give the reference's tokens. Images cut by chunks, and two in a step of the encoder."""
    folder, model, tensors = made
    limits = {"load_format": "auto", "skip_tokenizer_init": True, "max_num_batched_tokens": 40, "max_encoder_tokens": 90}
    core = EngineCore(tiny_config(folder, **limits, **options))
    assert core.info.media is not None
    requests = requests_of(folder)
    outputs = run_requests(core, requests)
    core.shutdown()
    for one in requests:
        tokens, logprobs = generated(model, tensors, one.prompt_token_ids, PROMPTS[one.request_id][1], 8)
        steps = outputs[one.request_id]
        assert [token for step in steps for token in step.new_token_ids] == tokens, one.request_id
        assert [entry.logprobs[0] for step in steps for entry in step.new_logprobs or ()] == pytest.approx(logprobs, abs=1e-3)


def test_tokens_and_logits_are_those_of_the_reference(made: Made) -> None:
    check(made)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"enforce_eager": False, "verify_passes": True}, {"tensor_parallel_size": 2}])
def test_compiled_and_on_two_ranks(made: Made, tmp_path: Path, options: dict[str, Any]) -> None:
    check(made, cache_dir=tmp_path, **options)


PROMPT = "In: What action should the robot take to pick up the cup ?\nOut:"
PROMPT_IDS = [BOS, *[PLACEHOLDER] * PATCHES, *range(3, 11), 11, 12, 7, 13, 14, 15, EMPTY]


@pytest.mark.exhaustive
def test_actions_offline_and_over_http(made: Made) -> None:
    folder, model, tensors = made
    prompt_ids = PROMPT_IDS
    tokens, _ = generated(model, tensors, prompt_ids, PICTURES[:1], 7)
    expected = expected_action(tokens)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "num_kv_blocks": 128, "num_threads": 1}
    with LLM(str(folder), **options) as llm:
        prompt = {"prompt": PROMPT, "multi_modal_data": {"image": PICTURES[0]}}
        assert llm.predict_action(prompt, "bridge")[0] == pytest.approx(expected, abs=1e-6)  # type: ignore[arg-type]
        parts = [{"type": "text", "text": "pick up the cup "}, {"type": "image", "image": PICTURES[0]}]
        [chatted] = llm.chat([{"role": "user", "content": parts}])
        assert chatted.prompt_token_ids == prompt_ids
        with pytest.raises(ActionError, match="unnorm_key is missing: this model has the statistics of bridge, other"):
            llm.predict_action(prompt)  # type: ignore[arg-type]
    buffer = io.BytesIO()
    PICTURES[0].save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    server = ServerProcess(str(folder), "--device=cpu", "--dtype=float32", "--enforce-eager", "--port=0", "--num-gpu-blocks-override=128")
    try:
        with server.client() as client:

            def ask(**fields: Any) -> dict[str, Any]:
                body = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "pick up the cup "}]}], **fields}
                answer: dict[str, Any] = client.post("/v1/chat/completions", json=body).json()
                return answer

            [choice] = ask(unnorm_key="bridge", return_token_ids=True)["choices"]
            assert choice["token_ids"] == tokens
            assert choice["action"] == pytest.approx(expected, abs=1e-6)
            assert len(choice["message"]["content"].split()) == 7
            assert "action" not in ask(max_tokens=7, temperature=0)["choices"][0]
            for fields, sentence in (
                ({"unnorm_key": "moon"}, "unnorm_key is 'moon': this model has the statistics of bridge, other."),
                ({"unnorm_key": "bridge", "stream": True}, "An action comes with a whole answer"),
                ({"unnorm_key": "bridge", "max_tokens": 3}, "An action has 7 tokens, got max_tokens = 3"),
                ({"messages": [{"role": "system", "content": "a"}]}, "OpenVLA reads one message of the user"),
            ):
                error = ask(**fields)["error"]
                assert (error["code"], sentence in error["message"]) == (400, True), error
    finally:
        assert server.stop() == 0


def test_actions_of_odd_tokens() -> None:
    """Tokens that are no action's count as the nearest bin; a dataset has its own number of them."""
    space = ActionSpace(CONFIG)
    assert space.num_tokens("other") == 2
    assert space.action([VOCAB - 1, 5, 6], "other") == pytest.approx([-0.1 + 0.2 / 510, 0.4 - 0.6 / 510])
    assert space.action([VOCAB + 3, VOCAB - 256], "other") == space.action([VOCAB - 1, VOCAB - 255], "other")
    with pytest.raises(ActionError, match="An action has 7 tokens, but the answer has 1"):
        space.action([31999], "bridge")


def test_letterbox_and_refusals() -> None:
    processor = OpenVLAProcessor(CONFIG | {"image_resize_strategy": "letterbox"})
    wide = fromarray(np.full((2 * PATCH, SIDE, 3), 7, np.uint8))
    [item] = processor.image(wide, b"").items
    rows = item.arrays["patches"].rows(0, PATCHES).reshape(SIDE // PATCH, SIDE // PATCH, 3, PATCH, PATCH)
    assert rows[0, 0, :, 0, 0].tolist() == [123, 116, 103]
    assert (rows[2:4] == 7).all() or (rows[2:4, :, :, 1:-1] == 7).all()
    with pytest.raises(MediaError, match="fixed size"):
        processor.with_options({"max_pixels": 3})
    for change, sentence in (
        ({"timm_model_ids": ["vit_huge"] * 2, "timm_model_args": None}, "is none of vit_large_patch14_reg4_dinov2"),
        ({"image_resize_strategy": "resize-crop"}, "must be one of resize-naive, letterbox"),
        ({"image_sizes": [24, 48]}, "the same patches"),
    ):
        with pytest.raises(ValueError, match=sentence):
            OpenVLAProcessor(CONFIG | change)
