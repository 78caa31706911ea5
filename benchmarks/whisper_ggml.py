"""Writes a Whisper model in Hugging Face's layout as a file that whisper.cpp reads. Matrices are float16: it takes no others.

    python -m benchmarks.whisper_ggml FOLDER OUT.bin

The file: sizes, the mel filters, the words of the vocabulary as bytes, then one tensor after another.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import load_file

_MAGIC, _FLOAT32, _FLOAT16 = 0x67676D6C, 0, 1
_SIZES = (
    "vocab_size",
    "max_source_positions",
    "d_model",
    "encoder_attention_heads",
    "encoder_layers",
    "max_target_positions",
    "d_model",
    "decoder_attention_heads",
    "decoder_layers",
    "num_mel_bins",
)
_NAMES = (  # here → there, in this order
    (r"^model\.", ""),
    (r"\.layers\.", ".blocks."),
    (r"encoder_attn_layer_norm", "cross_attn_ln"),
    (r"self_attn_layer_norm", "attn_ln"),
    (r"final_layer_norm", "mlp_ln"),
    (r"encoder_attn\.", "cross_attn."),
    (r"self_attn\.", "attn."),
    (r"q_proj", "query"),
    (r"k_proj", "key"),
    (r"v_proj", "value"),
    (r"out_proj", "out"),
    (r"fc1", "mlp.0"),
    (r"fc2", "mlp.2"),
    (r"^encoder\.layer_norm", "encoder.ln_post"),
    (r"^decoder\.layer_norm", "decoder.ln"),
    (r"embed_positions\.weight", "positional_embedding"),
    (r"embed_tokens", "token_embedding"),
)


def write_ggml(folder: Path, file: BinaryIO) -> None:
    from transformers import WhisperFeatureExtractor

    config = json.loads((folder / "config.json").read_text())
    file.write(struct.pack("<12i", _MAGIC, *(config[name] for name in _SIZES), _FLOAT16))
    filters = np.asarray(WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).mel_filters.T, np.float32)
    file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
    words = _words(folder / "tokenizer.json")
    file.write(struct.pack("<i", len(words)))
    for word in words:
        file.write(struct.pack("<i", len(word)) + word)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "proj_out.weight":  # the embedding once more
            continue
        values = tensor.astype(np.float32)
        for pattern, there in _NAMES:
            name = re.sub(pattern, there, name)
        if re.fullmatch(r"encoder\.conv\d\.bias", name):
            values = values[:, None]
        elif values.ndim > 1 and "positional" not in name:
            values = values.astype(np.float16)
        kind = _FLOAT16 if values.dtype == np.float16 else _FLOAT32
        file.write(struct.pack("<3i", values.ndim, len(name), kind) + struct.pack(f"<{values.ndim}i", *values.shape[::-1]))
        file.write(name.encode() + values.tobytes())


def _words(tokenizer: Path) -> list[bytes]:
    """The bytes of each token that is no special one, by id."""
    given = json.loads(tokenizer.read_text())
    special = {one["id"] for one in given["added_tokens"]}
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}
    ids = sorted((number, word) for word, number in given["model"]["vocab"].items() if number not in special)
    return [bytes(byte_of[letter] for letter in word) for _, word in ids]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    with given.out.open("wb") as file:
        write_ggml(given.folder, file)
