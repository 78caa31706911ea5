"""Parsers by name, by the chat template that uses their format, and from installed packages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from inspect import isabstract
from typing import Any, TypeVar

from compile_and_serve.plugins import declared_plugins, load_plugin, load_plugins
from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser
from compile_and_serve.runtime.parsers.reasoning.granite import GraniteReasoningParser
from compile_and_serve.runtime.parsers.reasoning.harmony import HarmonyParser
from compile_and_serve.runtime.parsers.reasoning.hunyuan_a13b import HunyuanA13bParser as HunyuanReasoningParser
from compile_and_serve.runtime.parsers.reasoning.think import THINK_PARSERS
from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.parsers.tools.deepseek_v3 import DeepseekV3Parser
from compile_and_serve.runtime.parsers.tools.glm45 import Glm45Parser
from compile_and_serve.runtime.parsers.tools.granite import GraniteParser
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser
from compile_and_serve.runtime.parsers.tools.hunyuan_a13b import HunyuanA13bParser
from compile_and_serve.runtime.parsers.tools.internlm import InternlmParser
from compile_and_serve.runtime.parsers.tools.kimi_k2 import KimiK2Parser
from compile_and_serve.runtime.parsers.tools.lfm2 import Lfm2Parser
from compile_and_serve.runtime.parsers.tools.llama3_json import Llama3JsonParser
from compile_and_serve.runtime.parsers.tools.minimax_m2 import MinimaxM2Parser
from compile_and_serve.runtime.parsers.tools.mistral import MistralParser
from compile_and_serve.runtime.parsers.tools.olmo3 import Olmo3Parser
from compile_and_serve.runtime.parsers.tools.phi4 import Phi4Parser
from compile_and_serve.runtime.parsers.tools.pythonic import PythonicParser
from compile_and_serve.runtime.parsers.tools.qwen3_coder import Qwen3CoderParser
from compile_and_serve.runtime.parsers.tools.seed_oss import SeedOssParser
from compile_and_serve.runtime.parsers.tools.step3 import Step3Parser
from compile_and_serve.runtime.parsers.tools.xlam import XlamParser

TOOL_PARSERS: tuple[type[ToolParser], ...] = (
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    Qwen3CoderParser,
    DeepseekV3Parser,
    PythonicParser,
    GraniteParser,
    Phi4Parser,
    Glm45Parser,
    HunyuanA13bParser,
    InternlmParser,
    KimiK2Parser,
    Lfm2Parser,
    MinimaxM2Parser,
    Olmo3Parser,
    SeedOssParser,
    Step3Parser,
    XlamParser,
)
REASONING_PARSERS: tuple[type[ReasoningParser], ...] = (*THINK_PARSERS, GraniteReasoningParser, HarmonyParser, HunyuanReasoningParser)
# vLLM's other names of the same formats, by kind.
_ALIASES = {
    "tool": {
        "deepseek_v31": "deepseek_v3",
        "glm47": "glm45",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "mimo": "qwen3_coder",
        "phi4_mini_json": "phi4",
        "qwen3_xml": "qwen3_coder",
        "step3p5": "qwen3_coder",
    },
    "reasoning": {
        "deepseek_v3": "qwen3",  # V3.1: the prompt ends with <think> where the model is to think
        "gpt_oss": "gpt-oss",
        "mimo": "qwen3",
        "nemotron_v3": "deepseek_r1",
        "openai_gptoss": "gpt-oss",
        "step3p5": "step3",
    },
}
READ_BY_REASONING = ("openai",)  # vLLM's tool parser for gpt-oss, whose calls the reasoning parser "gpt-oss" reads

P = TypeVar("P", bound=ToolParser | ReasoningParser)


class ParserError(ValueError):
    """There is no such parser. The message is one sentence."""


def tool_parser(name: str) -> type[ToolParser]:
    """The class of a name, of a plug-in, or of "package.module:Class". Raises `ParserError` or `PluginError`."""
    return _find(name, TOOL_PARSERS, ToolParser, "tool")


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """`tool_parser` for reasoning parsers."""
    return _find(name, REASONING_PARSERS, ReasoningParser, "reasoning")


def check_names(tools: str | None, reasoning: str | None) -> None:
    """Raise `ParserError` or `PluginError` if one of the parsers does not exist. None is no parser."""
    if tools is not None and tools not in READ_BY_REASONING:
        tool_parser(tools)
    if reasoning is not None:
        reasoning_parser(reasoning)


def detect_tool_parser(templates: Iterable[str]) -> type[ToolParser] | None:
    """The parser whose format the chat templates use; None if it is none, or more than one. Plug-ins are asked first."""
    return _detect(templates, TOOL_PARSERS, ToolParser)


def detect_reasoning_parser(templates: Iterable[str]) -> type[ReasoningParser] | None:
    """`detect_tool_parser` for reasoning parsers."""
    return _detect(templates, REASONING_PARSERS, ReasoningParser)


def _detect(templates: Iterable[str], known: Sequence[type[P]], base: type[Any]) -> type[P] | None:
    templates = list(templates)
    for parsers in (_plugins(base).values(), known):
        found = {parser for template in templates for parser in parsers if parser.matches(template)}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _plugins(base: type[Any]) -> dict[str, type[Any]]:
    """The plug-ins in `compile_and_serve.parsers` that derive from `base`, by name. Those of the other kind are checked as well."""
    found = load_plugins("parsers")
    for name, parser in found.items():
        if not _is_parser(parser, ToolParser) and not _is_parser(parser, ReasoningParser):
            raise ParserError(f"The plug-in {name!r} in compile_and_serve.parsers is no parser: {_advice(ToolParser)}")
    return {name: parser for name, parser in found.items() if issubclass(parser, base)}


def _find(name: str, known: Sequence[type[P]], base: type[Any], kind: str) -> type[P]:
    wanted = _ALIASES[kind].get(name, name)
    by_name: dict[str, type[P]] = {parser.name: parser for parser in known}
    if wanted in by_name:
        return by_name[wanted]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except Exception as error:  # the user's module may raise anything
            raise ParserError(f"The {kind} parser {name!r} cannot be imported: {type(error).__name__}: {error}.") from error
    else:
        by_name |= _plugins(base)
        declared = declared_plugins(f"{kind}_parsers")
        if name not in by_name and name not in declared:
            names = ", ".join(sorted({*by_name, *declared}))
            raise ParserError(f"There is no {kind} parser {name!r}: expected {names}, or package.module:Class.")
        found = by_name[name] if name in by_name else load_plugin(declared[name])
    if not _is_parser(found, base):
        raise ParserError(f"{name} is no {kind} parser: {_advice(base)}")
    return found


def _is_parser(found: object, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base) and not isabstract(found)


def _advice(base: type) -> str:
    return f"derive it from {base.__module__}.{base.__name__} and implement the abstract methods."
