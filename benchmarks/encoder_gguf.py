"""Writes a BERT's folder as a GGUF file in bfloat16, for llama.cpp in `benchmarks.encoders`.

python -m benchmarks.encoder_gguf MODEL_DIR OUT.gguf
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

_SPECIALS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]", "bos": "[CLS]", "eos": "[SEP]"}
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_EMBEDDINGS = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}


def gguf_name(name: str) -> str | None:
    """The name that llama.cpp has for a tensor of BERT; None: it has none."""
    module, _, leaf = name.removeprefix("bert.").rpartition(".")
    if module in _EMBEDDINGS:
        return f"{_EMBEDDINGS[module]}.{leaf}"
    if module.startswith("encoder.layer."):
        _, _, number, part = module.split(".", 3)
        return f"blk.{number}.{_LAYER[part]}.{leaf}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    vocabulary = json.loads((args.model / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(args.out, "bert")
    writer.add_name(args.model.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    is_special = {word: word.startswith("[") and word.endswith("]") for word in words}
    # llama.cpp marks the beginning of a word, BERT the continuation.
    spelled = [w if is_special[w] else w.removeprefix("##") if w.startswith("##") else f"\u2581{w}" for w in words]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(spelled)
    writer.add_token_types([gguf.TokenType.CONTROL if is_special[word] else gguf.TokenType.NORMAL for word in words])
    writer.add_token_type_count(config["type_vocab_size"])
    for name, word in _SPECIALS.items():
        getattr(writer, f"add_{name}_token_id")(vocabulary[word])
    with safe_open(args.model / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118  it is no dictionary
            if (to := gguf_name(name)) is None:
                continue
            values = np.asarray(file.get_tensor(name), dtype=np.float32)
            if values.ndim == 2 and to.startswith("blk."):
                writer.add_tensor(to, gguf.quantize(values, gguf.GGMLQuantizationType.BF16), raw_dtype=gguf.GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(to, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
