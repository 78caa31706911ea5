"""Writes a BERT's folder as an ONNX file in float32, for onnxruntime in `benchmarks.encoders`. Needs onnx and onnxscript.

PYTHON benchmarks/encoder_onnx.py MODEL_DIR OUT.onnx
"""

from __future__ import annotations

import argparse

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    args = parser.parse_args()
    model = transformers.AutoModel.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa", use_cache=False).eval()
    ids = torch.ones(2, 8, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    sizes = {0: torch.export.Dim("texts", min=1, max=4096), 1: torch.export.Dim("tokens", min=2, max=512)}
    torch.onnx.export(
        model,
        kwargs=inputs,
        f=args.out,
        input_names=list(inputs),
        output_names=["last_hidden_state"],
        dynamic_shapes=dict.fromkeys(inputs, sizes),
        dynamo=True,
        external_data=False,
    )


if __name__ == "__main__":
    main()
