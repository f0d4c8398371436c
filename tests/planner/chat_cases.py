"""Sample conversations, chat templates in the style of model families, and their tokenizer."""

import json
import re
from pathlib import Path

from tokenizer_cases import byte_level_bpe
from tokenizers import AddedToken

from omnibal.data.sample import Sample, Turn

FOLDER = Path(__file__).parent / "chat_templates"
# In the style of the families' templates, each with that family's peculiarities.
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
TEMPLATES["thinking at once"] = TEMPLATES["thinking"].replace(
    r"prompt -%}{{- '<|im_start|>assistant\n'", r"prompt -%}{{- '<|im_start|>assistant\n<think>\n'"
)
# As Qwen3.5's: texts without outer spaces, and a block of thoughts in every last answer.
TEMPLATES["thinking always"] = (
    TEMPLATES["thinking at once"]
    .replace("m.content -%}", "m.content | trim -%}")
    .replace("'\\n' + m.content + '<|im_end|>", "'\\n' + m.content | trim + '<|im_end|>")
    .replace(" and (loop.last or thought)", "")
)
TEMPLATES["media"] = TEMPLATES["chatml"].replace(
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
)
TEMPLATES["tiles"] = (
    TEMPLATES["chatml"]
    .replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
    .replace("<|vision_start|><|video_pad|><|vision_end|>", "<video>\n")
)
SPECIAL = sorted(
    set(re.findall(r"<\|[a-z_]+\|>|<[a-z]+_of_[a-z]+>|\[gMASK\]", "".join(TEMPLATES.values())))
    | {"<|user|>", "<|assistant|>", "<|system|>", "<bos>", "<eos>", "<image_soft_token>"}
    | {"<img>", "<IMG_CONTEXT>", "</img>"}
)
WORDS = "What is the sum of two numbers? \u4f60\u597d \n\n a  b \U0001f600 system user assistant"


def write_templated(folder: Path, template: str) -> Path:
    """Write a byte-level tokenizer and a chat template."""
    bpe = byte_level_bpe([WORDS])
    bpe.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIAL])
    bpe.add_tokens(["<think>", "</think>", "<tool_call>"])
    bpe.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def sample_of(*turns: tuple[str, str], **fields) -> Sample:
    """Return a conversation of (question, answer) turns, with one image per `<image>`."""
    images = sum(question.count("<image>") for question, _ in turns)
    return Sample(
        identity="x",
        source="x",
        where="x.jsonl: line 1",
        images=tuple(f"{k}.png" for k in range(images)),
        turns=tuple(Turn(question, answer, None) for question, answer in turns),
        **fields,
    )
