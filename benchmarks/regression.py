"""Compares this checkout with an earlier one on the same GPU, in turns. To run before a change to kernels, tuner or pieces is called done.

    python -m benchmarks.regression BASE [--cases llama-8b,llama-8b:fp8,qwen3-0.6b] [--rounds 3] [--limit 0.02] [--out FILE]

BASE: a commit, or a folder that holds another checkout. Each round runs `benchmarks.gpu` once for BASE and once for this checkout: start,
decode steps of 1 and 64 sequences, prompts. The two have caches of their own, empty in the first round, so the first start is a bare one
and the others are warm. Prints the rows, then a table of medians with the ratio of times (this checkout's over BASE's). Exit status 1 if a
step or a prompt is slower by more than the limit, or if the decode steps of one checkout differ between its starts by more than the limit.
Starts are shown and do not fail: they depend on what else the host does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, commit

CASES = ("llama-8b", "llama-8b:fp8", "qwen3-0.6b")
BATCHES = (1, 64)
Times = Mapping[str, Sequence[float]]  # figure → its time in each round


def checkout(base: str, folder: Path) -> Path:
    """The folder `base`, or a new work tree of the commit `base` in `folder`."""
    if Path(base, "benchmarks", "gpu.py").exists():
        return Path(base).resolve()
    subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(folder), base], check=True, capture_output=True)
    return folder


def run(tree: Path, name: str, case: str, caches: Path) -> list[dict[str, Any]]:
    """The rows of one start of `benchmarks.gpu` in the checkout `tree`, which is called `name` in them."""
    model, _, quantization = case.partition(":")
    command = [sys.executable, "-m", "benchmarks.gpu", str(ROOT / "benchmarks" / "configs" / model), "--work", "startup,decode,prefill"]
    command += ["--batches", ",".join(map(str, BATCHES)), "--label", f"regression {name}"]
    command += ["--quantization", quantization] if quantization else []
    variables = {"XDG_CACHE_HOME": "", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    environment = os.environ | {variable: str(caches / folder) for variable, folder in variables.items()}
    packages = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT]
    environment |= {"PYTHONPATH": os.pathsep.join([str(tree), *packages]), "BENCHMARK_COMMIT": name}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed at {name}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def times_of(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Milliseconds by figure, one for each round. The first round's start is bare."""
    times: dict[str, list[float]] = defaultdict(list)
    for number, rows in enumerate(rounds):
        for row in rows:
            match row["work"]:
                case "startup":
                    times["start, bare" if number == 0 else "start, warm"].append(1e3 * row["first_token_s"])
                case "decode":
                    times[f"decode of {row['batch']}"].append(row["step_ms"])
                case "prefill":
                    times[f"{row['n']} x {row['prompt']} tokens"].append(1e3 * row["s"])
    return dict(times)


def findings(case: str, base: Times, ours: Times, limit: float) -> list[str]:
    """What fails: figures that are slower than BASE's by more than the limit, and decode steps that differ between starts."""
    found = []
    for figure, times in ours.items():
        if figure.startswith("start"):
            continue
        ratio = statistics.median(times) / statistics.median(base[figure])
        if ratio > 1 + limit:
            found.append(f"{case}: {figure} takes {ratio:.3f} of the time before")
        if figure.startswith("decode") and max(times) > (1 + limit) * min(times):
            found.append(f"{case}: {figure} differs from start to start: {', '.join(f'{time:.3f}' for time in times)} ms")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit, or a folder with another checkout")
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), default=list(CASES), help="configs of benchmarks/configs[:quantization]"
    )
    parser.add_argument("--rounds", type=int, default=3, help="starts of each checkout")
    parser.add_argument("--limit", type=float, default=0.02, help="share of the time before by which a figure may be slower")
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    args = parser.parse_args()
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {args.base: checkout(args.base, folder / "base"), commit(): ROOT}
        if len(trees) < 2:
            parser.error(f"{args.base} is this checkout: nothing to compare")
        for case in args.cases:
            rounds: dict[str, list[list[dict[str, Any]]]] = {tree: [] for tree in trees}
            for _ in range(args.rounds):
                for number, (tree, path) in enumerate(trees.items()):
                    rows = run(path, Path(tree).name, case, folder / f"caches {number} {case}")
                    rounds[tree].append(rows)
                    lines = [json.dumps(row) for row in rows]
                    print(*lines, sep="\n", flush=True)
                    if args.out:
                        with args.out.open("a") as file:
                            file.writelines(line + "\n" for line in lines)
            base, ours = map(times_of, rounds.values())
            print(f"\n| {case} | {' | '.join(Path(tree).name for tree in trees)} | ratio |\n|---|---:|---:|---:|")
            for figure in ours:
                before, now = statistics.median(base[figure]), statistics.median(ours[figure])
                print(f"| {figure}, ms | {before:.3f} | {now:.3f} | {now / before:.3f} |", flush=True)
            found += findings(case, base, ours, args.limit)
        if trees[args.base].is_relative_to(folder):
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(trees[args.base])], check=False)
    print(*(found or ["Nothing is slower."]), sep="\n")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
