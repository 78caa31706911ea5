"""Which classes of transformers' causal-LM map run here, and whether their tokens are transformers' own.

    python -m benchmarks.model_sweep --out FILE [--only NAME …] [--modes eager compiled] [--again STATUS …] [--tokens 64]

Every class gets a tiny random checkpoint, written by transformers itself, in a process of its own. Greedy tokens of a batch of prompts of
mixed lengths (the longest comes in chunks; texts go beyond the window of windowed layers) are compared with transformers' choice after the
same tokens. One JSON line per class and mode goes to FILE, which a second run continues; --again repeats the given outcomes.

Outcomes: "right", "wrong", "refused" (by a sentence about the model or its capture), "failed" (another exception, a crash or a timeout),
"no reference" (the tiny model cannot be made, or transformers itself does not run it). `traits` says what a class has beyond a dense
decoder: experts, latent, recurrent, cross-attention. `pieces`: the distinct compiled pieces. Prints the counts of classes by their worst
outcome at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment

PROMPT_LENGTHS = (5, 1, 23, 70)
TIE = 1e-3  # a token may differ where transformers' own logits lie this close
TIMEOUT = 600
# Parts of refusals of classes that are no causal decoders.
NOT_CAUSAL = ("'bidirectional_mask_function'", "attends to later tokens")

# Values of tiny configs by attribute name. Only attributes that a config has are set.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 320),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "dim_model", "emb_dim",
         "input_embedding_size", "output_embedding_size", "cross_attention_hidden_size", "num_dim"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers",
         "num_decoder_layers", "num_encoder_layers", "depth"), 4),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "kv_channels", "d_kv", "swa_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "ffn_hidden_size",
         "d_inner", "feed_forward_size"), 96),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions", "max_source_positions",
         "max_sequence_length"), 256),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"),
        32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 24, "rotary_dim": 8, "logit_scale": 1.0, "attention_chunk_size": 16, "hidden_size_per_layer_input": 16,
    "laurel_rank": 8, "pad_token_id": 1, "is_decoder": True, "initializer_range": 0.2,
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention", "window_size"), 16),
}  # fmt: skip
ALWAYS = ("is_decoder", "head_dim", "num_key_value_heads", "pad_token_id")  # set where the default is False or None
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
# What a rule by name does not get right, by model type.
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
    "big_bird": {"attention_type": "original_full"},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 4},
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_MAMBA2, "layer_types": _MIXED},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "kimi_linear": {"num_key_value_heads": 4, "linear_num_heads": 2, "linear_head_dim": 16, "layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {**_DELTA_NET, "linear_num_key_heads": 4},  # transformers writes its convolutions in equal parts
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _DELTA_NET | {"layer_types": _MIXED}),
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "adapter_rank": 8,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "num_key_value_heads": 4,  # adapters of keys have all heads
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": 0.0, "intermediate_size": 96},
}


def architectures() -> dict[str, str]:
    """Class name → model type, without repeats."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.setdefault(names if isinstance(names, str) else names[0], model_type)
    return found


def tiny_config(cls: Any, model_type: str) -> Any:
    """A small config of the class: its default one with sizes changed by name, also in nested configs."""
    default = cls.config_class()
    values = _tiny_values(default) | CHANGES.get(model_type, {})
    for name, nested in list(vars(default).items()):
        if hasattr(nested, "to_dict") and hasattr(nested, "model_type"):
            values[name] = type(nested)(**_tiny_values(nested)).to_dict()
    return cls.config_class(**values)


def _tiny_values(default: Any) -> dict[str, Any]:
    renamed = {theirs for ours, theirs in getattr(default, "attribute_map", {}).items() if ours in SIZES}
    values = {}
    for name, value in SIZES.items():
        if name in getattr(default, "attribute_map", {}) or _is_read_only(default, name):
            continue
        try:
            held = getattr(default, name)
        except Exception:  # not an attribute, or one that differs by layer
            continue
        if held is not None or name in ALWAYS:
            values[name] = value
    for name in renamed & SIZES.keys():
        values[name] = SIZES[name]
    for name, value in vars(default).items():
        if name.endswith("_token_id") and isinstance(value, int) and not 0 <= value < 320:
            values[name] = 3
    values |= {"bos_token_id": 0, "eos_token_id": 2} if hasattr(default, "eos_token_id") else {}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    name = getattr(default, "attribute_map", {}).get("layer_types", "layer_types")
    if kinds and not _is_read_only(default, name):
        values[name] = [kinds[i % len(kinds)] for i in range(4)]
    for name in ("mlp_layer_types", "no_rope_layers"):
        if isinstance(listed := getattr(default, name, None), list) and listed:
            of_each = list(dict.fromkeys(listed))
            values[name] = [of_each[i % len(of_each)] for i in range(4)]
    return values


def _is_read_only(config: Any, name: str) -> bool:
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def traits(config: Any, model: Any) -> list[str]:
    """What a class has beyond a dense decoder with softmax attention over its keys."""
    flat = dict(_flat(config.to_dict()))
    names = " ".join(name for name, module in model.named_modules()).lower()
    found = []
    if any("experts" in leaf and not isinstance(v, bool) and isinstance(v, int) and v > 1 for leaf, v in flat.items()):
        found.append("experts")
    if any(leaf == "kv_lora_rank" and value for leaf, value in flat.items()):
        found.append("latent")
    recurrent = ("mamba", "ssm", "linear_attn", "recurrent", "rwkv", "lstm", "rg_lru", "gated_delta", "short_conv", "conv.conv")
    if any(word in names for word in recurrent) or getattr(type(model), "_is_stateful", False):
        found.append("recurrent")
    if any("cross_attn" in n or "encoder_attn" in n for n, _ in model.named_modules()):
        found.append("cross-attention")
    return found


def _flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield str(name), value


def write_checkpoint(name: str, model_type: str, folder: Path) -> tuple[Any, list[str]]:
    """A random float32 checkpoint of the class. → its config and traits"""
    import transformers

    cls = getattr(transformers, name)
    torch.manual_seed(sum(name.encode()))
    config = tiny_config(cls, model_type)
    config._attn_implementation = "eager"
    model = cls(config).float().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.2)
            else:
                parameter += torch.randn_like(parameter) * (0.3 if path.endswith("bias") else 0.1)
    model.save_pretrained(folder)
    return config, traits(config, model)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 320, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def first_difference(model: Any, prompt: list[int], tokens: list[int]) -> str | None:
    """The first token that is not transformers' choice after the tokens before it, ties apart; None: there is none."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(dim=-1)
    for i, token in enumerate(tokens):
        gap = float(best.values[i] - logits[i, token])
        if not gap <= TIE * max(1.0, float(best.values[i].abs())):
            return f"token {i} after a prompt of {len(prompt)}: {token} instead of {int(best.indices[i])} ({gap:.3f})"
    return None


def run_class(name: str, model_type: str, modes: list[str], num_tokens: int) -> Iterator[dict[str, Any]]:
    """One result per mode."""
    row: dict[str, Any] = {"class": name, "model_type": model_type}
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        import transformers

        try:
            _, found = write_checkpoint(name, model_type, folder / "model")
            row["traits"] = found
            reference = (
                getattr(transformers, name).from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager").eval()
            )
            with torch.no_grad():
                logits = reference(torch.tensor([prompts()[0]])).logits
            if not logits.isfinite().all():
                raise ValueError("transformers' logits are not finite")
        except Exception as error:
            yield {**row, "mode": "-", "outcome": "no reference", "why": _sentence(error)}
            return
        for mode in modes:
            started = time.perf_counter()
            result = _run_mode(folder, mode, num_tokens, reference)
            yield {**row, "mode": mode, **result, "seconds": round(time.perf_counter() - started, 1)}
            if result["outcome"] == "refused":
                return
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_mode(folder: Path, mode: str, num_tokens: int, reference: Any) -> dict[str, Any]:
    from compile_and_serve import LLM, SamplingParams
    from compile_and_serve.compiler.capture.capture import CaptureError
    from compile_and_serve.models.config import ModelConfigError

    try:
        with LLM(
            str(folder / "model"),
            dtype="float32",
            enforce_eager=mode == "eager",
            device="cpu",
            max_model_len=192,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            num_kv_blocks=1024,
            skip_tokenizer_init=True,
            cache_dir=str(folder / "cache"),
        ) as llm:
            report: dict[str, Any] = dict(llm.info.compile_report)
            greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], greedy, use_tqdm=False)
    except (ModelConfigError, CaptureError) as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        return {"outcome": "failed", "why": _sentence(error)}
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    differences = [first_difference(reference, p, t) for p, t in zip(prompts(), texts, strict=True)]
    told: dict[str, Any] = {}
    if mode == "compiled":
        told = {"pieces": report.get("distinct_pieces")}
    if any(differences):
        return {"outcome": "wrong", "why": next(d for d in differences if d), **told}
    return {"outcome": "right", **told}


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {next((line for line in str(error).splitlines() if line.strip()), '')[:300]}"


def in_child(name: str, model_type: str, args: argparse.Namespace, out: Path) -> None:
    """Run a class in a forked process, which appends its lines to `out`; a crash or a timeout is a line, too."""
    before = out.stat().st_size if out.exists() else 0
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            log = open(args.log, "a") if args.log else open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            print(f"\n=== {name}", flush=True)
            for row in run_class(name, model_type, args.modes, args.tokens):
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + args.timeout
    why = "timeout"
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            why = f"the process ended with status {os.waitstatus_to_exitcode(status)}"
            break
        time.sleep(0.2)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if why == "timeout" or os.waitstatus_to_exitcode(status):
        with out.open("a") as file:
            row = {"class": name, "model_type": model_type, "mode": "-", "outcome": "failed", "why": why}
            file.write(json.dumps(row) + "\n")
    with out.open() as file:
        file.seek(before)
        sys.stdout.write(file.read())
        sys.stdout.flush()


def read_rows(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last line of every class and mode."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if "class" not in row:
            continue
        if row["mode"] == "-" or row["outcome"] == "refused" or row["mode"] == "eager":
            for key in [key for key in latest if key[0] == row["class"]]:
                del latest[key]
        latest.pop((row["class"], "-"), None)
        latest[row["class"], row["mode"]] = row
    return latest


def summary(rows: Mapping[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Counts of classes by their worst outcome, over all and over plain decoders."""
    worst = ["failed", "wrong", "no reference", "refused", "right"]
    by_class: dict[str, dict[str, Any]] = {}
    for row in rows.values():
        kept = by_class.setdefault(row["class"], row)
        if worst.index(row["outcome"]) < worst.index(kept["outcome"]):
            by_class[row["class"]] = row
    others = {"experts", "latent", "recurrent"}
    plain = [row for row in by_class.values() if not others & set(row.get("traits", []))]
    counts = Counter(row["outcome"] for row in plain)
    not_causal = sorted(
        str(row["class"]) for row in plain if row["outcome"] == "refused" and any(reason in row["why"] for reason in NOT_CAUSAL)
    )
    measured = len(plain) - counts["no reference"]
    return {
        "summary": True,
        "all": dict(Counter(row["outcome"] for row in by_class.values())),
        "without experts, latent or recurrent state": dict(counts),
        "share right": round(counts["right"] / max(1, measured), 3),
        "not causal": not_causal,
        "share right of causal ones": round(counts["right"] / max(1, measured - len(not_causal)), 3),
        **environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="class names or model types")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--again", nargs="*", default=[], help="outcomes to repeat")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=TIMEOUT)
    parser.add_argument("--log", help="what the processes print goes here")
    args = parser.parse_args()

    for module in ("transformers", "compile_and_serve.runtime.llm.llm"):
        importlib.import_module(module)  # once, before the forks

    rows = read_rows(args.out)
    for name, model_type in sorted(architectures().items()):
        if args.only and name not in args.only and model_type not in args.only:
            continue
        done = {mode: row for (cls, mode), row in rows.items() if cls == name}
        repeat = any(row["outcome"] in args.again for row in done.values()) or bool(args.only)
        complete = "-" in done or any(r["outcome"] == "refused" for r in done.values()) or set(args.modes) <= done.keys()
        if not complete or repeat:
            in_child(name, model_type, args, args.out)
    print(json.dumps(summary(read_rows(args.out))))


if __name__ == "__main__":
    main()
