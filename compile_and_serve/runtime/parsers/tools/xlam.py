"""The formats of Salesforce's xLAM."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.tools.json_calls import JsonCallsParser


class XlamParser(JsonCallsParser):
    """The output is [{"name": …, "arguments": {…}}, …], alone, in a code block, in <tool_call>, or after [TOOL_CALLS] or </think>.

    Only the two markers of calls say that it is one; elsewhere the tools must be known.
    """

    name = "xlam"
    list_opener = "["
    separator = ", "
    openers = ("[TOOL_CALLS]", "<tool_call>", "```json", "```\n", "</think>")
    closers = ("```", "</tool_call>")
    markers = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "</think>")
    bare = "["

    def _opened(self, marker: str) -> None:
        super()._opened(marker)
        self._only_known = marker not in self.markers[:2]
