"""Files of Transformers' InternVLProcessor, for a model that came in InternVL's own format."""

import json

from megatron.vlm.conversion.qwen_files import PROCESSOR_FILE
from omnibal.base.files import read_json_model
from omnibal.data.chat import chatml_texts
from omnibal.data.tokenizer import CONFIG_FILE, FAST_FILE, TEMPLATE_FILE, Tokenizer
from omnibal.model.config import ModelConfig

_PIECES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_TEMPLATE = """\
{%- if SYSTEM and (not messages or messages[0].role != 'system') -%}
{{ '<|im_start|>system\\n' ~ SYSTEM ~ '<|im_end|>' ~ LINE_END }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{ '<IMG_CONTEXT>\\n' }}
{%- elif part.type == 'video' -%}
{{ '<video>\\n' }}
{%- elif part.type == 'text' -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>' ~ LINE_END }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
"""Training's format of messages. The processor replaces <IMG_CONTEXT> by an image's tokens."""


def internvl_processor_files(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the settings of the processor and the tokenizer, and a missing ChatML template
    of a tokenizer.json."""
    settings, path = dict[str, object](), tokenizer.path.with_name(CONFIG_FILE)
    if path.is_file():
        settings = read_json_model(dict[str, object], path, "restore the tokenizer's own")
    known = {**_PIECES, **{name: settings[name] for name in _PIECES if name in settings}}
    more = settings.get("extra_special_tokens")
    extra = {**known, **(more if isinstance(more, dict) else {})}
    settings |= {**known, "extra_special_tokens": extra, "processor_class": "InternVLProcessor"}
    processor = {
        "image_seq_length": model.vision.tokens_per_item,
        "processor_class": "InternVLProcessor",
    }
    files = {CONFIG_FILE: _json(settings), PROCESSOR_FILE: _json(processor)}
    texts = chatml_texts(model)
    if tokenizer.template is None and texts is not None and tokenizer.path.name == FAST_FILE:
        message, line_end = texts
        template = _TEMPLATE.replace("SYSTEM", json.dumps(message, ensure_ascii=False))
        files[TEMPLATE_FILE] = template.replace("LINE_END", json.dumps(line_end))
    return files


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
