"""Chat templates of the usual shapes, written for the tests."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELPFUL = (  # as Qwen 2.5 and SmolLM 2 have it
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
)
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + LLAMA
_ALTERNATE = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
_TURN = (
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ prefix if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_2 = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}" + _ALTERNATE + _TURN
)
GEMMA_3 = (
    "<bos>{% set prefix = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set talk = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in talk %}" + _ALTERNATE + _TURN
)
GEMMA_4 = (  # functions are declared in the system's turn, and calls are part of the model's turn
    "<bos>{% set told = messages[0].role == 'system' %}{% if told or tools %}<|turn>system\n"
    "{% if told %}{{ messages[0].content | trim }}{% endif %}"
    "{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}{}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% for m in (messages[1:] if told else messages) %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{}<tool_call|>{% endfor %}"
    "{{ m.content | trim }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
MISTRAL = (  # a system message goes before the last question
    "<s>{% set told = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set talk = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in talk %}" + _ALTERNATE + "{% if m.role == 'user' %}[INST] "
    "{{ told if loop.last }}{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
PHI_4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
THINKING = (  # as Qwen 3 has it: earlier thoughts are left out
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_3_5 = (  # thinks unless told not to; thoughts before the last question are left out, and calls are in XML
    "{% set told = messages[0].role == 'system' %}{% if told or tools %}<|im_start|>system\n"
    "{% if tools %}# Tools\n<tools>{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}\n</tools>\n"
    "<tool_call>\n<function=example>\n<parameter=one>\nvalue\n</parameter>\n</function>\n</tool_call>\n{% endif %}"
    "{% if told %}{{ messages[0].content | trim }}{% endif %}<|im_end|>\n{% endif %}"
    "{% set last = namespace(at=-1) %}"
    "{% for m in messages if m.role == 'user' %}{% set last.at = messages.index(m) %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content | trim }}"
    "{% else %}<|im_start|>assistant\n{% set thought, said = m.reasoning_content or '', m.content %}"
    "{% if '</think>' in said %}{% set thought, said = said.split('</think>') %}{% endif %}"
    "{% if messages.index(m) > last.at %}<think>\n{{ thought | trim }}\n</think>\n\n{% endif %}{{ said | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}{% endif %}"
)
