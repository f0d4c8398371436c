"""Conversations by each released model's kind of tokenizer, against InternVL's preprocessing.

`preprocess_mpt`, `preprocess_phi3`, `preprocess_internlm` and `preprocess_internvl2_5` are stated
here anew as they are, with what they get wrong: a mask that is counted by parts that are tokenized
alone, and dropped with all the sample's loss where the parts do not add up; and a role without an
end for an empty message. Tokenizers are small ones of the released classes' conventions.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from tokenizer_cases import (
    CONTROLS,
    IMAGES,
    WORDS,
    LlamaNotLegacy,
    byte_level_bpe,
    ids_by,
    slow_of,
    write_sentencepiece,
)
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from omnibal.data.annotations import Annotations
from omnibal.data.chat import encode_sample
from omnibal.data.sample import Sample, Turn
from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from omnibal.model.config import ModelConfig, load_model

DIGITS = load_model("internvl-digits")
CONVERSATIONS = 100
IGNORED = -100
Message = dict[str, str]
Encoded = tuple[list[int], list[int]]
"""Ids, and labels in which what is not learned is `IGNORED`."""


@dataclass(frozen=True)
class Released:
    """A tokenizer as this project reads it, and as its Hugging Face class is called."""

    tokenizer: Tokenizer
    plain: Callable[[str], list[int]]
    """Ids without a begin token."""
    bos: int | None
    """What the class puts before every text, if anything."""

    def __call__(self, text: str) -> list[int]:
        return self.plain(text) if self.bos is None else [self.bos, *self.plain(text)]


def internlm2(folder: Path) -> Released:
    """SentencePiece, added tokens with ids of the model's own, `<s>` before every text."""
    path = write_sentencepiece(folder, dummy_prefix=False)
    slow = slow_of(path)
    return Released(open_tokenizer(path), ids_by(slow), slow.bos_token_id)


def phi3(folder: Path) -> Released:
    """Llama's class without `legacy`, and `<s>`; its control tokens take the spaces behind them."""
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    path = write_sentencepiece(folder, rstrip=True, **settings)
    slow = slow_of(path, LlamaNotLegacy, legacy=False)
    return Released(open_tokenizer(path), ids_by(slow), slow.bos_token_id)


def yi(folder: Path) -> Released:
    """Llama's class with `legacy`, which begins each run of text with a space; no `<s>`."""
    path = write_sentencepiece(folder, dummy_prefix=True, add_bos_token=False)
    return Released(open_tokenizer(path), ids_by(slow_of(path)), None)


def qwen2(folder: Path) -> Released:
    """Its own class over bytes, without a begin token."""
    model = json.loads(byte_level_bpe(WORDS).to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
    tokenizer.add_tokens([*CONTROLS, *IMAGES], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return Released(open_tokenizer(folder), ids_by(tokenizer), None)


def llama3(folder: Path) -> Released:
    """Bytes, cut into words as Llama 3 does; a begin token that the post-processor adds."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    model = byte_level_bpe(WORDS, words + rest)
    begin = "<|begin_of_text|>"
    model.add_special_tokens([begin, "<|endoftext|>", *CONTROLS, *IMAGES])
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, model.token_to_id(begin))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token=begin)
    fast.save_pretrained(folder)
    whole = fast("a").input_ids
    assert whole == [fast.bos_token_id, *ids_by(fast)("a")]
    return Released(open_tokenizer(folder), ids_by(fast), fast.bos_token_id)


# Which templates InternVL's releases have with each.
RELEASES = [
    (internlm2, "internlm2-chat"),
    (internlm2, "internvl2_5"),
    (qwen2, "Hermes-2"),
    (qwen2, "internvl2_5"),
    (yi, "Hermes-2"),
    (phi3, "phi3-chat"),
    (llama3, "internlm2-chat"),
]


@pytest.fixture(scope="module")
def released_of(tmp_path_factory) -> Callable[[Callable], Released]:
    made: dict[Callable, Released] = {}

    def get(kind: Callable[[Path], Released]) -> Released:
        if kind not in made:
            made[kind] = kind(tmp_path_factory.mktemp(kind.__name__))
        return made[kind]

    return get


@dataclass(frozen=True)
class Pieces:
    """InternVL's conversation template of separator style MPT."""

    system: str
    user: str
    assistant: str
    end: str

    def prompt(self, message: str, talk: list[Message]) -> str:
        roles = {"human": self.user, "gpt": self.assistant}
        texts = [f"{self.system}{message}{self.end}"]
        for said in talk:
            role, words = roles[said["from"]], said["value"]
            texts.append(f"{role}{words}{self.end}" if words else role)
        return "".join(texts)


CHATML = Pieces(
    "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
)
PHI = Pieces("<|system|>\n", "<|user|>\n", "<|assistant|>\n", "<|end|>")
SYSTEM = "Words of a system. "
"""The real ones are held against these in `test_chat.py`."""


def shown(text: str, tokens: list[int]) -> str:
    for count in tokens:
        text = text.replace("<image>", f"<img>{'<IMG_CONTEXT>' * count}</img>", 1)
    return text


def masked(ids: list[int], learned: list[tuple[int, int]], length: int) -> Encoded | None:
    """With labels in these ranges; None where the whole is not as long as its parts together."""
    if length != len(ids):
        return None
    labels = [IGNORED] * len(ids)
    for start, end in learned:
        labels[start:end] = ids[start:end]
    return ids, labels


def rounds(text: str, pieces: Pieces) -> list[str]:
    """System, question and answer, then question and answer; each without its last end."""
    parts = text.split(pieces.end)
    groups = [parts[:3], *(parts[at : at + 2] for at in range(3, len(parts), 2))]
    joined = list(map(pieces.end.join, groups))
    return joined[: joined.index("")] if "" in joined else joined


def preprocess_mpt(call: Released, text: str) -> Encoded | None:
    place, learned = 0, []
    border = CHATML.end + CHATML.assistant
    for one in rounds(text, CHATML):
        length, parts = len(call(one)) + 1, one.split(border)
        if len(parts) != 2:
            break
        learned.append((place + len(call(parts[0] + border)), place + length))
        place += length
    return masked(call(text), learned, place)


def preprocess_phi3(call: Released, text: str) -> Encoded | None:
    place, learned = 1, []
    border = PHI.end + PHI.assistant
    for number, one in enumerate(rounds(text, PHI)):
        again = min(number, 1)
        length, parts = len(call(one)) - again, one.split(border)
        if len(parts) != 2:
            break
        learned.append((place + len(call(parts[0] + border)) - 1 - again, place + length))
        place += length
    found = masked(call(text), learned, place)
    if found is None:
        return None
    unlearned = call.tokenizer.id_of("<|endoftext|>")
    return found[0], [IGNORED if label == unlearned else label for label in found[1]]


def preprocess_internlm(call: Released, text: str) -> Encoded | None:
    before, *parts = text.split(CHATML.assistant)
    place, learned = len(call(before + CHATML.assistant)), []
    for part in parts[:-1]:
        answer, question = part.split(CHATML.user)
        length = len(call(answer)) - 1
        learned.append((place, place + length))
        place += length + len(call(CHATML.user + question + CHATML.assistant)) - 1
    length = len(call(parts[-1])) - 1
    return masked(call(text), [*learned, (place, place + length)], place + length)


def preprocess_internvl2_5(call: Released, talk: list[Message], tokens: list[int]) -> Encoded:
    message, left = SYSTEM, list(tokens)
    if talk[0]["from"] == "system":
        message, talk = talk[0]["value"], talk[1:]
    texts = [f"{CHATML.system}{message}{CHATML.end}\n"]
    for said in talk:
        words, role = said["value"], CHATML.assistant
        if said["from"] == "human":
            count = words.count("<image>")
            words, left, role = shown(words, left[:count]), left[count:], CHATML.user
        texts.append(f"{role}{words}{CHATML.end}\n")
    assert not left
    begun = int(call.bos is not None)
    # The first is written with a begin token of its own, and all lose the one of the class.
    each = [call(text)[begun:] for text in texts]
    each[0] = each[0] if call.bos is None else [call.bos, *each[0]]
    header = len(call(CHATML.assistant)) - begun
    labels: list[int] = []
    for ids, speaker in zip(each, ["system", *(said["from"] for said in talk)], strict=True):
        kept = ids[header:-1] if speaker == "gpt" else []
        own = [IGNORED] * header + kept + [IGNORED]
        labels += own if speaker == "gpt" else [IGNORED] * len(ids)
    return [number for ids in each for number in ids], labels


def internvl(
    call: Released, template: str, talk: list[Message], tokens: list[int]
) -> Encoded | None:
    """What InternVL trains on; None where it drops the sample's loss."""
    if template == "internvl2_5":
        return preprocess_internvl2_5(call, talk, tokens)
    if talk[0]["from"] == "gpt":
        talk = talk[1:]
    if template == "internlm2-chat":
        talk = [said | {"value": said["value"].strip()} for said in talk]
    pieces = PHI if template == "phi3-chat" else CHATML
    text = shown(pieces.prompt(SYSTEM, talk), tokens)
    functions = {
        "internlm2-chat": preprocess_internlm,
        "Hermes-2": preprocess_mpt,
        "phi3-chat": preprocess_phi3,
    }
    return functions[template](call, text)


def model_of(template: str) -> ModelConfig:
    return DIGITS.model_copy(update={"chat_template": template, "system_message": SYSTEM})


def sample_of(talk: list[Message]) -> Sample:
    talk = list(talk)
    system = talk.pop(0)["value"] if talk[0]["from"] == "system" else None
    greeting = talk.pop(0)["value"] if talk[0]["from"] == "gpt" else None
    texts = [said["value"] for said in talk]
    turns = [Turn(*pair, None) for pair in zip(texts[::2], texts[1::2], strict=True)]
    images = sum(text.count("<image>") for text in texts)
    return Sample(
        identity="x",
        source="x",
        where="x",
        images=tuple(f"{number}.png" for number in range(images)),
        turns=tuple(turns),
        system=system,
        greeting=greeting,
    )


def ours(call: Released, template: str, talk: list[Message], tiles: list[int]) -> Encoded:
    encoded = encode_sample(sample_of(talk), tiles, model_of(template), call.tokenizer)
    ids, mask = encoded.token_ids.tolist(), encoded.loss_mask.tolist()
    labels = [one if learned else IGNORED for one, learned in zip(ids, mask, strict=True)]
    return ids, labels


ODD = [
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "caf\u00e9 \N{GRINNING FACE}",
    "x = 12345;\n\treturn x",
    "<box>[[1, 2]]</box>",
]
SAID = [*ODD, *(word for word in WORDS if word != "<image>\n"), "7", "Is it so?"]


def conversation(draw: random.Random, template: str) -> list[Message]:
    """One to four turns about up to three images, of plain and odd words."""

    def words() -> str:
        chosen = draw.choices(SAID, k=draw.randint(1, 6))
        text = draw.choice([" ", "\n", ", "]).join(chosen)
        # A line end behind a role's may be one token with it: InternVL then drops the loss. Empty
        # messages have a test of their own.
        return (text.strip() or "7") + draw.choice(["", "", " ", "."])

    talk = []
    for _ in range(draw.randint(1, 4)):
        asked = "<image>\n" * draw.choice([0, 0, 1, 1, 2]) + words()
        talk += [{"from": "human", "value": asked}, {"from": "gpt", "value": words()}]
    if draw.random() < 0.2:
        talk.insert(0, {"from": "gpt", "value": words()})
    if template == "internvl2_5" and draw.random() < 0.3:
        talk.insert(0, {"from": "system", "value": words()})
    return talk


@pytest.mark.parametrize(("kind", "template"), RELEASES)
def test_released_tokenizers_give_internvls_ids_and_masks(released_of, kind, template):
    """Prevents any released model from being trained on other ids or another mask than it was."""
    call, draw = released_of(kind), random.Random(f"{kind.__name__} {template}")
    images = 0
    for _ in range(CONVERSATIONS):
        talk = conversation(draw, template)
        tiles = [draw.randint(1, 3) for _ in sample_of(talk).images]
        images += len(tiles)
        expected = internvl(
            call, template, talk, [DIGITS.vision.tokens_per_item * n for n in tiles]
        )
        assert expected is not None, f"InternVL drops the loss of {talk}"
        found = ours(call, template, talk, tiles)
        assert found[0] == expected[0], talk
        assert found[1] == expected[1], talk
    assert images > CONVERSATIONS


def talk_of(*texts: str) -> list[Message]:
    speakers = ["human", "gpt"] * (len(texts) // 2)
    return [{"from": who, "value": text} for who, text in zip(speakers, texts, strict=True)]


@pytest.mark.parametrize(("kind", "template"), RELEASES)
def test_empty_messages_are_closed_and_learned(released_of, kind, template):
    """Prevents a turn that runs into the next one, as in all of InternVL's templates but one; what
    docs/data.md says of it."""
    call = released_of(kind)
    pieces = PHI if template == "phi3-chat" else CHATML
    end = call.tokenizer.id_of(pieces.end)
    for texts in (("a", ""), ("", "b"), ("a", "", "Why?", "7")):
        talk = talk_of(*texts)
        ids, labels = ours(call, template, talk, [])
        messages = 1 + len(texts)
        assert ids.count(end) == messages
        assert labels.count(end) == len(texts) // 2
        if template == "internvl2_5":
            assert (ids, labels) == internvl(call, template, talk, [])
        else:
            assert call(pieces.prompt(SYSTEM, talk)).count(end) == messages - texts.count("")
            theirs = internvl(call, template, talk, [])
            assert (theirs is None) == (template != "internlm2-chat")
            if theirs is not None:
                assert theirs[1].count(end) == sum(map(bool, texts[1::2]))


def open_record(folder: Path, **record: object) -> Sample:
    (folder / "a.jsonl").write_text(json.dumps(record))
    (folder / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    [sample] = Annotations.open(folder / "meta.json")
    return sample


def test_image_stands_where_it_was_written(tmp_path):
    """Prevents the only image from coming before the question that it was written in, as in
    InternVL, which looks at the first message alone; what docs/data.md says of it."""
    talk = talk_of("Hello.", "Yes?", "What is <image> this?", "7")
    sample = open_record(tmp_path, image="a.png", conversations=talk)
    assert [turn.question for turn in sample.turns] == ["Hello.", "What is <image> this?"]
    talk = talk_of("Hello.", "Yes?", "What is this?", "7")
    sample = open_record(tmp_path, image="a.png", conversations=talk)
    assert [turn.question for turn in sample.turns] == ["<image>\nHello.", "What is this?"]


def test_null_is_no_image(tmp_path):
    """Prevents text from being refused for how its dataset writes that it has no image; what
    docs/data.md says of it."""
    sample = open_record(tmp_path, image=None, conversations=talk_of("Who?", "7"))
    assert sample.images == ()
    assert sample.turns[0].question == "Who?"
