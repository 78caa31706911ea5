"""Parsers by name, by chat template, and from packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from compile_and_serve.plugins import PluginError
from compile_and_serve.runtime.parsers.reasoning.harmony import HarmonyParser
from compile_and_serve.runtime.parsers.reasoning.think import Qwen3Parser
from compile_and_serve.runtime.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserError,
    check_names,
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_parser,
    tool_parser,
)
from compile_and_serve.runtime.parsers.selection import select_parsers
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser
from compile_and_serve.serve.served_parsers import served_parsers
from compile_and_serve.serve.settings import ServerSettings

# The parts of the families' templates that tell their formats.
TOOL_TEMPLATES = {
    "hermes": '{{ tools }}<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>',
    "llama3_json": '<|start_header_id|>{"name": function name, "parameters": dictionary of argument name and its value}.',
    "mistral": "[AVAILABLE_TOOLS][TOOL_CALLS]",
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call> arguments",
    "deepseek_v3": "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "granite": "<|start_of_role|>assistant<|end_of_role|><|tool_call|>",
    "phi4": "<|tool|>{{ tools }}<|/tool|>",
    "glm45": "[gMASK]<sop>{{ tools }}<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key> arguments </tool_call>",
    "hunyuan_a13b": "<|startoftext|><tool_calls>[{{ arguments }}]</tool_calls>",
    "internlm": "<|im_start|>assistant<|action_start|><|plugin|>",
    "kimi_k2": "<|im_system|>tool_declare<|im_middle|><|tool_calls_section_begin|>",
    "lfm2": "List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>",
    "minimax_m2": "]~b]ai{{ tools }}<minimax:tool_call>\\n<invoke name=",
    "olmo3": "<functions>{{ tools }}</functions><function_calls>",
    "seed_oss": "<seed:bos>{{ tools }}<seed:tool_call>\\n<function=f>\\n<parameter=p></parameter>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>",
}
UNDETECTED_TOOL_PARSERS = {"xlam"}  # no text of a template says that a model answers in this format
REASONING_TEMPLATES = {
    "deepseek_r1": "<｜Assistant｜>{% if '</think>' in content %}",
    "qwen3": "<|im_start|>assistant\\n{% if enable_thinking %}<think>{% endif %}",
    "granite": "<|start_of_role|>Here is my thought process:",
    "gpt-oss": "<|channel|>analysis<|message|>",
    "glm45": "[gMASK]<sop>{{ '\\n<think></think>' if not enable_thinking }}",
    "seed_oss": "<seed:bos>assistant<seed:think>",
    "kimi_k2": "<|im_assistant|>assistant<|im_middle|><think></think>",
    "minimax_m2": "]~b]ai\\n<think>\\n",
    "mistral": "[SYSTEM_PROMPT]{{ m }}[/SYSTEM_PROMPT][THINK]",
    "step3": "<｜tool_calls_begin｜><think>\\n",
    "hunyuan_a13b": "{% set content = content.split('<answer>') %}</think>",
}
UNDETECTED_REASONING_PARSERS = {"olmo3"}  # its templates are those of qwen3


def test_every_parser_is_found_by_name_and_by_template() -> None:
    assert {parser.name for parser in TOOL_PARSERS} == set(TOOL_TEMPLATES) | UNDETECTED_TOOL_PARSERS
    assert {parser.name for parser in REASONING_PARSERS} == set(REASONING_TEMPLATES) | UNDETECTED_REASONING_PARSERS
    for name, template in TOOL_TEMPLATES.items():
        found = detect_tool_parser([template])
        assert found is tool_parser(name)
        assert tool_parser(name).name == name
    for name, template in REASONING_TEMPLATES.items():
        assert detect_reasoning_parser([template]) is reasoning_parser(name)
    assert tool_parser("phi4_mini_json").name == "phi4"
    for name in ("qwen3_xml", "llama4_json", "llama4_pythonic", "glm47", "step3p5", "mimo"):
        assert tool_parser(name) in TOOL_PARSERS
    for name in ("deepseek_v3", "nemotron_v3", "step3p5", "openai_gptoss"):
        assert reasoning_parser(name) in REASONING_PARSERS


def test_vllms_parser_of_gpt_oss_is_its_reasoning_parser() -> None:
    check_names("openai", "openai_gptoss")
    for reasoning in ("openai_gptoss", None):
        found = select_parsers(None, chat_template=TOOL_TEMPLATES["hermes"], tools="openai", reasoning=reasoning)
        assert (found.tools, found.reasoning) == (None, HarmonyParser)
        settings = ServerSettings(served_model_names=("x",), tool_call_parser="openai", enable_auto_tool_choice=True)
        assert served_parsers(None, settings).reasoning is HarmonyParser


def test_ambiguous_and_unknown_templates_have_no_parser() -> None:
    assert detect_tool_parser([TOOL_TEMPLATES["hermes"], TOOL_TEMPLATES["mistral"]]) is None
    assert detect_tool_parser(["{{ messages }}"]) is None
    assert detect_reasoning_parser([]) is None


def test_plug_in_is_loaded_only_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_parsers.py").write_text(
        "from compile_and_serve.runtime.parsers.tools.hermes import HermesParser\nclass Mine(HermesParser):\n    name = 'mine'\n"
        "from compile_and_serve.runtime.parsers.tools.base import ToolParser\nclass Abstract(ToolParser): pass\n"
    )
    (tmp_path / "my_broken.py").write_text("raise SystemError('loaded')\n")
    info = tmp_path / "my_parsers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parsers\nVersion: 1\n")
    points = "[compile_and_serve.tool_parsers]\nmine = my_parsers:Mine\nbroken = my_broken:X\nnone = my_parsers:HermesParser.name\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    tool_parser("hermes")
    assert "my_parsers" not in sys.modules
    assert issubclass(tool_parser("mine"), HermesParser)
    assert tool_parser("my_parsers:Mine").name == "mine"
    assert "my_broken" not in sys.modules
    for name in ("broken", "none", "my_parsers:Absent", "my_parsers:Abstract"):
        with pytest.raises(PluginError if name == "broken" else ParserError, match=name):
            tool_parser(name)
    with pytest.raises(ParserError, match="no tool parser 'absent': expected broken, deepseek_v3, glm45"):
        tool_parser("absent")
    assert reasoning_parser("qwen3") is Qwen3Parser
