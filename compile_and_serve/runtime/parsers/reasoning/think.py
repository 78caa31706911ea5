"""Reasoning between <think> and </think>: DeepSeek-R1 and Qwen3."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser


class DeepseekR1Parser(ReasoningParser):
    """The output begins with reasoning, also where the model leaves <think> out."""

    name = "deepseek_r1"
    starts = ("<think>",)
    ends = ("</think>",)
    markers = starts + ends
    opened_by_default = True

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<｜Assistant｜>" in template and "</think>" in template


class Qwen3Parser(ReasoningParser):
    """The output is reasoning only after <think>, which the prompt may end with."""

    name = "qwen3"
    starts = ("<think>",)
    ends = ("</think>",)
    markers = starts + ends

    @classmethod
    def matches(cls, template: str) -> bool:
        has_thinking = "enable_thinking" in template or "<|im_start|>assistant\\n<think>" in template
        return "<|im_start|>" in template and has_thinking
