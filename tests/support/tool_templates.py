"""Tool templates: chat templates of the Qwen, Qwen3-Coder, Llama and Hermes kind that show tools, written for
the tests. In: nothing. Out: their text."""

from __future__ import annotations

QWEN_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Functions\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>' }}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if m.reasoning_content is string %}
            {{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content }}
        {%- if m.tool_calls %}
            {%- for call in m.tool_calls %}
                {%- if (loop.first and m.content) or not loop.first %}{{- '\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

CODER_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n# Functions\n' }}
    {%- for tool in tools %}
        {{- '\n' }}{{- tool.function | tojson }}
    {%- endfor %}
    {{- '\n\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>' }}
    {{- '\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for name, value in call.function.arguments | items %}
            {%- set value = value if value is string else value | tojson %}
            {{- '<parameter=' + name + '>\n' + value + '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

LLAMA_TOOLS = r"""
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system_message + '<|eot_id|>' }}
{%- if tools_in_user_message and not tools is none %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {{- 'Answer with {"name": function name, "parameters": names and values}.\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}{{- '\n\n' }}
    {%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

HERMES_TOOLS = r"""
{%- macro kind(spec) %}
    {%- if spec.type == 'array' %}{{- 'list[' + kind(spec['items']) + ']' }}
    {%- elif spec.enum is defined %}{{- spec.enum | tojson }}
    {%- else %}{{- spec.type }}{%- endif %}
{%- endmacro %}
{{- bos_token + '<|im_start|>system\nFunctions: <tools>' }}
{%- for tool in tools or [] %}
    {%- set tool = tool.function if tool.function is defined else tool %}
    {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for name, spec in tool.parameters.properties | items %}
        {{- name + ': ' + kind(spec) }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}
    {{- ')' }}
    {%- if tool.description %}{{- ' - ' + tool.description }}{%- endif %}
    {{- '", "parameters": ' }}{{- tool.parameters | tojson }}{{- '}\n' }}
{%- endfor %}
{{- '</tools>\n<tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls is defined %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}
            {{- '\n<tool_call>\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>tool\n<tool_response>\n' }}
        {%- if m.name is defined %}{{- m.name + ': ' }}{%- endif %}
        {{- m.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

TEMPLATES = {"qwen": QWEN_TOOLS, "llama": LLAMA_TOOLS, "hermes": HERMES_TOOLS}
