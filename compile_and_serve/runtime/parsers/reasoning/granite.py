"""Granite 3.2's reasoning, which begins and ends with English sentences."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser


class GraniteReasoningParser(ReasoningParser):
    """Here is my thought process: … Here is my response: …"""

    name = "granite"
    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")

    @classmethod
    def matches(cls, template: str) -> bool:
        return "<|start_of_role|>" in template and "Here is my thought process:" in template

    @classmethod
    def begins_with_reasoning(cls, prompt: str) -> bool:
        return cls.starts[0] in prompt or cls.starts[1] in prompt  # the system message asks for it
