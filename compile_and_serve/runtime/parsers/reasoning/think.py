"""Reasoning between <think> and </think>, or the same tags of another name."""

from __future__ import annotations

from typing import ClassVar

from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser


class ThinkParser(ReasoningParser):
    """The output is reasoning only after <think>, which the prompt may end with."""

    starts = ("<think>",)
    ends = ("</think>",)
    markers: ClassVar[tuple[str, ...]] = starts + ends


class Qwen3Parser(ThinkParser):
    name = "qwen3"

    @classmethod
    def matches(cls, template: str) -> bool:
        has_thinking = "enable_thinking" in template or "<|im_start|>assistant\\n<think>" in template
        return "<|im_start|>" in template and has_thinking


class Glm45Parser(ThinkParser):
    name = "glm45"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[gMASK]<sop>" in template and "<think>" in template


class SeedOssParser(ThinkParser):
    name = "seed_oss"
    starts = ("<seed:think>",)
    ends = ("</seed:think>",)
    markers = starts + ends

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<seed:think>" in template


class DeepseekR1Parser(ThinkParser):
    """The output begins with reasoning, also where the model leaves <think> out."""

    name = "deepseek_r1"
    opened_by_default = True

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<｜Assistant｜>" in template and "</think>" in template


class KimiK2Parser(DeepseekR1Parser):
    """A section of tool calls ends the reasoning, too."""

    name = "kimi_k2"
    interrupts = ("<|tool_calls_section_begin|>",)
    markers = (*DeepseekR1Parser.markers, *interrupts)

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|im_middle|>" in template and "</think>" in template


class MinimaxM2Parser(DeepseekR1Parser):
    name = "minimax_m2"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "]~b]" in template and "<think>" in template


class Olmo3Parser(DeepseekR1Parser):
    """Not detected: its templates are those of `qwen3`, whose reasoning is the same."""

    name = "olmo3"

    @classmethod
    def matches(cls, template: str) -> bool:
        return False


class Step3Parser(DeepseekR1Parser):
    name = "step3"

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<｜tool_calls_begin｜>" in template


class MistralParser(ThinkParser):
    name = "mistral"
    starts = ("[THINK]",)
    ends = ("[/THINK]",)
    markers = starts + ends

    @classmethod
    def matches(cls, template: str) -> bool:
        return "[THINK]" in template


THINK_PARSERS: tuple[type[ReasoningParser], ...] = (
    DeepseekR1Parser,
    Qwen3Parser,
    Glm45Parser,
    SeedOssParser,
    KimiK2Parser,
    MinimaxM2Parser,
    MistralParser,
    Olmo3Parser,
    Step3Parser,
)
