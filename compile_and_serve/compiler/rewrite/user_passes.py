"""Passes of users: loads them by `package.module:Class` or by the name of an entry point, and inserts them into the pipeline."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from compile_and_serve.compiler.rewrite.graph_pass import GraphPass, PassError
from compile_and_serve.plugins import declared_plugins, load_plugin


def with_user_passes(pipeline: Sequence[GraphPass], names: Sequence[str]) -> tuple[GraphPass, ...]:
    """The pipeline with each named pass after the pass that its attribute `after` names, by default at the end.

    Passes with the same `after` keep their order. Raises `PassError` for one that cannot be imported, is not a pass, has another pass's
    name, or has an unknown `after`.
    """
    passes = list(pipeline)
    placed_after: dict[str, int] = {}  # name in `after` → number of passes inserted there
    for name in names:
        new = load_pass(name)
        known = [graph_pass.name for graph_pass in passes]
        if new.name in known:
            raise PassError(f"Pass {name} has the name {new.name!r} of another pass: give it a name of its own.")
        after = getattr(new, "after", None) or (pipeline[-1].name if pipeline else None)
        if after is not None and after not in known:
            raise PassError(f"Pass {name} is to run after {after!r}, which is not a pass: the passes are {', '.join(known)}.")
        at = known.index(after) + 1 + placed_after.get(after, 0) if after is not None else len(passes)
        if after is not None:
            placed_after[after] = placed_after.get(after, 0) + 1
        passes.insert(at, new)
    return tuple(passes)


def load_pass(name: str) -> GraphPass:
    """An instance of the pass class `package.module:Class`, or of the entry point `name` of an installed package.

    Modules of the current folder are found, too. Raises `PassError`, or `PluginError` for an entry point that cannot be imported.
    """
    if ":" in name:
        found = _imported(name)
    else:
        declared = declared_plugins("passes")
        if name not in declared:
            known = f"; installed packages declare {', '.join(sorted(declared))}" if declared else ""
            raise PassError(f"There is no pass {name!r}: expected package.module:Class{known}.")
        found = load_plugin(declared[name])
    if not isinstance(found, type):
        raise PassError(f"{name} is not a pass: expected a class, got a {type(found).__name__}.")
    try:
        made = found()
    except Exception as error:
        raise PassError(f"Pass {name} cannot be constructed without arguments: {_reason(error)}.") from error
    missing = [attribute for attribute in ("adds", "guard", "run", "cache_key") if not callable(getattr(made, attribute, None))]
    missing += [a for a, kind in (("name", str), ("version", int)) if not isinstance(getattr(made, a, None), kind)]
    if missing:
        raise PassError(
            f"{name} is not a pass, it lacks {', '.join(missing)}: derive it from compile_and_serve.compiler.rewrite.graph_pass.BasePass."
        )
    return made


def source_of(graph_pass: GraphPass) -> str | None:
    """Text of the file that defines a pass; None if there is no such file (a class created at run time)."""
    try:
        return inspect.getsource(sys.modules[type(graph_pass).__module__])
    except (KeyError, OSError, TypeError):
        return None


def _imported(name: str) -> object:
    module_name, _, attribute = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:  # last, so that it cannot shadow installed packages
        sys.path.append(folder)
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise PassError(f"Pass {name} cannot be imported: {_reason(error)}.{_import_hint(error)}") from error
    if not hasattr(module, attribute):
        raise PassError(f"Pass {name} cannot be imported: {module.__file__ or module_name} has no {attribute!r}.")
    return getattr(module, attribute)


def _import_hint(error: Exception) -> str:
    """How to import our modules, for an error about one of them that is imported without the package's name."""
    ours = ("compiler", "custom_ops", "models", "runtime", "serve")
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing.partition(".")[0] not in ours:
        return ""
    return f" Import our modules from the package: compile_and_serve.{missing}."


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(".")
