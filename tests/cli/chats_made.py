"""The templates that Mistral and Gemma come with, and what transformers makes of conversations with
them."""

import os
import shutil

import jinja2
import transformers

from tokenizers_made import write


# Instruct v0.1 when it came out, and v0.3; then Mixtral 8x22B.
EARLY = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}ANSWER"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MIXTRAL = EARLY.replace("'[INST] '", "' [INST] '").replace("{{ bos_token }}", "{{bos_token}}")

# Instruct v0.1 and v0.2 now.
FIRST = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        ANSWER
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial one!") }}
    {%- endif %}
{%- endfor %}
"""

# Instruct v0.3 now, with the parts for tools, of which some are left out here.
LAST = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{#- This block checks that the roles alternate; it isn't about tools #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results") %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {{- "}}" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
            {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        ANSWER
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- "[TOOL_RESULTS] {\\"content\\": " + message.content|string + ", " }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial one!") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

# The templates, and the same ones with "generation" around what is learned.
LEARNED = "{% generation %}ANSWER{% endgeneration %}"


def answers(template, answer, learned=None):
    """`learned`: if a part of the answer is not, the code that says which."""
    learned = learned or LEARNED.replace("ANSWER", answer)
    return template.replace("ANSWER", answer), template.replace("ANSWER", learned)


IF_MODEL = "{% if role == 'model' %}"
GEMMA2_TURN = "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
GEMMA2_LEARNED = (
    "{{ '<start_of_turn>' + role + '\\n' }}" + IF_MODEL + "{% generation %}{{ message['content'] | trim + "
    "'<end_of_turn>' }}{% endgeneration %}{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}"
    "{{ '\\n' }}"
)
GEMMA3_MIDDLE = "    {%- if message['content'] is string -%}"
GEMMA3_END = "    {{ '<end_of_turn>\n' }}"
GEMMA3_LEARNED = GEMMA3.replace(
    GEMMA3_MIDDLE,
    "{%- if role == 'model' -%}{%- generation -%}{{ message['content'] | trim + '<end_of_turn>' }}"
    "{%- endgeneration -%}{%- elif message['content'] is string -%}",
).replace(GEMMA3_END, "{%- if role != 'model' -%}{{ '<end_of_turn>' }}{%- endif -%}{{ '\n' }}")

SPACE_AFTER = "{{ message['content'] + eos_token + ' ' }}"
LEARNED_BEFORE = LEARNED.replace("ANSWER", "{{ message['content'] + eos_token }}") + "{{ ' ' }}"

FAMILIES = {
    "mistral-early": ("llama2", *answers(EARLY, SPACE_AFTER, LEARNED_BEFORE)),
    "mistral-early-3": ("mistral", *answers(EARLY, "{{ message['content'] + eos_token}}")),
    "mixtral": ("llama2", *answers(MIXTRAL, "{{ ' ' + message['content'] + ' ' + eos_token}}")),
    "mistral-1": ("llama2", *answers(FIRST, '{{- " " + message["content"] + eos_token}}')),
    "mistral-1-first": ("mistral", *answers(FIRST, "{{- ' ' + message['content'] + eos_token}}")),
    "mistral-1-always": ("always", *answers(FIRST, "{{- ' ' + message['content'] + eos_token}}")),
    "mistral-3": ("mistral", *answers(LAST, '{{- " " + message["content"]|trim + eos_token}}')),
    "mistral-3-prepend": ("llama2", *answers(LAST, '{{- " " + message["content"]|trim + eos_token}}')),
    "gemma-2": ("gemma", GEMMA2, GEMMA2.replace(GEMMA2_TURN, GEMMA2_LEARNED)),
    "gemma-3": ("gemma", GEMMA3, GEMMA3_LEARNED),
}

CHATS = [
    [("user", "Hello!"), ("assistant", "Hi, how are you?")],
    [("user", "1 + 1?\n\nThink."), ("assistant", "2"), ("user", "Why?"), ("assistant", "é 日本\n")],
    [("user", " \n\nHi\u3000\n"), ("assistant", "\u00a0 \u3042 def f():\n    pass\n\n")],
    [("system", "Be brief. "), ("user", "Hi "), ("assistant", "No.")],
    [("system", " Be brief."), ("user", "Hi"), ("assistant", "No."), ("user", "\tWhy? ")],
    [("user", "Use <s> and </s> <tool>"), ("assistant", "the <unk> [INST] <end_of_turn>"), ("user", "")],
    [("user", "a"), ("system", "b"), ("assistant", "c")],
    [("assistant", "I begin."), ("user", "b")],
    [("user", "a"), ("user", "b"), ("assistant", "c")],
    [("user", "a"), ("assistant", "b"), ("assistant", "c")],
]


def write_families(out):
    for name, (of, template, marked) in FAMILIES.items():
        folder = f"{out}/chat-{name}"
        os.makedirs(folder)
        shutil.copy(f"{out}/{of}/tokenizer.json", folder)
        names = ("<bos>", "<eos>") if of == "gemma" else ("<s>", "</s>")
        config = {"bos_token": names[0], "eos_token": {"content": names[1]}, "chat_template": template}
        write(f"{folder}/tokenizer_config.json", config)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", bos_token=names[0], eos_token=names[1]
        )
        write(f"{folder}/chats.json", [conversation(tokenizer, template, marked, chat) for chat in CHATS])


def conversation(tokenizer, template, marked, chat):
    messages = [{"role": role, "content": content} for role, content in chat]
    result = {"messages": messages}
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except jinja2.exceptions.TemplateError as error:
        return {**result, "refused": str(error)}
    if any(message["content"].strip() not in text for message in messages):
        return {**result, "refused": "a message is left out"}
    made = tokenizer.apply_chat_template(
        messages, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    same = tokenizer.apply_chat_template(messages, chat_template=marked, tokenize=False)
    assert same == text, (same, text)
    return {**result, "ids": made["input_ids"], "learned": made["assistant_masks"]}
