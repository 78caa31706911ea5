"""Stored kernels: pieces with C++ or Triton kernels are loaded without Inductor."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from compile_and_serve.compiler.built_kernels import BuiltKernels, LoadedKernel, TritonLaunch, built_kernels, without_unused_imports
from compile_and_serve.compiler.inductor import load_pieces, start_piece
from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from tests.support.hopper import run_script

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("instruction_set")


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.tanh(x * 3.0) + x,)


LOADING = """
import json, sys
from pathlib import Path
import torch
from compile_and_serve.compiler.inductor import load_pieces

here = Path(FOLDER)
built = {"a": json.loads((here / "built.json").read_text())}
loaded = load_pieces({"a": (here / "source.py").read_text()}, torch.device("cpu"), here, built)
x = torch.linspace(-2, 2, 2048).view(32, 64)
torch.testing.assert_close(loaded["a"].run([x])[0], torch.tanh(x * 3.0) + x)
heavy = ("torch._dynamo", "torch._inductor", "torch._inductor.select_algorithm", "torch._inductor.codegen.memory_planning")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


@pytest.mark.slow
def test_cpp_kernels_are_loaded_without_inductor(tmp_path: Path) -> None:
    gm = symbolic_trace(Scaled())
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = torch.empty(32, 64)
    made = start_piece(gm, CPU, tmp_path / "made").result()
    built = built_kernels(made.source, made.run)
    assert built["obstacle"] is None
    assert len(built["cpp"]) == 1
    shutil.copytree(tmp_path / "made", tmp_path / "moved")
    (tmp_path / "moved" / "source.py").write_text(made.source)
    (tmp_path / "moved" / "built.json").write_text(json.dumps(built))
    script = LOADING.replace("FOLDER", repr(str(tmp_path / "moved")))
    assert run_script(script, tmp_path / "outside") == []
    for library in (tmp_path / "moved").rglob("*.main.so"):
        library.unlink()
    # Its kernel is built again, with no more of Inductor than that needs.
    assert run_script(script, tmp_path / "outside") == ["torch._dynamo", "torch._inductor"]


MAKING_TRITON = """
import json
from pathlib import Path
import torch
from torch.fx import symbolic_trace
from tests.support.stand_in_gpu import DEVICE, stand_in_gpu, use_hopper_backend

cubins = stand_in_gpu()
from compile_and_serve.compiler.built_kernels import built_kernels
from compile_and_serve.compiler.compat import fake_mode_with_symbols
from compile_and_serve.compiler.inductor import start_piece
from torch._inductor import config

use_hopper_backend()
here = Path(FOLDER)


class Model(torch.nn.Module):
    def forward(self, tokens, ids, table, weight):
        return torch.tanh(torch.mm(torch.nn.functional.embedding(ids, table), weight)) * 2.0, table.new_zeros(tokens)


mode, symbols = fake_mode_with_symbols(["tokens"], {"tokens": 1 << 16})
tokens = symbols["tokens"]
gm = symbolic_trace(Model())
with mode:
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    values = [tokens, ids, *(torch.empty(size, device="meta") for size in ((100, 64), (64, 256)))]
for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
    node.meta["example_value"] = value
with config.patch(compile_threads=1):
    made = start_piece(gm, DEVICE, here / "made").result()
(here / "source.py").write_text(made.source)
built = built_kernels(made.source, made.run)
(here / "built.json").write_text(json.dumps(built))

# What Inductor launches, by kernel: each of its configurations with numbers as arguments.
from compile_and_serve.compiler.built_kernels import _module_scope
scope, inductors = _module_scope(made.run), {}
for name in built["triton"]:
    cubins.launches.clear()
    for launcher in scope[name].launchers:
        launcher(*range(1000, 1000 + launcher.__code__.co_argcount - 1), stream=7)
    inductors[name] = list(cubins.launches)
print(json.dumps({"built": built, "inductors": inductors, "source": made.source}))
"""

LOADING_TRITON = """
import json, sys
from pathlib import Path
import torch
from tests.support.stand_in_gpu import DEVICE, stand_in_gpu

cubins = stand_in_gpu()
from compile_and_serve.compiler.inductor import load_pieces

here = Path(FOLDER)
built = json.loads((here / "built.json").read_text())
run = load_pieces({"a": (here / "source.py").read_text()}, DEVICE, here / "moved", {"a": built})["a"].run
imported = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
scope, ours = run.__func__.__globals__, {}
for name in built["triton"]:
    cubins.launches.clear()
    for launcher in scope[name].launchers:
        launcher(*range(1000, 1000 + launcher.__code__.co_argcount - 1), stream=7)
    ours[name] = list(cubins.launches)
tokens = 48
shapes = [list(one.shape) for one in run([tokens, torch.zeros(tokens, dtype=torch.int64), torch.zeros(100, 64), torch.zeros(64, 256)])]
print(json.dumps({"imported": imported, "ours": ours, "shapes": shapes, "later": [n for n in ("torch._inductor",) if n in sys.modules]}))
"""


@pytest.fixture(scope="module")
def triton_piece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a piece whose kernels Inductor compiled for Hopper, and what the process that made it printed."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("triton-piece")
    made = run_script(MAKING_TRITON.replace("FOLDER", repr(str(folder))), folder / "outside")
    shutil.move(folder / "made", folder / "moved")
    return folder, made


def test_triton_kernels_are_loaded_without_inductor_and_launched_as_by_it(triton_piece: tuple[Path, dict[str, Any]]) -> None:
    folder, made = triton_piece
    assert made["built"]["obstacle"] is None
    kernels = made["built"]["triton"]
    assert any(kernel["mutated"] for kernel in kernels.values())  # the tanh, in place
    assert any(len(kernel["launches"]) > 1 for kernel in kernels.values())
    assert "extern_kernels.mm(" in made["source"]
    loaded = run_script(LOADING_TRITON.replace("FOLDER", repr(str(folder))), folder / "outside")
    assert loaded["imported"] == loaded["later"] == []
    assert loaded["ours"] == made["inductors"]
    assert loaded["shapes"] == [[48, 256], [48]]


def test_why_inductor_loads_a_piece_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO, logger="compile_and_serve.compiler.inductor"):
        load_pieces({"a": "call = None", "b": "call = 1"}, CPU, tmp_path, {"b": BuiltKernels(obstacle=None, cpp={}, triton={})})
        load_pieces({"a": "call = None"}, CPU, tmp_path, {"a": BuiltKernels(obstacle="it uses start_graph", cpp={}, triton={})})
        load_pieces({"a": "call = None"}, CPU, tmp_path, {"a": BuiltKernels(obstacle=None, cpp={"k": "no/file.so"}, triton={})})
    assert [record.message for record in caplog.records] == [
        "Inductor loads 1 of 2 pieces, which takes seconds; the first because nothing is stored of its kernels.",
        "Inductor loads 1 of 1 pieces, which takes seconds; the first because it uses start_graph.",
        "Inductor loads 1 of 1 pieces, which takes seconds; the first because a file of its kernels is missing.",
    ]


HEAD = """
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.runtime.triton_heuristics import start_graph, end_graph
import torch
async_compile = AsyncCompile()
"""


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        ("extern_kernels.mm(a, b)", None),
        ("# torch._inductor is named here", None),
        ("extern_kernels.bias_addmm(a, b, c)", "it calls extern_kernels.bias_addmm, which is not torch.bias_addmm"),
        ("extern_kernels.no_such(a)", "it calls extern_kernels.no_such, which is not torch.no_such"),
        ("start_graph()", "it uses start_graph, end_graph"),
        ("torch._inductor.utils.f(x)", "it uses torch._inductor.utils.f"),
        ("k = async_compile.cuda('k', '''source''')", "it has kernels that are neither C++ nor Triton ones"),
    ],
)
def test_what_else_a_module_uses_is_an_obstacle(body: str, obstacle: str | None) -> None:
    from torch._inductor.select_algorithm import extern_kernels

    source = f"{HEAD}\n{body}\nasync_compile.wait(globals())\n"
    scope: dict[str, Any] = {"AsyncCompile": None, "extern_kernels": extern_kernels}
    exec("def call(args):\n    return args", scope)
    assert built_kernels(source, scope["call"])["obstacle"] == obstacle


def test_a_wrapped_function_has_its_modules_kernels() -> None:
    def plain(args: list[Any]) -> list[Any]:
        return args

    assert built_kernels(HEAD, plain)["obstacle"] == "its module is not found"
    scope: dict[str, Any] = {"AsyncCompile": None}
    exec("def call(args):\n    return args", scope)
    call = scope["call"]
    source = "async_compile.wait(globals())\n"
    assert built_kernels(source, lambda args: call([*args]))["obstacle"] is None


def test_only_imports_that_a_module_does_not_use_are_left_out() -> None:
    kernel = "'''\nimport triton\nfrom torch._inductor.runtime import triton_helpers, triton_heuristics\n'''"
    used = "from torch._inductor.async_compile import AsyncCompile\n"
    unused = (
        "from torch._inductor.codegen.memory_planning import _align as align\n"
        "from torch._inductor.select_algorithm import extern_kernels\n"
        "from torch._inductor.runtime.triton_heuristics import start_graph, end_graph\n"
    )
    rest = f"k = AsyncCompile().triton('k', {kernel}, device_str='cuda')\n"
    assert without_unused_imports(used + unused + rest) == f"{used}\n\n\n{rest}"
    assert without_unused_imports(unused + "extern_kernels.mm(a, b)\n").count("import") == 1
    assert without_unused_imports(unused + "end_graph()\n").count("import") == 1
    assert without_unused_imports(used + rest, given=["AsyncCompile"]) == f"\n{rest}"


class Clock:
    """A platform whose time goes on by what kernels add to it."""

    now = 0.0


class Timed(CpuPlatform):
    is_in_capture = False

    def is_capturing(self) -> bool:
        return Timed.is_in_capture

    def record_timed_event(self) -> Any:
        return TimedAt(Clock.now)


class TimedAt:
    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        """It is over."""

    def seconds_since(self, earlier: TimedAt) -> float:
        return self.at - earlier.at


class TimedCubins:
    """Each launch adds 1 to its first argument and takes the seconds that the file's name says."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def _load_kernel(self, file: str, name: str, shared: int, device: int) -> tuple[str, int, int]:
        return Path(file).name, 32, 0

    def _launch_kernel(self, function: str, x: torch.Tensor, stream: int) -> None:
        self.ran.append(function)
        Clock.now += float(function)
        x += 1


@contextmanager
def timed_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedCubins]:
    cubins = TimedCubins()
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", cubins, raising=False)
    register_platform("cpu", Timed)
    try:
        yield cubins
    finally:
        register_platform("cpu", CpuPlatform)


def timed_kernel(*seconds: str) -> LoadedKernel:
    launcher = "def launcher(x, stream):\n    launch(function, x, stream)"
    launches = [TritonLaunch(file=one, symbol="k", shared=0, launcher=launcher) for one in seconds]
    return LoadedKernel({"launches": launches, "mutated": [0]}, torch.device("cpu"), Path())


@pytest.mark.parametrize(("seconds", "chosen"), [(("3", "1", "2"), "1"), (("1.02", "1"), "1.02"), (("1", "2"), "1"), (("5",), "5")])
def test_the_first_call_chooses_a_configuration(seconds: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_cpu(monkeypatch) as cubins:
        kernel, x = timed_kernel(*seconds), torch.zeros(2)
        kernel.run(x, stream=7)
        assert x.tolist() == [1, 1]  # measured on copies
        assert set(cubins.ran) == set(seconds)
        cubins.ran.clear()
        kernel.run(x, stream=7)
    assert cubins.ran == [chosen]
    assert x.tolist() == [2, 2]


def test_nothing_is_measured_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_cpu(monkeypatch) as cubins:
        kernel, x = timed_kernel("3", "1"), torch.zeros(2)
        monkeypatch.setattr(Timed, "is_in_capture", True)
        kernel.run(x, stream=7)
        assert cubins.ran == ["3"]
        monkeypatch.setattr(Timed, "is_in_capture", False)
        kernel.run(x, stream=7)
    assert cubins.ran[-1] == "1"
    assert x.tolist() == [2, 2]
