"""Triton's interpreter, which runs kernels where there is no GPU, made quicker for tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def make_interpreter_quicker() -> None:
    """Let Triton's interpreter not do the same thing again and again, which took half of a kernel's time. Results are the same.

    While a kernel runs, `triton.language` is patched once, not at each call of a device function (`tl.sum` is one). NumPy's type of a
    Triton type is looked up once. Does nothing where Triton is missing, or older.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _patched_once(interpreter)
        interpreter._get_np_dtype = _known_types(interpreter._get_np_dtype)


def _patched_once(interpreter: Any) -> Callable[[Any], Any]:
    """`interpreter._patch_lang`, which does nothing for modules that are patched already."""
    import triton.language as tl

    patch = interpreter._patch_lang
    visible: dict[int, frozenset[Any]] = {}  # id of a module's globals → the modules that are patched for its functions
    patched: set[Any] = set()  # while a kernel runs

    def patch_once(fn: Any) -> Any:
        modules = visible.get(id(fn.__globals__))
        if modules is None:
            values = {id(value) for value in fn.__globals__.values()}
            modules = visible[id(fn.__globals__)] = frozenset(module for module in (tl, tl.core) if id(module) in values)
        if modules <= patched:
            return interpreter._LangPatchScope()
        is_kernel = not patched
        patched.update(modules)
        scope = patch(fn)
        if is_kernel:
            restore = scope.restore

            def restore_and_forget() -> None:
                restore()
                patched.clear()

            scope.restore = restore_and_forget
        return scope

    return patch_once


def _known_types(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a Triton type that looks at the type of its elements alone, and remembers results."""
    known: dict[str, Any] = {}

    def find(triton_type: Any) -> Any:
        name = triton_type.scalar.name
        if name not in known:
            known[name] = numpy_type(triton_type)
        return known[name]

    return find
