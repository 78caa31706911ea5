"""User passes: how they are found, their place in the pipeline, their cache keys and their errors."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.artifacts.cache_key import plan_fields
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.rewrite import user_passes
from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassError, PassResult
from compile_and_serve.compiler.rewrite.pass_manager import run_passes
from compile_and_serve.compiler.rewrite.user_passes import with_user_passes
from compile_and_serve.plugins import PluginError
from tests.support.tiny_models import tiny_spec

MODULE = """
from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassResult

class Last(BasePass):
    name = "last"
    def run(self, gm, ctx):
        return PassResult(matched=0)

class Early(Last):
    name = "early"
    after = "eliminate_noops"

class EarlyToo(Last):
    name = "early_too"
    after = "eliminate_noops"

class Taken(Last):
    name = "merge_linears"

class Nowhere(Last):
    name = "nowhere"
    after = "nonsense"

class NotAPass:
    name = "not_a_pass"

class WantsMore(Last):
    def __init__(self, threshold):
        self.threshold = threshold

made = Last()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file `brought_passes.py` in the current folder."""
    file = tmp_path / "brought_passes.py"
    file.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "brought_passes", raising=False)
    return file


def names(*wanted: str) -> list[str]:
    return [p.name for p in with_user_passes(default_passes(), [f"brought_passes:{name}" for name in wanted])]


def test_passes_are_inserted_at_their_places(module: Path) -> None:
    ours = [p.name for p in default_passes()]
    assert names() == ours
    assert names("Last") == [*ours, "last"]
    at = ours.index("eliminate_noops") + 1
    assert names("Early", "Last", "EarlyToo") == [*ours[:at], "early", "early_too", *ours[at:], "last"]


def test_a_pass_of_an_installed_package(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"mine": "brought_passes:Early", "broken": "no_such_module:Pass"}
    points = {name: importlib.metadata.EntryPoint(name, value, "compile_and_serve.passes") for name, value in values.items()}
    monkeypatch.setattr(user_passes, "declared_plugins", lambda kind: points)
    monkeypatch.syspath_prepend(module.parent)
    assert "early" in [p.name for p in with_user_passes(default_passes(), ["mine"])]
    with pytest.raises(PassError, match=r"There is no pass 'other'.* installed packages declare broken, mine"):
        with_user_passes(default_passes(), ["other"])
    with pytest.raises(PluginError, match="'broken' in compile_and_serve.passes .no_such_module:Pass. cannot be imported: ModuleNotFound"):
        with_user_passes(default_passes(), ["broken"])


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (["no_such_module:Pass"], "Pass no_such_module:Pass cannot be imported: ModuleNotFoundError: No module named"),
        (["compiler.no_such_module:Pass"], "Import our modules from the package: compile_and_serve.compiler"),
        (["brought_passes:Missing"], "has no 'Missing'"),
        (["brought_passes"], "There is no pass 'brought_passes': expected package.module:Class"),
        (["brought_passes:made"], "brought_passes:made is not a pass: expected a class, got a Last"),
        (["brought_passes:NotAPass"], "is not a pass, it lacks adds, guard, run, cache_key, version: derive it from"),
        (["brought_passes:WantsMore"], "cannot be constructed without arguments: TypeError"),
        (["brought_passes:Taken"], "has the name 'merge_linears' of another pass"),
        (["brought_passes:Last", "brought_passes:Last"], "has the name 'last' of another pass"),
        (["brought_passes:Nowhere"], "is to run after 'nonsense', which is not a pass: the passes are functionalize, canonicalize, "),
    ],
)
def test_errors_are_sentences(module: Path, wanted: list[str], sentence: str) -> None:
    with pytest.raises(PassError) as error:
        with_user_passes(default_passes(), wanted)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_an_edit_changes_the_key(module: Path) -> None:
    def key() -> object:
        passes = with_user_passes(default_passes(), ["brought_passes:Last"])
        return plan_fields(tiny_spec(), passes, frozenset(), frozenset(), torch.device("cpu"), torch.float32)["passes"]

    before = key()
    assert key() == before
    module.write_text(MODULE + "\n# another line\n")
    importlib.invalidate_caches()
    del sys.modules["brought_passes"]
    after = key()
    assert after != before
    assert after[:-1] == before[:-1]  # type: ignore[index]


def test_a_pass_that_fails_is_named() -> None:
    class Fails(BasePass):
        name = "fails"

        def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
            raise RuntimeError("it cannot be\nmore lines")

    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(PassError, match=r"Pass fails failed with RuntimeError: it cannot be: leave it out with --disable-pass fails"):
        run_passes(gm, [Fails()], None)  # type: ignore[arg-type]
