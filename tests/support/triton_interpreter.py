"""Triton's interpreter, which runs kernels where there is no GPU, made quicker for tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def patch_language_once() -> None:
    """While a kernel runs, `triton.language` is patched once, not at each call of a device function (`tl.sum` is one).

    The patches are the same each time, and they took half of the kernels' time. Does nothing where Triton is missing.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # an older Triton
    patched: set[Any] = set()  # modules, while a kernel runs

    def patch_once(fn: Any) -> Any:
        modules = {module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())}
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

    interpreter._patch_lang = patch_once
