"""Chat templates that come with tokenizers, beside Transformers' apply_chat_template."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.chat import (
    answer_end,
    check_tokenizer,
    encode_prompt,
    encode_sample,
    expected_answer,
    text_sha256,
)
from omnibal.data.native_resolution import image_segments
from omnibal.data.own_template import own_template
from omnibal.data.sample import Sample, Turn, Video
from omnibal.data.scan import scan_lengths
from omnibal.data.stored_files import ImageFile
from omnibal.data.tokenizer import open_tokenizer, tokenizer_files
from omnibal.families.hub import read_hub_config
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.encoders import ImagesEncoder, TilesEncoder, TilingConfig, VideoConfig

# In the manner of the families' templates; each has what is special about them.
CHATML = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
<|im_start|>system\nBe of use.<|im_end|>\n
{%- endif -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
THINKING = """\
{%- set ns = namespace(last=0) -%}
{%- if tools -%}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set content = m.content -%}{%- set thought = '' -%}
{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + PROMPTED -}}{%- endif -%}
"""
TRIMMED = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- raise_exception('no system message') -}}{%- endif -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\n' -}}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<start_of_image>' -}}
{%- else -%}{{- part.text | trim -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""
UNCLOSED = """\
[gMASK]
{%- for message in messages -%}
{{- '<|' + message.role + '|>\n' -}}
{%- if message.role == 'assistant' -%}{{- '<think></think>\n' + message.content -}}
{%- elif message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
"""
MEDIA = CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>",
    "<|media_start|>image<|media_content|><|media_pad|><|media_end|>")  # fmt: skip
MARKED = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{% generation %}{{- m.content + '<|im_end|>' -}}{% endgeneration %}{{- '\n' -}}
{%- else -%}{{- m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
TEMPLATES = {
    "chatml": CHATML,
    "thinking": THINKING.replace("PROMPTED", "''"),
    "thinking at once": THINKING.replace("PROMPTED", r"'<think>\n'"),
    "trimmed": TRIMMED,
    "unclosed": UNCLOSED,
    "media": MEDIA,
    "marked": MARKED,
}
SHOWING = ("chatml", "trimmed", "unclosed", "media")
SPECIAL = sorted(
    set(re.findall(r"<\|[a-z_]+\|>|<[a-z]+_of_[a-z]+>|\[gMASK\]", "".join(TEMPLATES.values())))
    | {"<|user|>", "<|assistant|>", "<|system|>", "<bos>", "<eos>", "<image_soft_token>"}
)
WORDS = "What is the sum of two numbers? \u4f60\u597d \n\n a  b \U0001f600 system user assistant"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder with a byte-level tokenizer and a chat template, by the template's name."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([WORDS] * 3, trainer)
    bpe.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIAL])
    bpe.add_tokens(["<think>", "</think>", "<tool_call>"])
    found = {}
    for name, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        bpe.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<bos>", "eos_token": "<eos>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "chat_template.jinja").write_text(template)
        found[name] = folder
    return found


def model_of(template="tokenizer", **changes) -> ModelConfig:
    language = LanguageConfig(
        layers=1, hidden_size=8, heads=1, kv_heads=1, ffn_hidden_size=8, vocab_size=1024
    )
    vision = TilesEncoder(
        layers=1, hidden_size=8, heads=1, ffn_hidden_size=8, normalization="LayerNorm",
        qkv_bias=True, qk_norm=False, image_size=28, patch_size=14, tiling=TilingConfig(),
    )  # fmt: skip
    return ModelConfig(
        name="m", encoders={"vision": vision}, language=language, chat_template=template, **changes
    )


def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>",
        chat_template=(folder / "chat_template.jinja").read_text(),
    )  # fmt: skip


def sample_of(*turns: tuple[str, str], images: int = 0, **fields) -> Sample:
    return Sample(
        identity="s", source="s", where="a.jsonl: line 1",
        images=tuple(ImageFile(Path(f"{k}.png")) for k in range(images)),
        turns=tuple(Turn(question, answer, None) for question, answer in turns), **fields,
    )  # fmt: skip


def texts(draw: random.Random, count: int) -> list[str]:
    words = [*WORDS.split(" "), "\n", " ", "1"]
    return [" ".join(draw.choices(words, k=draw.randint(1, 6))) for _ in range(count)]


def random_sample(seed: int, template: str) -> Sample:
    """A conversation of up to three turns, with up to two images where the template shows any."""
    draw = random.Random(seed)
    turns = [tuple(texts(draw, 2)) for _ in range(draw.randint(1, 3))]
    images = draw.randint(0, 2) if template in SHOWING else 0
    for _ in range(images):
        place = draw.randrange(len(turns))
        question, answer = turns[place]
        cut = draw.randint(0, len(question))
        turns[place] = (f"{question[:cut].replace('<', '')}<image>{question[cut:]}", answer)
        turns[place] = (turns[place][0].replace("<im<image>age>", "<image><image>"), answer)
    turns = [(q, a) for q, a in turns]
    images = sum(question.count("<image>") for question, _ in turns)
    system = draw.choice([None, "Be brief."]) if template not in ("trimmed",) else None
    return sample_of(*turns, images=images, system=system)


def messages_of(sample: Sample, before: int | None = None) -> list[dict]:
    """Messages as apply_chat_template takes them, up to the question of a turn."""
    found = [] if sample.system is None else [{"role": "system", "content": sample.system}]
    for turn in sample.turns if before is None else sample.turns[: before + 1]:
        content: object = turn.question
        if "<image>" in turn.question:
            content = [
                {"type": "image"} if piece == "<image>" else {"type": "text", "text": piece}
                for piece in re.split("(<image>)", turn.question)
                if piece
            ]
        found += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": turn.answer},
        ]
    return found if before is None else found[:-1]


def expanded(text: str, counts: list[int], template: str) -> str:
    """As the families' processors expand what their templates write for an image."""
    forms = {
        "chatml": ("<|image_pad|>", "", "<|image_pad|>", ""),
        "media": ("<|media_pad|>", "", "<|media_pad|>", ""),
        "unclosed": ("<|image|>", "", "<|image|>", ""),
        "trimmed": (
            "<start_of_image>", "\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n"
        ),
    }  # fmt: skip
    written, before, repeated, after = forms.get(template, ("<|image_pad|>", "", "", ""))
    first, *others = text.split(written)
    for count, rest in zip(counts, others, strict=True):
        first += before + repeated * count + after + rest
    return first


@pytest.mark.parametrize("template", TEMPLATES)
def test_token_ids_are_those_of_apply_chat_template(folders, template):
    """Prevents a conversation, or a prompt of it, that the model would not have been given."""
    tokenizer, theirs = open_tokenizer(folders[template]), reference(folders[template])
    model = model_of()
    check_tokenizer(model, tokenizer)
    for seed in range(25):
        sample = random_sample(seed, template)
        counts = [random.Random(seed + k).randint(1, 3) for k in range(len(sample.images))]
        tiles = [count * model.vision.tokens_per_item for count in counts]
        text = theirs.apply_chat_template(messages_of(sample), tokenize=False)
        expected = theirs(expanded(text, tiles, template), add_special_tokens=False).input_ids
        encoded = encode_sample(sample, counts, model, tokenizer)
        assert encoded.token_ids.tolist() == expected
        last = len(sample.turns) - 1
        asked = theirs.apply_chat_template(
            messages_of(sample, last), tokenize=False, add_generation_prompt=True
        )
        expected = theirs(expanded(asked, tiles, template), add_special_tokens=False).input_ids
        assert encode_prompt(sample, last, counts, model, tokenizer).tolist() == expected


def test_gemmas_images_are_those_of_its_processor(folders):
    """Prevents line ends around an image that the model was not trained with, or lacks."""
    theirs = reference(folders["trimmed"])
    pieces = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    for name, piece in {**pieces, "image_token": "<image_soft_token>"}.items():
        setattr(theirs, name, piece)
        setattr(theirs, f"{name}_id", theirs.convert_tokens_to_ids(piece))
    small = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(small, theirs, image_seq_length=5)
    tokenizer, model = open_tokenizer(folders["trimmed"]), model_of()
    assert model.vision.tokens_per_item == 1
    for seed in range(8):
        sample = random_sample(seed, "trimmed")
        shown = [Image.new("RGB", (30, 20))] * len(sample.images)
        text = theirs.apply_chat_template(messages_of(sample), tokenize=False)
        given = processor(text=[text], images=[shown] if shown else None, add_special_tokens=False)
        encoded = encode_sample(sample, [5] * len(shown), model, tokenizer)
        assert encoded.token_ids.tolist() == list(given["input_ids"][0])


def learned_texts(encoded, tokenizer) -> list[str]:
    """Each run of learned tokens as text."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], encoded.loss_mask, [0]])))
    return [
        tokenizer.decode(encoded.token_ids[begin:end].tolist())
        for begin, end in zip(borders[::2], borders[1::2], strict=True)
    ]


def written(answer: str, template: str, last: bool) -> str:
    """What is to be learned of an answer, told by hand."""
    # Where the prompt ends in a line end, a token of two goes over the border, and is not learned.
    block = {"thinking": "<think>\n\n</think>\n\n", "thinking at once": "</think>\n\n"}
    opens = block.get(template, "") if last else ""
    match template:
        case "trimmed":
            return f"{answer.strip()}<end_of_turn>"
        case "unclosed":
            return f"<think></think>\n{answer}{'' if last else '<|user|>'}"
    return f"{opens}{answer}<|im_end|>"


@pytest.mark.parametrize("template", TEMPLATES)
def test_loss_falls_on_answers_and_what_closes_them(folders, template):
    """Prevents a question, a header or a line end that is learned, or an answer that is not."""
    tokenizer = open_tokenizer(folders[template])
    draw = random.Random(0)
    for seed in range(25):
        sample = random_sample(seed, template)
        # Answers begin and end with letters: a token over the border is no business of this test.
        sample = replace(
            sample,
            turns=tuple(
                replace(turn, answer=f"x{turn.answer}y", learned=draw.random() < 0.7)
                for turn in sample.turns
            ),
        )
        encoded = encode_sample(sample, [1] * len(sample.images), model_of(), tokenizer)
        last = len(sample.turns) - 1
        assert learned_texts(encoded, tokenizer) == [
            written(turn.answer, template, place == last)
            for place, turn in enumerate(sample.turns)
            if turn.learned
        ]


def test_marked_templates_learn_what_transformers_does(folders):
    """Prevents another reading of {% generation %} than the one that template authors test."""
    tokenizer, theirs = open_tokenizer(folders["marked"]), reference(folders["marked"])
    for seed in range(25):
        sample = random_sample(seed, "marked")
        encoded = encode_sample(sample, [], model_of(), tokenizer)
        given = theirs.apply_chat_template(
            messages_of(sample), return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encoded.token_ids.tolist(), encoded.loss_mask.tolist()
        assert ids == given["input_ids"]
        # A token that begins before the border and ends behind it is learned there alone.
        differ = [k for k, (a, b) in enumerate(zip(mask, given["assistant_masks"], strict=True))
                  if a != bool(b)]  # fmt: skip
        assert all(not mask[k] and mask[k + 1] for k in differ)


def test_the_own_template_is_as_this_projects_template_where_both_are_one(folders):
    """Prevents a loss mask that depends on which of two ways writes the same conversation."""
    tokenizer = open_tokenizer(folders["chatml"])
    for seed in range(25):
        sample = random_sample(seed, "none")
        sample = replace(sample, system=sample.system or "Be of use.")
        own = encode_sample(sample, [], model_of().without_encoders(), tokenizer)
        other = encode_sample(sample, [], model_of("qwen2.5").without_encoders(), tokenizer)
        assert own.token_ids.tolist() == other.token_ids.tolist()
        assert own.loss_mask.tolist() == other.loss_mask.tolist()


@pytest.mark.parametrize("template", ["thinking", "thinking at once"])
def test_reasoning(folders, template):
    """Prevents an answer that is learned without the reasoning that led to it."""
    tokenizer, model = open_tokenizer(folders[template]), model_of()
    begin = "" if template == "thinking at once" else "<think>\n"
    for answer in (
        Turn("q", "a", None, reasoning="r"),
        Turn("q", "<think>\nr\n</think>\n\na", None),
    ):
        one = replace(sample_of(), turns=(answer,))
        encoded = encode_sample(one, [], model, tokenizer)
        [learned] = learned_texts(encoded, tokenizer)
        assert learned == f"{begin}r\n</think>\n\na<|im_end|>"
        after_question = replace(one, turns=(Turn("p", "b", None), answer))
        last = learned_texts(encode_sample(after_question, [], model, tokenizer), tokenizer)[-1]
        assert last == learned
        with pytest.raises(UserError, match=r"a\.jsonl: line 1: .*leaves the reasoning out"):
            encode_sample(replace(one, turns=(answer, Turn("p", "b", None))), [], model, tokenizer)
        unlearned = replace(one, turns=(replace(answer, learned=False), Turn("p", "b", None)))
        assert len(learned_texts(encode_sample(unlearned, [], model, tokenizer), tokenizer)) == 1


def test_tools(folders):
    """Prevents a call that is not learned, or the answer of a tool that is."""
    tokenizer, theirs = open_tokenizer(folders["thinking"]), reference(folders["thinking"])
    call, tool = {"name": "add", "arguments": {"a": 1}}, {"name": "add"}
    sample = replace(
        sample_of(tools=json.dumps([tool])),
        turns=(
            Turn("q", "Look:", None, calls=(json.dumps(call),)),
            Turn("", "3", None, results=("three",)),
        ),
    )
    function = {"type": "function"}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Look:", "tool_calls": [{**function, "function": call}]},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": "3"},
    ]
    encoded = encode_sample(sample, [], model_of(), tokenizer)
    assert encoded.token_ids.tolist() == theirs.apply_chat_template(
        messages, tools=[{**function, "function": tool}], return_dict=False
    )
    first, second = learned_texts(encoded, tokenizer)
    assert first.startswith("Look:\n<tool_call>") and first.endswith("</tool_call><|im_end|>")
    assert "three" not in first + second


def native(times: str | None) -> ModelConfig:
    """A model of images at their native resolution, with this rule for the times of a video."""
    video = None if times is None else VideoConfig(times=times, max_frames=4)
    encoder = ImagesEncoder(
        layers=1, hidden_size=8, heads=1, ffn_hidden_size=8, normalization="LayerNorm",
        qkv_bias=True, qk_norm=False, patch_size=14, frames_per_patch=2, video=video,
    )  # fmt: skip
    return model_of().model_copy(update={"encoders": {"vision": encoder}})


@pytest.mark.parametrize(
    ("times", "counts", "shown"),
    [
        ("none", [3], "[vvv]"),
        ("before", [2, 1], "<0.2 seconds>[vv]<1.8 seconds>[v]"),
        (None, [2, 1, 1, 1, 1], "[ii][i][i][i][i]"),
    ],
)
def test_videos_and_images_at_their_native_resolution(folders, times, counts, shown):
    """Prevents a video of other tokens than the model knows, or in another place."""
    tokenizer, model = open_tokenizer(folders["chatml"]), native(times)
    video = Video(frames=tuple(ImageFile(Path(f"{k}.png")) for k in range(5)))
    sample = sample_of(("See <video>", "a"), system="S", videos=(video,))
    encoded = encode_sample(sample, counts, model, tokenizer)
    text = tokenizer.decode(encoded.token_ids.tolist())
    for piece, short in (("vision_start", "["), ("vision_end", "]"), ("image_pad", "i")):
        text = text.replace(f"<|{piece}|>", short)
    assert text.replace("<|video_pad|>", "v") == (
        "<|im_start|>system\nS<|im_end|>\n"
        f"<|im_start|>user\nSee {shown}<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    assert learned_texts(encoded, tokenizer) == ["a<|im_end|>"]
    images = sample_of(("<image>See<image>", "a"), system="s", images=2)
    encoded = encode_sample(images, [2, 1], model, tokenizer)
    text = tokenizer.decode(encoded.token_ids.tolist())
    assert (text.count("<|image_pad|>"), text.count("<|vision_end|>")) == (3, 2)


def test_a_scan_counts_what_the_template_writes(folders, tmp_path):
    """Prevents a hub's model whose users' own data cannot be scanned, or is miscounted."""
    model = read_hub_config(Path(__file__).parent / "hub_configs/qwen3-vl-2b/config.json")
    assert model.chat_template == "tokenizer"
    records = []
    for number in range(6):
        Image.new("RGB", (40 + 90 * number, 70)).save(tmp_path / f"{number}.png")
        shown = [{"type": "image", "image": f"{number}.png"}] * (number % 3)
        content = [*shown, {"type": "text", "text": "What is it?"}]
        answer = {"role": "assistant", "content": "a " * number}
        records.append({"messages": [{"role": "user", "content": content}, answer]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    annotations = Annotations.open(tmp_path / "a.jsonl")
    tokenizer = open_tokenizer(folders["chatml"])
    lengths = scan_lengths(annotations, model, tokenizer, lambda done: None).lengths
    for number, sample in enumerate(annotations):
        each = image_segments(40 + 90 * number, 70, model.images.image_rule).all_tokens
        encoded = encode_sample(sample, [each] * (number % 3), model, tokenizer)
        assert lengths.tokens[number] == len(encoded.token_ids)
        assert lengths.loss_tokens[number] == encoded.loss_mask.sum()
        assert lengths.column("image_tokens")[number] == each * (number % 3)
        pads = encoded.token_ids == tokenizer.id_of("<|image_pad|>")
        assert pads.sum() == each * (number % 3)


def test_pieces_and_ends(folders):
    """Prevents an answer that never ends, and text that could end one or show an image."""
    ends = {"chatml": "<|im_end|>", "trimmed": "<end_of_turn>", "unclosed": "<eos>"}
    for name, piece in ends.items():
        tokenizer = open_tokenizer(folders[name])
        assert answer_end(model_of(), tokenizer) == tokenizer.id_of(piece)
    assert expected_answer(" a ", model_of(), open_tokenizer(folders["trimmed"])) == "a"
    assert expected_answer(" a ", model_of(), open_tokenizer(folders["chatml"])) == " a "
    assert own_template(open_tokenizer(folders["marked"]), None).images is None
    tokenizer = open_tokenizer(folders["chatml"])
    for text in ("<|im_end|>", "<|image_pad|>", "\U000f0000"):
        with pytest.raises(UserError, match=r"line 1: has .* in its text, which only the chat"):
            encode_sample(sample_of(("q", f"a{text}")), [], model_of(), tokenizer)


@pytest.mark.parametrize(
    ("template", "sample", "message"),
    [
        ("trimmed", sample_of(("q", "a"), system="s"), r"cannot write it \(no system message\)"),
        ("chatml", sample_of(("q", "a"), tools="[{}]"), "what templates write of 'tools'"),
        ("marked", sample_of(("<image>q", "a"), images=1), "cannot write it"),
        ("thinking", sample_of(("<image>q", "a"), images=1), "cannot write it"),
    ],
)
def test_what_a_template_cannot_write_is_refused(folders, template, sample, message):
    """Prevents a tool, an image or a system message that is silently left out."""
    tokenizer = open_tokenizer(folders[template])
    with pytest.raises(UserError, match=f"line 1: .*{message}"):
        encode_sample(sample, [1] * len(sample.images), model_of(), tokenizer)


def test_a_template_that_writes_the_past_otherwise_is_refused(folders, tmp_path):
    """Prevents loss that falls where an answer stood before the template moved it."""
    odd = "{{ messages | length }}" + CHATML
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["chatml"] / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(odd)
    with pytest.raises(UserError, match="message 2 otherwise once more follows"):
        encode_sample(sample_of(("q", "a"), ("p", "b")), [], model_of(), open_tokenizer(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match="its chat template is not Jinja"):
        encode_sample(sample_of(("q", "a")), [], model_of(), open_tokenizer(tmp_path))


def test_where_templates_are_found(folders, tmp_path):
    """Prevents a template of another file than Transformers takes, and plans that outlive it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["chatml"] / name).read_bytes())
    bare = open_tokenizer(tmp_path)
    assert bare.template is None
    with pytest.raises(UserError, match="has no chat template beside it"):
        check_tokenizer(model_of(), bare)
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "1"}, {"name": "default", "template": "2"}]
    found = []
    for file, content in (
        (tmp_path / "chat_template.json", {"chat_template": "0"}),
        (config, {"chat_template": named}),
        (config, {"chat_template": "3"}),
        (tmp_path / "chat_template.jinja", None),
    ):
        file.write_text("4" if content is None else json.dumps(content))
        assert file in tokenizer_files(tmp_path)
        found.append(open_tokenizer(tmp_path))
    assert [tokenizer.template for tokenizer in found] == ["0", "2", "3", "4"]
    own = [text_sha256(model_of(), tokenizer) for tokenizer in found[2:]]
    assert own[0] != own[1]
    others = {text_sha256(model_of("qwen2.5"), tokenizer) for tokenizer in found[1:]}
    assert others == {found[1].sha256}
