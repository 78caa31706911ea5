"""The format of Seed-OSS."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.qwen3_coder import Qwen3CoderParser


class SeedOssParser(Qwen3CoderParser):
    """Qwen3-Coder's format in <seed:tool_call> and </seed:tool_call>."""

    name = "seed_oss"
    block = ("<seed:tool_call>", "</seed:tool_call>")
    openers = (block[0], Qwen3CoderParser.name_opener)
    markers = block
