"""Private torch names are used in four files only, so that a new torch version can break nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "compile_and_serve"
ALLOWED = {"compiler/inductor.py", "compiler/built_kernels.py", "compiler/compat.py", "custom_ops/compat.py"}


def private_uses(source: str) -> list[str]:
    """Dotted torch names in `source` that have a private part. Names of ops (`torch.ops.aten._foo`) are public."""
    tree = ast.parse(source)
    names: dict[str, str] = {}  # local name → the torch name that it is bound to
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    uses.append(alias.name)
                    names |= {alias.asname: alias.name} if alias.asname else {"torch": "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            uses += imported.values()
            names |= imported
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in names:
            uses.append(".".join((names[node.id], *reversed(parts))))
    return sorted({use for use in uses if not use.startswith("torch.ops.") and any(map(_is_private, use.split(".")))})


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("import torch\nx = torch._C.f(torch.__version__)", ["torch._C", "torch._C.f"]),
        ("import torch._inductor.config", ["torch._inductor.config"]),
        ("def f():\n    from torch._ops import OpOverload as O", ["torch._ops.OpOverload"]),
        ("from torch.utils import _pytree", ["torch.utils._pytree"]),
        ("import torch.distributed as dist\ndist._reduce_scatter(x)", ["torch.distributed._reduce_scatter"]),
        ("import torch\ndef f(x: torch._ops.OpOverload): ...", ["torch._ops", "torch._ops.OpOverload"]),
        ("import torch\ntorch.ops.aten._assert_async.default(x)", []),
        ("import torch\nself._C = torch.nn.Linear", []),
    ],
)
def test_private_names_are_found(source: str, used: list[str]) -> None:
    assert private_uses(source) == used


def test_private_torch_names_are_used_in_four_files_only() -> None:
    files = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}
    assert files.keys() >= ALLOWED
    found = {name: private_uses(file.read_text()) for name, file in files.items() if name not in ALLOWED}
    assert {name: uses for name, uses in found.items() if uses} == {}
