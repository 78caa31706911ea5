"""Build FlashInfer's prefill modules for this machine's GPU, and copy them to a folder so that other machines need not build them.

    python -m benchmarks.build_flashinfer [OUT_DIR] [--head-dim 128] [--window] [--soft-cap] [--import DIR]

--import takes modules from such a folder before the rest is built. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu_timing import emit
from compile_and_serve.custom_ops.attention.flashinfer_modules import FlashInferModules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder for copies of the built modules")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", action="store_true", help="of layers with a sliding window")
    parser.add_argument("--soft-cap", action="store_true", help="of layers that cap their scores")
    parser.add_argument("--import", dest="source", type=Path, help="folder with modules built before")
    args = parser.parse_args()
    modules = FlashInferModules(torch.bfloat16, args.head_dim, torch.device("cuda"), has_window=args.window, has_cap=args.soft_cap)
    if args.source:
        modules.import_from(args.source)
    started = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(modules.build, modules.variants))
    written = modules.export_to(args.out) if args.out else []
    emit(work="flashinfer_modules", seconds=round(time.perf_counter() - started, 1), written=[p.name for p in written], **modules.status())


if __name__ == "__main__":
    main()
