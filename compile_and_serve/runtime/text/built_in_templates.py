"""Chat templates of models whose folders have none, by the `model_type` in config.json."""

from __future__ import annotations

from collections.abc import Mapping

# One message with an image and an instruction, or the whole prompt. The image's tokens come in when it is placed.
_OPENVLA = r"""
{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}
{{ raise_exception('OpenVLA reads one message of the user, with an image and an instruction.') }}
{%- endif -%}
{%- set found = namespace(text='') -%}
{%- if messages[0]['content'] is string -%}
{%- set found.text = messages[0]['content'] -%}
{%- else -%}
{%- for part in messages[0]['content'] -%}
{%- if part['type'] == 'text' -%}{%- set found.text = found.text + part['text'] -%}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- set text = found.text | trim -%}
{{- bos_token -}}
{{- text if text.startswith('In: ') else 'In: What action should the robot take to ' + text + '?\nOut:' -}}
"""

BUILT_IN_TEMPLATES: Mapping[str, str] = {"openvla": _OPENVLA}
