"""`ModulePatterns`: values by regular expressions of module names, as in PEFT's `rank_pattern` and `alpha_pattern`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compile_and_serve.runtime.lora.errors import AdapterError

_LONGEST = 1000  # characters of an expression
_MOST = 256  # expressions that are no plain names
_PLAIN = re.compile(r"[\w.\-]+", re.ASCII)


class ModulePatterns:
    """The first key that matches a module's name, or the part of it behind a dot, gives the value.

    Keys are regular expressions; a dot in a plain name is a dot. They are matched by derivatives (`llguidance`), in time linear in the
    name: Python's `re` would take exponential time for some. So look-around and back-references are refused.
    Construction raises `AdapterError`. path: of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._path = path
        self._plain: dict[str, tuple[int, Any]] = {}  # name → (number of the key, value)
        self._others: list[tuple[int, Callable[[str], bool], Any]] = []
        for number, (key, value) in enumerate(values.items()):
            if _PLAIN.fullmatch(key):
                self._plain.setdefault(key, (number, value))
            elif len(self._others) == _MOST:
                raise AdapterError(f"{path} has more than {_MOST} patterns that are not plain names.")
            else:
                self._others.append((number, self._compile(key), value))

    def value(self, module: str, default: Any) -> Any:
        """The value for a module. Raises `AdapterError` for an expression that takes too many states."""
        parts = module.split(".")
        suffixes = (".".join(parts[first:]) for first in range(len(parts)))
        best, value = min(
            (self._plain[suffix] for suffix in suffixes if suffix in self._plain), key=lambda entry: entry[0], default=(None, default)
        )
        for number, matches, other in self._others:
            if best is not None and number > best:
                break
            if matches(module):
                return other
        return value

    def _compile(self, key: str) -> Callable[[str], bool]:
        from llguidance import LLMatcher, LLTokenizer  # most adapters have no patterns

        if len(key) > _LONGEST:
            raise AdapterError(f"{self._path} has a pattern of {len(key)} characters, but at most {_LONGEST} are possible.")
        expression = re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", key)
        expression = expression[1:] if expression.startswith("^") else rf"(.*\.)?({expression})"
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_regex(expression), log_level=0)

        def check() -> None:
            if matcher.is_error():
                reason = re.search(r"error: ([^\n]+)", matcher.get_error())
                raise AdapterError(
                    f"{self._path} has the pattern {key!r:.100}, which is not a regular expression without look-around and "
                    f"back-references, or takes too many states: {reason[1] if reason else 'it is not supported':.100}."
                )

        def matches(module: str) -> bool:
            name = list(module.encode())
            found = matcher.try_consume_tokens(name) == len(name) and bool(matcher.is_accepting())
            check()
            matcher.reset()
            return found

        check()
        return matches
