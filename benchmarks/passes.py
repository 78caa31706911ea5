"""What each pass is worth: the time of a decode step with every other pass, without this one and with it.

    python -m benchmarks.passes [MODEL] [--tokens 1 16 64] [--rounds 3] [--layers N] [--threads 2] [--only PASS …]

One JSON line a pass and number of tokens (as many sequences of 512 tokens, one token of each): sites, ms before and after, bytes that
pieces and split ops read and write before and after, and what share of the device's bandwidth and matrix rate, measured in the same run,
the step reaches after it. Two passes act only where another has left them something, so they are measured without that one, and the line
has what `auto` measured for each of their shapes; three have work only in models of the transformers package, so they are measured in its
class. A pass without sites is not timed. Weights are
random: only the config is read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import cpu_name, environment
from compile_and_serve.compiler import CompileConfig, available_kernels, compile_model
from compile_and_serve.compiler.config import Quantization
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.runner.attention_backends import backends_of_model
from compile_and_serve.runtime.weights import read_config, resolve_model

WITHOUT_LINEARS = frozenset({"fuse_linears"})
NOT_MEASURED = ("functionalize", "canonicalize", "quantize_linears")  # needed, or wanted for something else than time


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a pass is measured in: the model's implementation, the passes that are off before and after, and quantized linears."""

    model_impl: Any = "auto"
    without: frozenset[str] = frozenset()
    quantization: Quantization | None = None


SETTINGS = {
    "eliminate_noops": Setting(model_impl="transformers"),
    "drop_batch_axis": Setting(model_impl="transformers"),
    "lift_norms": Setting(model_impl="transformers"),
    "fuse_silu_mul": Setting(without=WITHOUT_LINEARS | {"fuse_add_rms_norm"}),
    "fuse_add_rms_norm": Setting(without=WITHOUT_LINEARS | {"fuse_silu_mul"}),
}


def profile(
    config: dict[str, Any],
    setting: Setting,
    disabled: frozenset[str],
    forced: frozenset[str],
    arguments: argparse.Namespace,
    cache: Path,
    *,
    measured: bool = True,
) -> dict[str, Any]:
    """Compile (or load) a model with those passes and measure its steps: the report."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16
    spec = build_model(config, dtype=dtype, model_impl=setting.model_impl)
    options = make_engine_config(str(arguments.model), load_format="dummy")
    backends = backends_of_model(spec, options, device, dtype)
    model = compile_model(
        spec,
        CompileConfig(
            cache_dir=cache,
            disabled_passes=disabled,
            forced_passes=forced,
            quantization=setting.quantization,
            profile_tokens=tuple(arguments.tokens) if measured else (),
        ),
        device=device,
        dtype=dtype,
        kernels=available_kernels(device=device, dtype=dtype, attention_backends=backends.values()),
        attention_backends=backends,
    )
    return model.report


def measure(name: str, config: dict[str, Any], arguments: argparse.Namespace, cache: Path) -> None:
    """One line a number of tokens for pass `name`, before and after measured in turns."""
    setting = SETTINGS.get(name, Setting())
    reports: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for _ in range(arguments.rounds):
        reports["before"].append(profile(config, setting, setting.without | {name}, frozenset(), arguments, cache))
        forced = frozenset({name}) - setting.without
        reports["after"].append(profile(config, setting, setting.without, forced, arguments, cache))
        row = next(row for row in reports["after"][0]["passes"] if row["name"] == name)
        if not row.get("matched"):
            emit(**{"pass": name}, sites=0, note=row.get("skipped", ""), model_impl=setting.model_impl, quantization=setting.quantization)
            return
    chosen = profile(config, setting, setting.without, frozenset(), arguments, cache, measured=False)["passes"]
    device = {key: max(report["profile"][key] for report in reports["before"] + reports["after"]) for key in ("bandwidth", "gemm_rate")}
    for tokens in arguments.tokens:
        before, after = (_best_step(reports[when], tokens) for when in ("before", "after"))
        emit(
            **{"pass": name},
            sites=row.get("matched", 0),
            auto=[sentence for other in chosen if other["name"] == name for sentence in other["measured"]],
            tokens=tokens,
            before_ms=before["seconds"] * 1e3,
            after_ms=after["seconds"] * 1e3,
            speedup=before["seconds"] / after["seconds"],
            before_bytes=before["bytes"],
            after_bytes=after["bytes"],
            bandwidth_share=after["bytes"] / after["seconds"] / device["bandwidth"],
            gemm_share=after["flops"] / after["seconds"] / device["gemm_rate"],
            bandwidth_gb_per_s=device["bandwidth"] / 1e9,
            gemm_gflop_per_s=device["gemm_rate"] / 1e9,
            model_impl=setting.model_impl,
            quantization=setting.quantization,
            without=sorted(setting.without),
        )


def _best_step(reports: Sequence[dict[str, Any]], tokens: int) -> dict[str, float]:
    """The fastest step of all rounds, and the bytes and FLOPs of its pieces and ops."""
    profile = reports[0]["profile"]
    rows = [row for row in profile["rows"] if row["tokens"] == tokens]
    return {
        "seconds": min(s["seconds"] for r in reports for s in r["profile"]["steps"] if s["tokens"] == tokens),
        "bytes": sum(row["count"] * row["bytes"] for row in rows),
        "flops": sum(row["count"] * row["flops"] for row in rows),
    }


def emit(**values: Any) -> None:
    """One JSON line, with where it was measured."""
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps(rounded | CONTEXT), flush=True)


CONTEXT: dict[str, Any] = {}


def main() -> None:
    """Measure every pass, or those that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", help="these passes alone")
    parser.add_argument("--note", default="", help="what a reader of the figures has to know, e.g. that others used the machine")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = read_config(resolve_model(arguments.model))
    if arguments.layers:
        config["num_hidden_layers"] = arguments.layers
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    CONTEXT.update(
        model=arguments.model,
        layers=config["num_hidden_layers"],
        dtype="bfloat16",
        device=device,
        threads=arguments.threads,
        rounds=arguments.rounds,
        **environment(),
    )
    if arguments.note:
        CONTEXT["note"] = arguments.note
    names = [graph_pass.name for graph_pass in default_passes() if graph_pass.name not in NOT_MEASURED]
    with tempfile.TemporaryDirectory() as cache:
        for name in arguments.only or names:
            measure(name, config, arguments, Path(cache))


if __name__ == "__main__":
    main()
