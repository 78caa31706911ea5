"""Triton kernels compiled for a Hopper GPU, which this machine need not have.

In a process of its own: where other tests run kernels in Triton's interpreter, there is nothing to compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LARGEST_SHARED = 227 << 10  # bytes that a program may have
NOT_BY_16 = {
    "num_rows",
    "num_seqs",
    "num_tokens",
    "num_queries",
    "prefetch_blocks",
    "first_seq",
    "part_begin",
    "part_end",
}  # integers that kernels are not specialized for


def run_script(script: str, folder: Path) -> Any:
    """What a Python program prints as JSON, in a process where kernels compile. folder: Triton's cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compiled(kernel: Any, constants: Mapping[str, Any], type_of: Callable[[str], str], num_warps: int, **options: Any) -> Any:
    """For use in such a program: Triton's compiled kernel, with its texts in `asm`.

    constants: values of constexprs, None for absent pointers; unknown names are ignored. type_of: the type of every other argument.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else type_of(name) for name in names}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types[name] not in ("constexpr", "fp32") and name not in NOT_BY_16
        },
    )
    options |= {"num_warps": num_warps} | ({"launch_pdl": True} if "PDL" in names else {})
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)
