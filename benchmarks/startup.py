"""Time from the start of a process to its first token, cold and warm, by number of layers. Prints one JSON line per start.

    python -m benchmarks.startup [--layers 2,8,32,64] [--model DIR] [--device auto] [--cold-only] [--out FILE]

Each start is a new process. A cold start has an empty artifact store and empty kernel caches; a warm start has what the cold one left.
The model is a small Llama with random weights. --model takes the config.json of a folder instead; its number of layers is then the
default of --layers.

capture_s: Dynamo. passes_s: passes and split. inductor_s: compiling the distinct pieces (0 if they were loaded). load_s: weights and
artifacts. graphs_s: warm-up and CUDA graphs. first_token_s: since the process was created, interpreter and imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def worker(model: Path, device: str, cache_dir: Path) -> None:
    """Start an engine, generate one token, print the times."""
    from benchmarks.gpu import seconds_since_process_start
    from compile_and_serve import LLM, SamplingParams

    stages: dict[str, float] = {}

    def on_stage(stage: str, seconds: float, detail: str) -> None:
        stages[stage] = stages.get(stage, 0.0) + seconds

    blocks = {} if device == "cuda" else {"num_kv_blocks": 64}
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=device,
        cache_dir=cache_dir,
        max_model_len=1024,
        on_stage=on_stage,
        **blocks,
    )
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    first_token = seconds_since_process_start()
    report = llm.info.compile_report
    row: dict[str, Any] = {
        "capture_s": stages.get("capture", 0.0),
        "passes_s": stages.get("passes", 0.0) + stages.get("split", 0.0),
        "inductor_s": stages.get("compile", 0.0),
        "load_s": stages.get("load", 0.0) + stages.get("load artifact", 0.0),
        "graphs_s": stages.get("warm up", 0.0),
        "first_token_s": first_token,
    }
    row = {name: round(seconds, 3) for name, seconds in row.items()}
    print(json.dumps(row | {"distinct_pieces": report.get("distinct_pieces"), "device": llm.info.device}))


def start(model: Path, device: str, folder: Path) -> dict[str, Any]:
    """One start in a new process, with all caches in `folder`."""
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "benchmarks.startup", "--worker", str(model), "--device", device, "--store", str(folder / "store")]
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the start failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--cold-only", action="store_true")
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.device, args.store)
        return
    import torch

    from benchmarks.common import environment

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    config = json.loads((args.model / "config.json").read_text()) if args.model else SMALL_LLAMA
    layers = args.layers or ([config["num_hidden_layers"]] if args.model else [2, 8, 32, 64])
    for number in layers:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": number}))
            for kind in ("cold",) if args.cold_only else ("cold", "warm"):
                row = {"work": "startup", "model": args.model.name if args.model else "small-llama", "layers": number, "caches": kind}
                row |= start(model, device, Path(folder)) | environment()
                print(json.dumps(row), flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
