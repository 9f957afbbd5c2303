"""Built-in chat templates (Jinja, as Hugging Face tokenizers carry them), for ``--conv-template``."""

from __future__ import annotations

from kvq.errors import ConfigError

#: The name that stands for the template inside the checkpoint.
CHECKPOINT = "checkpoint"

CONV_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama-2": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}"
        "{% elif message['role'] == 'user' %}"
        "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}"
        "{{ '[INST] <<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n'"
        " + message['content'] + ' [/INST]' }}"
        "{% else %}{{ (bos_token if loop.index0 > 1 else '') + '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% endif %}"
        "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "llama-3": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
        "{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}"
        "{% elif message['role'] == 'user' %}"
        "{{ '[INST] ' + (messages[0]['content'] + '\\n\\n' if loop.index0 == 1"
        " and messages[0]['role'] == 'system' else '') + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}"
        "{% else %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n'"
        " + (messages[0]['content'] + '\\n\\n' if loop.index0 == 1 and messages[0]['role'] == 'system'"
        " else '') + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "phi-3": (
        "{{ bos_token }}"
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "plain": "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
}


def built_in_template(name: str) -> str:
    """The Jinja text of a built-in template.

    Raises
    ------
    ConfigError
        If there is none of this name.
    """
    if name not in CONV_TEMPLATES:
        raise ConfigError(
            f"unknown --conv-template {name!r}: use one of {', '.join(CONV_TEMPLATES)}, "
            f"or {CHECKPOINT} for the checkpoint's own"
        )
    return CONV_TEMPLATES[name]
