"""Chat templates with what those of real models do, and tokenizers that carry them."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

# Tools in the system turn, calls in <tool_call> tags, results as user turns: a widespread form.
TOOL_TEMPLATE = """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- if tools or system %}
    {{- '<|im_start|>system\\n' + system }}
    {%- if tools %}
        {{- '\\nTools:' }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if message['role'] != 'system' %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message['content'] + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' }}
        {%- if message['role'] == 'assistant' %}
            {%- generation %}
                {{- message['content'] }}
                {%- for call in message['tool_calls'] %}
                    {{- '\\n' if message['content'] or not loop.first }}
                    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
                    {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
                {%- endfor %}
            {%- endgeneration %}
        {%- else %}
            {{- message['content'] }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""

# Tells the model what day it is, in the system turn.
DATED_TEMPLATE = """
{%- if date_string is not defined %}
    {%- set date_string = strftime_now('%d %b %Y %H:%M:%S.%f') %}
{%- endif %}
{{- '<|im_start|>system\\nToday: ' + date_string + '<|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def tokenizer_with(model_dir: Path, template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    """The tokenizer of `model_dir` as transformers loads it, with another chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    tokenizer.chat_template = template
    return tokenizer  # type: ignore[no-any-return]
