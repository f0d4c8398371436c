"""Chat templates that come with tokenizers, against Transformers' apply_chat_template."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import jinja2
import numpy as np
import pytest
from chat_cases import TEMPLATES, WORDS, sample_of, write_templated
from jsonl_cases import DIGITS, picture, scan, write_jsonl
from PIL import Image
from transformers import (
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLProcessor,
    PreTrainedTokenizerFast,
)

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
from omnibal.data.jinja_chat import compiled_template, render_chat
from omnibal.data.native_resolution import image_segments
from omnibal.data.own_template import own_template
from omnibal.data.sample import Sample, Turn, Video
from omnibal.data.stored_files import ImageFile
from omnibal.data.tiling import tile_count
from omnibal.data.tokenizer import list_tokenizer_files, open_tokenizer
from omnibal.families.hub import read_hub_config
from omnibal.model.encoders import ImagesEncoder, VideoConfig

SHOWING = ("chatml", "trimmed", "unclosed", "media")
MODEL = DIGITS.with_tower("language", vocab_size=1024).model_copy(
    update={"chat_template": "tokenizer", "system_message": None}
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return folders with a tokenizer and a chat template, by the template's name."""
    return {
        name: write_templated(tmp_path_factory.mktemp("tokenizer"), template)
        for name, template in TEMPLATES.items()
    }


def reference(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>",
        chat_template=(folder / "chat_template.jinja").read_text(),
    )  # fmt: skip


def random_sample(seed: int, template: str) -> Sample:
    """Return up to three turns, with up to two images if the template shows images."""
    draw = random.Random(seed)
    words = [*WORDS.split(" "), "\n", " ", "1"]
    turns = [
        [" ".join(draw.choices(words, k=draw.randint(1, 6))) for _ in range(2)]
        for _ in range(draw.randint(1, 3))
    ]
    for _ in range(draw.randint(0, 2) if template in SHOWING else 0):
        turn = draw.choice(turns)
        cut = draw.choice([one.end() for one in re.finditer("^|<image>|.", turn[0], re.DOTALL)])
        turn[0] = f"{turn[0][:cut]}<image>{turn[0][cut:]}"
    system = None if template == "trimmed" else draw.choice([None, "Be brief."])
    return sample_of(*turns, system=system)


def messages_of(sample: Sample, before: int | None = None) -> list[dict]:
    """Return messages for apply_chat_template, up to the question of a turn."""
    found = [] if sample.system is None else [{"role": "system", "content": sample.system}]
    for turn in sample.turns if before is None else sample.turns[: before + 1]:
        content: object = turn.question
        if "<image>" in turn.question:
            content = [
                {"type": "image"} if piece == "<image>" else {"type": "text", "text": piece}
                for piece in re.split("(<image>)", turn.question)
                if piece
            ]
        found.append({"role": "user", "content": content})
        found.append({"role": "assistant", "content": turn.answer})
    return found if before is None else found[:-1]


def expand_images(text: str, counts: list[int], template: str) -> str:
    """Expand a template's image placeholders as the families' processors do."""
    pads = {"media": "<|media_pad|>", "unclosed": "<|image|>", "trimmed": "<start_of_image>"}
    pad = pads.get(template, "<|image_pad|>")
    first, *others = text.split(pad)
    for count, rest in zip(counts, others, strict=True):
        shown = pad * count
        if template == "trimmed":
            shown = f"\n\n{pad}{'<image_soft_token>' * count}<end_of_image>\n\n"
        first += shown + rest
    return first


@pytest.mark.parametrize("template", TEMPLATES)
def test_token_ids_are_those_of_apply_chat_template(folders, template):
    """Prevents conversations or prompts with other tokens than apply_chat_template's."""
    tokenizer, theirs = open_tokenizer(folders[template]), reference(folders[template])
    check_tokenizer(MODEL, tokenizer)
    for seed in range(25):
        sample = random_sample(seed, template)
        counts = [random.Random(seed + k).randint(1, 3) for k in range(len(sample.images))]

        def expectation(messages, counts=counts, **options):
            tokens = [count * MODEL.vision.tokens_per_item for count in counts]
            text = theirs.apply_chat_template(messages, tokenize=False, **options)
            return theirs(expand_images(text, tokens, template), add_special_tokens=False).input_ids

        encoded = encode_sample(sample, counts, MODEL, tokenizer)
        assert encoded.token_ids.tolist() == expectation(messages_of(sample))
        last = len(sample.turns) - 1
        asked = expectation(messages_of(sample, last), add_generation_prompt=True)
        assert encode_prompt(sample, last, counts, MODEL, tokenizer).tolist() == asked


def test_gemmas_images_are_those_of_its_processor(folders):
    """Prevents missing or additional line breaks around Gemma's images."""
    theirs = reference(folders["trimmed"])
    pieces = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    for name, piece in {**pieces, "image_token": "<image_soft_token>"}.items():
        setattr(theirs, name, piece)
        setattr(theirs, f"{name}_id", theirs.convert_tokens_to_ids(piece))
    small = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(small, theirs, image_seq_length=MODEL.vision.tokens_per_item)
    tokenizer = open_tokenizer(folders["trimmed"])
    for seed in range(8):
        sample = random_sample(seed, "trimmed")
        shown = [Image.new("RGB", (30, 20))] * len(sample.images)
        text = theirs.apply_chat_template(messages_of(sample), tokenize=False)
        given = processor(text=[text], images=[shown] if shown else None, add_special_tokens=False)
        encoded = encode_sample(sample, [1] * len(shown), MODEL, tokenizer)
        assert encoded.token_ids.tolist() == list(given["input_ids"][0])


def test_internvls_images_are_those_of_its_processor(tmp_path):
    """Prevents counting a folder in Transformers' format by InternVL's own rules."""
    (tmp_path / "config.json").write_text(InternVLConfig().to_json_string())
    write_templated(tmp_path, TEMPLATES["tiles"])
    model, theirs = read_hub_config(tmp_path), reference(tmp_path)
    images = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, max_patches=12)
    processor = object.__new__(InternVLProcessor)  # its constructor needs torchvision
    processor.start_image_token, processor.end_image_token = "<img>", "</img>"
    processor.image_token, processor.image_seq_length = "<IMG_CONTEXT>", 256
    tokenizer, draw = open_tokenizer(tmp_path), random.Random(0)
    check_tokenizer(model, tokenizer)
    for seed in range(12):
        sample = random_sample(seed, "chatml")
        sides = (50, 100, 120, 200, 250, 300, 500, 750, 1000)  # including ties of grids
        sizes = [(draw.choice(sides), draw.choice(sides)) for _ in sample.images]
        rules = InternVLProcessor.images_kwargs
        counts = [images.get_number_of_image_patches(high, wide, rules) for wide, high in sizes]
        text, *others = theirs.apply_chat_template(messages_of(sample), tokenize=False).split(
            "<IMG_CONTEXT>"
        )
        for k, rest in enumerate(others):
            text += processor.replace_image_token({"num_patches": counts}, k) + rest
        tiling = sample.tiling(model.vision.tiling)
        tiles = [tile_count(*size, tiling, 448) for size in sizes]
        encoded = encode_sample(sample, tiles, model, tokenizer)
        given = theirs(text, add_special_tokens=False)
        assert encoded.token_ids.tolist() == given.input_ids
    for frames in (1, 3, 12):
        bare = replace(sample_of(("<video>\nWhat?", "sum")), videos=(Video(frames=("a.png",)),))
        sample = bare.with_frames(("a.png",) * frames)
        asked = [{"type": "video"}, {"type": "text", "text": "What?"}]
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "sum"}]
        shown = {"pixel_values_videos": [np.zeros((frames, 1))]}
        text = theirs.apply_chat_template(said, tokenize=False)
        text = text.replace("<video>", processor.replace_video_token(shown, 0))
        encoded = encode_sample(sample, [1] * frames, model, tokenizer)
        assert encoded.token_ids.tolist() == theirs(text, add_special_tokens=False).input_ids


def learned_texts(sample, tokenizer, counts=(), model=MODEL) -> list[str]:
    """Return each run of learned tokens as text."""
    encoded = encode_sample(sample, counts, model, tokenizer)
    borders = np.flatnonzero(np.diff(encoded.loss_mask.astype(int), prepend=0, append=0))
    ids = encoded.token_ids.tolist()
    return [tokenizer.decode(ids[begin:end]) for begin, end in borders.reshape(-1, 2)]


def answer_text(answer: str, template: str, last: bool) -> str:
    """Return the learned text of an answer, written by hand."""
    # If the prompt ends in a line break, a token across the border is not learned.
    block = {"thinking": "<think>\n\n</think>\n\n"}
    block |= dict.fromkeys(("thinking at once", "thinking always"), "</think>\n\n")
    opens = block.get(template, "") if last else ""
    match template:
        case "trimmed":
            return f"{answer.strip()}<end_of_turn>"
        case "unclosed":
            return f"<think></think>\n{answer}{'' if last else '<|user|>'}"
    return f"{opens}{answer}<|im_end|>"


@pytest.mark.parametrize("template", TEMPLATES)
def test_loss_falls_on_answers_and_what_closes_them(folders, template):
    """Prevents learning a question, a header or a line break, or not learning an answer."""
    tokenizer = open_tokenizer(folders[template])
    draw = random.Random(0)
    for seed in range(25):
        sample = random_sample(seed, template)
        # Answers begin and end with letters, so that no token crosses their borders.
        turns = [
            replace(turn, answer=f"x{turn.answer}y", learned=draw.random() < 0.7)
            for turn in sample.turns
        ]
        sample = replace(sample, turns=tuple(turns))
        assert learned_texts(sample, tokenizer, [1] * len(sample.images)) == [
            answer_text(turn.answer, template, turn is turns[-1]) for turn in turns if turn.learned
        ]


def test_marked_templates_learn_what_transformers_does(folders):
    """Prevents reading {% generation %} differently from Transformers."""
    tokenizer, theirs = open_tokenizer(folders["marked"]), reference(folders["marked"])
    for seed in range(25):
        sample = random_sample(seed, "marked")
        encoded = encode_sample(sample, [], MODEL, tokenizer)
        given = theirs.apply_chat_template(
            messages_of(sample), return_dict=True, return_assistant_tokens_mask=True
        )
        assert encoded.token_ids.tolist() == given["input_ids"]
        # Only Transformers learns a token that crosses the beginning of an answer.
        mask = encoded.loss_mask
        differ = np.flatnonzero(mask != np.array(given["assistant_masks"], bool))
        assert not mask[differ].any() and mask[differ + 1].all()


@pytest.mark.parametrize("template", ["thinking", "thinking at once", "thinking always"])
def test_reasoning(folders, template):
    """Prevents learning an answer without the reasoning that led to it."""
    tokenizer, other = open_tokenizer(folders[template]), Turn("p", "b", None)
    begin = "<think>\n" if template == "thinking" else ""
    for answer in (
        Turn("q", "a", None, reasoning="r"),
        Turn("q", "<think>\nr\n</think>\n\na", None),
    ):

        def learned(*turns: Turn) -> list[str]:
            return learned_texts(replace(sample_of(), turns=turns), tokenizer)

        expectation = f"{begin}r\n</think>\n\na<|im_end|>"
        assert learned(answer) == [expectation] and learned(other, answer)[-1] == expectation
        with pytest.raises(
            UserError, match=r"x\.jsonl: line 1: .*reasoning before another question"
        ):
            learned(answer, other)
        assert len(learned(replace(answer, learned=False), other)) == 1


def test_tools(folders):
    """Prevents a tool call that is not learned, or a tool's result that is."""
    tokenizer, theirs = open_tokenizer(folders["thinking"]), reference(folders["thinking"])
    call, tool = {"name": "add", "arguments": {"a": 1}}, {"name": "add"}
    turns = (
        Turn("q", "Look:", None, calls=(json.dumps(call),)),
        Turn("", "3", None, results=("three",)),
    )
    sample = replace(sample_of(tools=json.dumps([tool])), turns=turns)
    function = {"type": "function"}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Look:", "tool_calls": [{**function, "function": call}]},
        {"role": "tool", "content": "three"},
        {"role": "assistant", "content": "3"},
    ]
    tools = [{**function, "function": tool}]
    expectation = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
    assert encode_sample(sample, [], MODEL, tokenizer).token_ids.tolist() == expectation
    first, second = learned_texts(sample, tokenizer)
    assert first.startswith("Look:\n<tool_call>") and first.endswith("</tool_call><|im_end|>")
    assert "three" not in first + second


@pytest.mark.parametrize(
    ("times", "counts", "shown"),
    [
        ("none", [3], "[vvv]"),
        ("before", [2, 1], "<0.2 seconds>[vv]<1.8 seconds>[v]"),
        (None, [2, 1, 1, 1, 1], "[ii][i][i][i][i]"),
    ],
)
def test_videos_and_images_at_their_native_resolution(folders, times, counts, shown):
    """Prevents video tokens that the model does not know, or in another place."""
    tokenizer = open_tokenizer(folders["chatml"])
    encoder = ImagesEncoder(
        layers=1, hidden_size=8, heads=1, ffn_hidden_size=8, normalization="LayerNorm",
        qkv_bias=True, qk_norm=False, patch_size=14, frames_per_patch=2,
        video=None if times is None else VideoConfig(times=times, max_frames=4),
    )  # fmt: skip
    model = MODEL.model_copy(update={"encoders": {"vision": encoder}})

    def text_of(sample: Sample, counts: list[int]) -> str:
        return tokenizer.decode(encode_sample(sample, counts, model, tokenizer).token_ids.tolist())

    video = Video(frames=tuple(ImageFile(Path(f"{k}.png")) for k in range(5)))
    sample = sample_of(("See <video>", "a"), system="S", videos=(video,))
    text = text_of(sample, counts)
    for piece, short in (("vision_start", "["), ("vision_end", "]"), ("image_pad", "i")):
        text = text.replace(f"<|{piece}|>", short)
    assert text.replace("<|video_pad|>", "v") == (
        "<|im_start|>system\nS<|im_end|>\n"
        f"<|im_start|>user\nSee {shown}<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )
    assert learned_texts(sample, tokenizer, counts, model) == ["a<|im_end|>"]
    text = text_of(sample_of(("<image>See<image>", "a"), system="s"), [2, 1])
    assert (text.count("<|image_pad|>"), text.count("<|vision_end|>")) == (3, 2)


def test_a_scan_counts_what_the_template_writes(folders, tmp_path):
    """Prevents users' own data that a hub model cannot scan, or miscounts."""
    model = read_hub_config(Path(__file__).parent / "hub_configs/qwen3-vl-2b/config.json")
    assert model.chat_template == "tokenizer"
    records, sizes = [], [(40 + 90 * number, 70) for number in range(6)]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.png").write_bytes(picture(*size))
        shown = [{"type": "image", "image": f"{number}.png"}] * (number % 3)
        content = [*shown, {"type": "text", "text": "What is it?"}]
        answer = {"role": "assistant", "content": "a " * number}
        records.append({"messages": [{"role": "user", "content": content}, answer]})
    annotations = Annotations.open(write_jsonl(tmp_path / "a.jsonl", *records))
    tokenizer = open_tokenizer(folders["chatml"])
    lengths = scan(annotations, tokenizer, model).lengths
    for number, sample in enumerate(annotations):
        each = image_segments(*sizes[number], model.images.image_rule).all_tokens
        encoded = encode_sample(sample, [each] * (number % 3), model, tokenizer)
        pads = encoded.token_ids == tokenizer.id_of("<|image_pad|>")
        assert lengths.tokens[number] == len(encoded.token_ids)
        assert lengths.loss_tokens[number] == encoded.loss_mask.sum()
        assert lengths.column("image_tokens")[number] == pads.sum() == each * (number % 3)


def test_pieces_and_ends(folders):
    """Prevents an answer that never ends, and text that ends an answer or shows an image."""
    ends = {"chatml": "<|im_end|>", "trimmed": "<end_of_turn>", "unclosed": "<eos>"}
    for name, piece in ends.items():
        tokenizer = open_tokenizer(folders[name])
        assert answer_end(MODEL, tokenizer) == tokenizer.id_of(piece)
    assert expected_answer(" a ", MODEL, open_tokenizer(folders["trimmed"])) == "a"
    tokenizer = open_tokenizer(folders["chatml"])
    assert expected_answer(" a ", MODEL, tokenizer) == " a "
    assert own_template(open_tokenizer(folders["marked"]), None).image is None
    for text in ("<|im_end|>", "<|image_pad|>", "\U000f0000"):
        with pytest.raises(UserError, match=r"line 1: has .* in its text, which only the chat"):
            encode_sample(sample_of(("q", f"a{text}")), [], MODEL, tokenizer)


@pytest.mark.parametrize(
    ("template", "sample", "message"),
    [
        ("trimmed", sample_of(("q", "a"), system="s"), r"cannot write it \(no system message\)"),
        ("chatml", sample_of(("q", "a"), tools="[{}]"), "has tools, which the chat template"),
        ("marked", sample_of(("<image>q", "a")), "cannot write it"),
        ("thinking", sample_of(("<image>q", "a")), "cannot write it"),
    ],
)
def test_what_a_template_cannot_write_is_refused(folders, template, sample, message):
    """Prevents silently omitting a tool, an image or a system message."""
    tokenizer = open_tokenizer(folders[template])
    with pytest.raises(UserError, match=f"line 1: .*{message}"):
        encode_sample(sample, [1] * len(sample.images), MODEL, tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages | length }}" + TEMPLATES["chatml"], "message 2 otherwise if more messages"),
        ("{% if %}", "its chat template is not Jinja"),
    ],
)
def test_a_template_that_writes_the_past_otherwise_is_refused(tmp_path, template, message):
    """Prevents loss at an answer's old position after the template moved it."""
    tokenizer = open_tokenizer(write_templated(tmp_path, template))
    with pytest.raises(UserError, match=message):
        encode_sample(sample_of(("q", "a"), ("p", "b")), [], MODEL, tokenizer)


def test_where_templates_are_found(tmp_path):
    """Prevents reading another template file than Transformers, or not hashing the template."""
    write_templated(tmp_path, "")
    (tmp_path / "chat_template.jinja").unlink()
    bare = open_tokenizer(tmp_path)
    assert bare.template is None
    with pytest.raises(UserError, match="has no chat template in its folder"):
        check_tokenizer(MODEL, bare)
    named = [{"name": "tool_use", "template": "1"}, {"name": "default", "template": "2"}]
    found = []
    for name, content in (
        ("chat_template.json", '{"chat_template": "0"}'),
        ("tokenizer_config.json", json.dumps({"chat_template": named})),
        ("tokenizer_config.json", '{"chat_template": "3"}'),
        ("chat_template.jinja", "4"),
    ):
        (tmp_path / name).write_text(content)
        assert tmp_path / name in list_tokenizer_files(tmp_path)
        found.append(open_tokenizer(tmp_path))
    assert [tokenizer.template for tokenizer in found] == ["0", "2", "3", "4"]
    assert len({text_sha256(MODEL, tokenizer) for tokenizer in found[2:]}) == 2
    qwen = MODEL.model_copy(update={"chat_template": "qwen2.5"})
    assert {text_sha256(qwen, tokenizer) for tokenizer in found[1:]} == {found[1].sha256}


LOOP, END_LOOP = "{% for a in range(99999) %}", "{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP + LOOP + "{% set x = a %}" + END_LOOP + END_LOOP,
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% set s = namespace(x='a') %}" + LOOP + "{% set s.x = s.x ~ s.x %}" + END_LOOP,
        "{% set s = namespace(x=9) %}" + LOOP + "{% set s.x = s.x * s.x %}" + END_LOOP,
        "{% macro f() %}" + LOOP + "{{ 'x' * 999 }}" + END_LOOP + "{% endmacro %}{{ f() }}",
        "{{ 10 ** 12 * (0,) }}",
        "{% set s = namespace(x=(1,)) %}" + LOOP + "{% set s.x = s.x + s.x %}" + END_LOOP,
        "{% set s = namespace(x='a') %}" + LOOP + "{% set s.x = '%s%s' % (s.x, s.x) %}" + END_LOOP,
        "{% set s = namespace(x='a') %}" + LOOP + "{% set s.x = [s.x, s.x] | join %}" + END_LOOP,
        "{% set s = namespace(x='a') %}"
        + LOOP
        + "{% set s.x = s.x | replace('a', 'aa') %}"
        + END_LOOP,
        LOOP + "{{ '" + "x" * 999 + "' }}" + END_LOOP,
        LOOP + "{% set x = 'a' * -9999999 ~ 'x' * 9999 %}" + END_LOOP,
        "{{ 9 ** 99999999999 }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '{:2000000000d}'.format(1) }}",
        "{{ '{:{}}'.format(1, 2000000000) }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ 'a' | center(2000000000) | length }}",
        "{{ ('a\n' * 999999) | indent(999999) }}",
        "{{ [1] | tojson(indent=2000000000) }}",
        "{{ lipsum(n=99999999) }}",
        "{% set s = ['x' * 49999999] %}{{ (s * 9999) | join | length }}",
        "{% set s = 'x' * 49999 %}{{ s.replace('x', s * 99) | length }}",
        "{% set s = [1] * 999999 %}" + LOOP + "{% set x = s | sort %}" + END_LOOP,
        "{% set s = [1] | slice(2000000000) | list %}",
        "{% if true %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    ],
)
def test_hostile_templates_end_in_a_line(template):
    """Prevents a checkpoint's template that runs forever or exhausts the memory."""
    with pytest.raises((UserError, jinja2.TemplateError, RecursionError)):
        render_chat(compiled_template(template, "t"), [{"role": "user", "content": "hi"}])


def test_limits_do_not_change_what_a_template_writes():
    """Prevents limited operators that give other results than Jinja's."""
    template = "{{ 1 + 2 * 3 ** 2 % 5 }} {{ 'a' ~ 1 ~ [2] }} {{ [1] + [2] }} "
    template += (
        "{{ '%02d%s%5.2f' % (3, 'a', 1.5) }} {{ '{:>9}{}'.format(1, 2) }} {{ [1, 2] | join('-') }}"
    )
    template += "{{ 'aba'.replace('a', 'c') }} {{ 'x' | indent(2) }} {{ 'b'.center(5) }}"
    template += "{{ '%02d' % 3 }} {{ '-' * 4 }} {{ 2 * 'a' }} {{ [0] * 2 }} {{ (9**9)|tojson }}"
    rendered = render_chat(compiled_template(template, "t"), [])
    assert rendered == jinja2.Template(template).render()
