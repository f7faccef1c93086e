"""Chat templates that can be chosen by name; the formats are facts from the models' own files."""

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {{- message.content | trim -}}
    {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# Gemma knows no system role: the system text leads the first turn.
GEMMA = """\
{{- bos_token -}}
{%- set lead = namespace(text='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set lead.text = lead.text + message.content | trim + '\\n\\n' -%}
    {%- else -%}
        {%- set role = 'model' if message.role == 'assistant' else message.role -%}
        {{- '<start_of_turn>' + role + '\\n' -}}
        {{- lead.text + message.content | trim -}}
        {{- '<end_of_turn>\\n' -}}
        {%- set lead.text = '' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

# The system text leads the next user turn.
MISTRAL = """\
{{- bos_token -}}
{%- set lead = namespace(text='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set lead.text = lead.text + message.content + '\\n\\n' -%}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' + message.content | trim + eos_token -}}
    {%- else -%}
        {{- '[INST] ' + lead.text + message.content + ' [/INST]' -}}
        {%- set lead.text = '' -%}
    {%- endif -%}
{%- endfor -%}
"""

# For base models, which know no special tokens: a dialogue as it would stand in a text.
PLAIN = """\
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- message.content + '\\n\\n' -}}
    {%- else -%}
        {{- message.role | capitalize + ': ' + message.content + '\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant:' -}}
{%- endif -%}
"""

BUILTIN_TEMPLATES = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "plain": PLAIN,
}
DEFAULT_TEMPLATE = "plain"
"""Taken for a model whose file has no template."""
