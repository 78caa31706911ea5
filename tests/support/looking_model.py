"""A model with images whose encoder runs beside it, declared and registered as a plug-in, requests for it, and the tokens that it says
without an engine.

Shape legend: T tokens of the step, B tokens of an image, D hidden size, H heads, E head size, F features of a patch, R rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.encoder_rows import ENCODER_ROW, read_rows
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.rows import ENCODER_ROWS, EncoderRow
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, KVCacheSpec
from compile_and_serve.custom_ops.step import DECODER_INPUTS, TOKENS, StepInput, StepOutput, TokenBatch, running
from compile_and_serve.custom_ops.step_data import ArrayInfo, MediaItem, StepArray
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec, full_attention
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from tests.support.engines import prompt_of, request, tiny_config
from tests.support.tiny_models import zero_state
from tests.support.within_sequences import WITHIN_SEQUENCES
from tests.test_plugins import install

ARCHITECTURE = "LooksForTests"
VOCAB, D, H, E, F, LAYERS = 320, 32, 2, 16, 6, 2
IMAGE = 7  # the placeholder's token
MAX_LEN, MAX_IMAGE = 256, 24


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        q_THE, k_THE, v_THE = (linear(y_TD).view(x_TD.shape[0], -1, E) for linear in (self.q, self.k, self.v))
        return x_TD + self.o(WITHIN_SEQUENCES(q_THE, k_THE, v_THE, E**-0.5).flatten(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(F, D, bias=False)
        self.places = nn.Embedding(MAX_IMAGE, D)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))

    def forward(self, patches: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x_TD = self.patch(patches.to(self.patch.weight.dtype)) + self.places(positions)
        for layer in self.layers:
            x_TD = layer(x_TD)
        return x_TD


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x_TD: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        q_THE, k_THE, v_THE = (linear(y_TD).view(x_TD.shape[0], -1, E) for linear in (self.q, self.k, self.v))
        return x_TD + self.o(attention(q_THE, k_THE, v_THE, cache, E**-0.5, KV_CACHES).flatten(1))


class Looking(nn.Module):
    """forward without `encoder_row`: no token is of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, D), nn.Embedding(MAX_LEN, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        images: list[torch.Tensor],
        logits_indices: torch.Tensor,
        encoder_row: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_TD = self.embedding(input_ids)
        if encoder_row is not None:
            x_TD = torch.where(encoder_row[:, None] > 0, read_rows(images[0], encoder_row), x_TD)
        x_TD = x_TD + self.places(positions)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x_TD = layer(x_TD, cache)
        return self.head(x_TD[logits_indices])


def fill_patches(batch: TokenBatch) -> np.ndarray:
    return batch.with_rows_of("patches", np.zeros((len(batch.token_ids), F), dtype=np.float32))


PATCHES = StepInput(
    name="patches",
    dtype=torch.bfloat16,
    dims=(TOKENS, F),
    fill=fill_patches,
    arrays=(ArrayInfo(name="patches", row_shape=(F,), is_floating=True),),
)
POSITIONS = DECODER_INPUTS[1]
PLAN: dict[str, Any] = {f"layers.*.{name}": "colwise" for name in "qkv"} | {"layers.*.o": "rowwise"}


def on_meta(module: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return module().to(dtype).requires_grad_(False).eval()


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    encoder = ModelSpec(
        module=on_meta(Encoder, dtype),
        config=config,
        state=(),
        vocab_size=1,
        max_model_len=MAX_IMAGE,
        inputs=(PATCHES, POSITIONS),
        outputs=(StepOutput(name="rows", dims=(TOKENS, D)),),
        tp_plan=PLAN,
    )
    return ModelSpec(
        module=on_meta(Looking, dtype),
        config=config,
        state=(
            full_attention([KVCacheSpec(num_kv_heads=H, head_dim=E)] * LAYERS),
            StateGroup(name="images", layers=(EncoderRow(width=D, dtype=dtype),), kind=ENCODER_ROWS),
        ),
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        inputs=(*DECODER_INPUTS, ENCODER_ROW),
        tp_plan=PLAN,
        encoder=encoder,
    )


register_model(ARCHITECTURE, build)


@contextmanager
def looking_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder. In the block, processes find the model, because this module is installed as a plug-in."""
    site, made = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("looking")
    install(site, "looking", {"compile_and_serve.models": {"looking": __name__}})
    config = {"architectures": [ARCHITECTURE], "vocab_size": VOCAB, "eos_token_id": 2, "initializer_range": 0.3}
    (made / "config.json").write_text(json.dumps(config | {"num_attention_heads": H, "hidden_size": D}))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield made


def image(number: int, length: int) -> torch.Tensor:
    """bfloat16 [B, F]"""
    return torch.randn(length, F, generator=torch.Generator().manual_seed(number)).bfloat16()


def looking(request_id: str, parts: Sequence[list[int] | tuple[int, int]], **params: Any) -> EngineRequest:
    """A request for a prompt of texts (token ids) and images (number, length)."""
    token_ids: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        start, length = len(token_ids), part[1]
        arrays = {"patches": StepArray.of(image(*part), start=start)}
        media.append(MediaItem(key=f"image {part}".encode(), position=start, length=length, arrays=arrays))
        token_ids += [IMAGE] * length
    one = request(request_id, token_ids, **{"max_tokens": 20} | params)
    one.media = media
    return one


TEXT = [prompt_of(i, 9 + 5 * i) for i in range(4)]
MIXED: dict[str, list[list[int] | tuple[int, int]]] = {
    "text": [TEXT[0]],
    "middle": [TEXT[1], (1, 12), TEXT[2]],
    "first": [(2, 10), TEXT[3]],
    "last": [TEXT[2], (3, 24)],
    "same": [TEXT[3], (1, 12), TEXT[0]],
    "three": [TEXT[0], (1, 12), [9, 10], (4, 1), (2, 10), [11]],
}


def mixed() -> list[EngineRequest]:
    return [looking(name, parts) for name, parts in MIXED.items()]


def rows_of_image(encoder: ModelSpec, number: int, length: int) -> torch.Tensor:
    """[B, D]: the encoder's rows, from its plain module."""
    made = make_step(encoder.inputs, (), [(0, length)], state={}, tokens_per_page={})
    inputs = made.inputs | {"patches": image(number, length)}
    with torch.no_grad(), running(made.metadata):
        return encoder.module(**inputs)


def expected_tokens(core: EngineCore, one: EngineRequest, parts: Sequence[list[int] | tuple[int, int]]) -> list[int]:
    """Greedy tokens of the plain modules, which compute the whole sequence again for each. The rows come with the request."""
    loaded = core.executor.worker.loaded  # type: ignore[attr-defined]
    spec, encoder = loaded.model.spec, loaded.encoder.model.spec
    rows_RD, read = [torch.zeros(1, D)], [0] * len(one.prompt_token_ids)
    for item, part in zip(one.media, [part for part in parts if isinstance(part, tuple)], strict=True):
        begin = sum(map(len, rows_RD))
        rows_RD.append(rows_of_image(encoder, *part))
        read[item.position : item.position + item.length] = range(begin, begin + item.length)
    sequence = list(one.prompt_token_ids)
    while len(sequence) < len(one.prompt_token_ids) + (one.sampling_params.max_tokens or 0):
        count = len(sequence)
        state = zero_state(spec.paged_state, 1, {KV_CACHES: count}, torch.float32)
        made = make_step(
            spec.inputs, spec.paged_state, [(0, count)], state=state, tokens_per_page={KV_CACHES: count}, token_ids=np.array(sequence)
        )
        inputs = made.inputs | {"encoder_row": torch.tensor(read + [0] * (count - len(read)))}
        caches = spec.paged_state[0].argument(made.state)
        with torch.no_grad(), running(made.metadata):
            sequence.append(int(spec.module(**inputs, kv_caches=caches, images=[torch.cat(rows_RD)])[-1].argmax()))
    return sequence[len(one.prompt_token_ids) :]


def expected_of_mixed(folder: Path) -> dict[str, list[int]]:
    """Request → its tokens, without the engine."""
    core = EngineCore(tiny_config(folder))
    tokens = {one.request_id: expected_tokens(core, one, MIXED[one.request_id]) for one in mixed()}
    core.shutdown()
    assert len({tuple(one[:8]) for one in tokens.values()}) == len(tokens)
    return tokens
