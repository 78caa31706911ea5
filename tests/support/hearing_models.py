"""Tiny random checkpoints of the transformers package's classes that read speech, with their processors, and what they generate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compile_and_serve.models.vision.whole_items import packed
from compile_and_serve.runtime.media.prepared import PreparedItem, PreparedMedia, place_media
from compile_and_serve.runtime.media.speech import SpeechProcessor
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from tests.support.engines import request
from tests.support.seeing_classes import TINY

RATE = 16_000
SECONDS = 2  # of the longest audio, or of a window
Sounds = list[list[int] | float]  # words of a text, and seconds of audio
_AUDIO: dict[str, Any] = {
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "max_source_positions": 50 * SECONDS,
    "initializer_range": 0.3,
}
_WHISPER = {"feature_size": 8, "chunk_length": SECONDS}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_NO_HEAD_DIM = {name: value for name, value in TINY.items() if name != "head_dim"}


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """architecture: the class. config: of its config's class. extractor: the feature extractor's class and settings; None: the processor
    needs torchaudio, and items are made by hand. token: what features replace. tokens: other special ones, by the tokenizer's names.
    """

    architecture: str
    config: Callable[[], Any]
    processor: str
    extractor: tuple[str, Mapping[str, Any]] | None
    token: str = "<|AUDIO|>"
    tokens: Mapping[str, str] = field(default_factory=dict)


def _granite() -> Any:
    return transformers.GraniteSpeechConfig(
        text_config=transformers.GraniteConfig(**TINY),
        encoder_config={
            "input_dim": 16,
            "num_layers": 2,
            "hidden_dim": 32,
            "feedforward_mult": 2,
            "num_heads": 2,
            "dim_head": 16,
            "output_dim": 12,
            "context_size": 20,
            "max_pos_emb": 32,
            "conv_kernel_size": 3,
        },
        projector_config=transformers.Blip2QFormerConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, encoder_hidden_size=32, vocab_size=10
        ),
        audio_token_index=11,
        has_lora_adapter=False,
    )


def _omni() -> Any:
    names = {"encoder_layers": 2, "n_window": 10, "output_dim": 64}
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config={**_AUDIO, **names},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
        text_config=TINY | _MROPE,
        audio_token_index=11,
        image_token_index=12,
        video_token_index=13,
        audio_token_id=11,
        image_token_id=12,
        video_token_id=13,
        vision_start_token_id=16,
        vision_end_token_id=17,
        audio_start_token_id=14,
        audio_end_token_id=15,
    )


def _phi4() -> Any:
    return transformers.Phi4MultimodalConfig(
        **_NO_HEAD_DIM,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "crop_size": 28,
        },
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "input_size": 16,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "audio_token_id": 11,
        },
    )


CLASSES: dict[str, Hearing] = {
    "qwen2_audio": Hearing(
        architecture="Qwen2AudioForConditionalGeneration",
        config=lambda: transformers.Qwen2AudioConfig(
            audio_config=_AUDIO, text_config=transformers.Qwen2Config(**TINY), audio_token_id=11, audio_token_index=11
        ),
        processor="Qwen2AudioProcessor",
        extractor=("WhisperFeatureExtractor", _WHISPER),
        tokens={"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    ),
    "voxtral": Hearing(
        architecture="VoxtralForConditionalGeneration",
        config=lambda: transformers.VoxtralConfig(
            audio_config={
                "num_mel_bins": 8,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "initializer_range": 0.3,
            },
            text_config=transformers.LlamaConfig(**TINY),
            audio_token_id=24,
        ),
        processor="VoxtralProcessor",
        extractor=("WhisperFeatureExtractor", {"feature_size": 8}),
        token="[AUDIO]",
        tokens={"begin": "[BEGIN_AUDIO]"},
    ),
    "granite_speech": Hearing(
        architecture="GraniteSpeechForConditionalGeneration",
        config=_granite,
        processor="GraniteSpeechProcessor",
        extractor=None,
        token="<|audio|>",
    ),
    "qwen2_5_omni": Hearing(
        architecture="Qwen2_5OmniThinkerForConditionalGeneration",
        config=_omni,
        processor="Qwen2_5OmniProcessor",
        extractor=("WhisperFeatureExtractor", _WHISPER),
        tokens={
            "image_token": "<|IMAGE|>",
            "video_token": "<|VIDEO|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
        },
    ),
    "phi4_multimodal": Hearing(
        architecture="Phi4MultimodalForCausalLM",
        config=_phi4,
        processor="Phi4MultimodalProcessor",
        extractor=("Phi4MultimodalFeatureExtractor", {"feature_size": 16}),
        token="<|audio|>",
        tokens={"image_token": "<|image|>"},
    ),
    "audioflamingo3": Hearing(
        architecture="AudioFlamingo3ForConditionalGeneration",
        config=lambda: transformers.AudioFlamingo3Config(
            audio_config={
                "num_mel_bins": 8,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "initializer_range": 0.3,
            },
            text_config=transformers.Qwen2Config(**TINY),
            audio_token_id=11,
        ),
        processor="AudioFlamingo3Processor",
        extractor=("WhisperFeatureExtractor", {"feature_size": 8}),
        token="<sound>",
    ),
}


class GraniteByHand:
    """What Granite's processor would make, with noise in place of its mel spectrogram."""

    three_rows = False
    placeholders: Mapping[int, str] = {11: "audio"}

    def made(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Tensors of one audio."""
        frames = (len(samples) // 160 + 1) // 2
        length = -(-frames // 15) * 3
        noise = np.random.default_rng(frames).standard_normal((1, frames, 16), dtype=np.float32)
        ids = np.full((1, length), 11)
        return {"input_ids": ids, "input_features": noise, "input_features_mask": np.ones((1, length), dtype=bool)}

    def audio(self, samples: np.ndarray, key: bytes) -> PreparedMedia:
        made = self.made(samples)
        ids = made["input_ids"][0].tolist()
        item = PreparedItem(offset=0, length=len(ids), arrays={"processed": packed(made)})
        return PreparedMedia(kind="audio", key=key, tokens=ids, items=[item])


def sound(seconds: float) -> np.ndarray:
    """float32 noise that grows louder, the same for the same length."""
    count = int(seconds * RATE)
    noise = np.random.default_rng(count).standard_normal(count, dtype=np.float32)
    return 0.1 * noise * np.linspace(0.1, 1.0, count, dtype=np.float32)


def _tokenizer(hearing: Hearing) -> Any:
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(325))]
    at = 24 if hearing.token == "[AUDIO]" else 11
    words[at : at + 1 + len(hearing.tokens)] = [hearing.token, *hearing.tokens.values()]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    specials = [hearing.token, *hearing.tokens.values()]
    for special in specials:  # processors repeat the placeholder without spaces between
        backend.add_special_tokens([special])
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {name: token for name, token in hearing.tokens.items() if name.endswith("_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"audio_token": hearing.token, **named, "begin_token": hearing.tokens.get("begin", "<s>")},
    )


def write_hearing(name: str, folder: Path) -> Any:
    """A checkpoint of a name in `CLASSES`, with its processor. → transformers' model"""
    hearing = CLASSES[name]
    if hearing.extractor is not None:
        extractor_class, settings = hearing.extractor
        getattr(transformers, extractor_class)(**settings).save_pretrained(folder)
    _tokenizer(hearing).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": hearing.processor}))
    torch.manual_seed(0)
    model = getattr(transformers, hearing.architecture)(hearing.config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


def processor_of(name: str, folder: Path) -> Any:
    """What prepares the audio of a checkpoint."""
    if CLASSES[name].extractor is None:
        return GraniteByHand()
    return SpeechProcessor(read_folder_config(folder), folder)


def hearing_request(name: str, parts: Sounds, processor: Any, **params: Any) -> tuple[EngineRequest, list[np.ndarray]]:
    """A greedy request, and its audio."""
    (token,) = processor.placeholders
    prompt: list[int] = []
    media, sounds = [], []
    for part in parts:
        if isinstance(part, list):
            prompt += [40 + word % 240 for word in part]
            continue
        prompt.append(token)
        sounds.append(sound(part))
        media.append(processor.audio(sounds[-1], repr(part).encode()))
    tokens, items = place_media(prompt, media, processor.placeholders, three_rows=processor.three_rows)
    one = request(name, tokens, **{"max_tokens": 24, "ignore_eos": True, "logprobs": 0} | params)
    one.media = items
    return one, sounds


def reference(model: Any, processor: Any, one: EngineRequest, sounds: Sequence[np.ndarray]) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens for a request, and their log-probabilities."""
    ids = torch.tensor([one.prompt_token_ids])
    inputs: dict[str, Any] = {"input_ids": ids}
    if isinstance(processor, GraniteByHand):
        inputs = _granite_inputs(model, processor, ids, sounds)
    elif sounds and hasattr(processor.transformers_processor, "_retrieve_input_features"):
        every = [processor._windows(samples)["input_features"] for samples in sounds]
        inputs["input_features"] = torch.from_numpy(np.concatenate(every))
    elif sounds:
        theirs = processor.transformers_processor
        texts = [theirs.audio_token] * len(sounds) if hasattr(theirs, "max_audio_len") else [theirs.audio_token * len(sounds)]
        made = theirs(audio=list(sounds), text=texts, return_tensors="pt", sampling_rate=RATE)
        inputs |= {name: tensor for name, tensor in made.items() if name not in ("input_ids", "attention_mask", "num_audio_tokens")}
    if hasattr(model, "rope_deltas"):
        model.rope_deltas = None
    out = model.generate(
        attention_mask=torch.ones_like(ids),
        max_new_tokens=one.sampling_params.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs,
    )
    tokens = out.sequences[0, -one.sampling_params.max_tokens :].tolist()
    return tokens, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)]


def _granite_inputs(model: Any, processor: GraniteByHand, ids: torch.Tensor, sounds: Sequence[np.ndarray]) -> dict[str, Any]:
    """Features of each audio alone: in a batch, the class would let the shorter ones read their padding."""
    embedded = model.get_input_embeddings()(ids.where(ids != 11, 0))
    features = [model.get_audio_features(torch.from_numpy(processor.made(samples)["input_features"])).pooler_output for samples in sounds]
    if features:
        embedded = embedded.masked_scatter((ids == 11)[..., None], torch.cat([one[0] for one in features]))
    return {"inputs_embeds": embedded}
