"""Chat templates against InternVL's algorithm, stated anew over transformers' tokenizers.

The statement builds the conversation's string with all its image tokens, cuts it at separators and
masks by the lengths of separately tokenized parts, as InternVL does. Where a part is not as long
alone as in its place, InternVL drops the sample's loss or shifts its mask; there only the ids are
compared.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from chat_cases import sample_of
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import (
    WORDS,
    LlamaNotLegacy,
    fast_of,
    ids_by,
    slow_of,
    write_fast,
    write_sentencepiece,
)

from omnibal.base.errors import UserError
from omnibal.data.chat import answer_end, as_written, encode_prompt, encode_sample
from omnibal.data.sample import Sample
from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from omnibal.model.config import ModelConfig, load_model

pytestmark = pytest.mark.quick

DIGITS = load_model("internvl-digits")
SYSTEM = (
    "\u4f60\u662f\u7531\u4e0a\u6d77\u4eba\u5de5\u667a\u80fd\u5b9e\u9a8c\u5ba4\u8054\u5408\u5546"
    "\u6c64\u79d1\u6280\u5f00\u53d1\u7684\u4e66\u751f\u591a\u6a21\u6001\u5927\u6a21\u578b\uff0c"
    "\u82f1\u6587\u540d\u53ebInternVL, \u662f\u4e00\u4e2a\u6709\u7528\u65e0\u5bb3\u7684\u4eba\u5de5"
    "\u667a\u80fd\u52a9\u624b\u3002"
)
SYSTEM_2_5 = (
    "\u4f60\u662f\u4e66\u751f\u00b7\u4e07\u8c61\uff0c\u82f1\u6587\u540d\u662fInternVL\uff0c"
    "\u662f\u7531\u4e0a\u6d77\u4eba\u5de5\u667a\u80fd\u5b9e\u9a8c\u5ba4\u3001\u6e05\u534e\u5927\u5b66"
    "\u53ca\u591a\u5bb6\u5408\u4f5c\u5355\u4f4d\u8054\u5408\u5f00\u53d1\u7684\u591a\u6a21\u6001\u5927"
    "\u8bed\u8a00\u6a21\u578b\u3002"
)
TEMPLATES = ["internlm2-chat", "Hermes-2", "phi3-chat", "internvl2_5"]


def model_of(
    template: str, system_message: str | None = None, chat_system_message: str | None = None
) -> ModelConfig:
    changes = {
        "chat_template": template,
        "system_message": system_message,
        "chat_system_message": chat_system_message,
    }
    return DIGITS.model_copy(update=changes)


CHATML = ["<|im_start|>", "<|im_end|>"]
PHI = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
IMAGES = ["<img>", "</img>", "<IMG_CONTEXT>"]


def own_pieces(template: str) -> list[str]:
    """What only this template may write."""
    return IMAGES + (PHI if template == "phi3-chat" else CHATML)


Ids = Callable[[str], list[int]]
Expected = tuple[list[int], list[bool] | None]
"""Ids and mask, or no mask where InternVL's own would be wrong."""


@dataclass(frozen=True)
class Reference:
    """InternVL's preprocessing of one conversation; `ids` adds no begin token."""

    ids: Ids
    bos: int
    add_bos: bool
    first_space: bool
    """Llama's tokenizer without `legacy` begins every text with a token for a space."""

    def __call__(
        self, template: str, messages: list[str], system: str | None, greeting: str | None
    ) -> Expected:
        """Of a system message, then questions and answers, with image tokens."""
        if template == "internvl2_5":
            return self.internvl2_5(messages, system, greeting)
        by_name = {
            "internlm2-chat": self.internlm,
            "Hermes-2": self.hermes,
            "phi3-chat": self.phi,
        }
        return by_name[template](messages, system or "")

    def internlm(self, messages: list[str], system: str) -> Expected:
        user, assistant, end = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
        text = f"<|im_start|>system\n{system}{end}" if system else ""
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            text += f"{user}{asked.strip()}{end}{assistant}{answered.strip()}{end}"
        ids = [self.bos, *self.ids(text)]
        first, *middle, last = text.split(assistant)
        mask = [False] * (1 + len(self.ids(first + assistant)))
        sound = True
        for part in [*middle, last]:
            answer, *questions = part.split(user)
            asked = "".join(user + question + assistant for question in questions)
            for before, words, learned in ((assistant, answer, True), (end, asked, False)):
                alone = len(self.ids(words))
                sound = sound and alone == len(self.ids(before + words)) - len(self.ids(before))
                mask += [learned] * alone
        assert len(mask) == len(ids) or not sound
        return ids, mask if sound else None

    def turns_of(self, text: str, end: str, system: str) -> list[str]:
        """System, question and answer; then questions and answers. Without the last end."""
        parts = text.split(end)
        assert parts.pop() == ""
        first = 3 if system else 2
        borders = [0, *range(first, len(parts) + 1, 2)]
        return [end.join(parts[a:b]) for a, b in pairwise(borders)]

    def hermes(self, messages: list[str], system: str) -> Expected:
        user, assistant, end = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
        text = f"<|im_start|>system\n{system}{end}" if system else ""
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            text += f"{user}{asked}{end}{assistant}{answered}{end}"
        ids = self.ids(text)
        mask = [True] * len(ids)
        start = 0
        for turn in self.turns_of(text, end, system):
            instruction = len(self.ids(turn.split(end + assistant)[0] + end + assistant))
            mask[start : start + instruction] = [False] * instruction
            start += len(self.ids(turn)) + 1
        return ids, mask if start == len(ids) else None

    def phi(self, messages: list[str], system: str) -> Expected:
        user, assistant, end = "<|user|>\n", "<|assistant|>\n", "<|end|>"
        text = f"<|system|>\n{system}{end}" if system else ""
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            text += f"{user}{asked}{end}{assistant}{answered}{end}"
        ids = [self.bos, *self.ids(text)]
        mask = [True] * len(ids)
        mask[0] = False
        start = 1
        for number, turn in enumerate(self.turns_of(text, end, system)):
            again = 1 if number and self.first_space else 0
            instruction = len(self.ids(turn.split(end + assistant)[0] + end + assistant)) - again
            mask[start : start + instruction] = [False] * instruction
            start += len(self.ids(turn)) - again + 1
        unlearned = self.ids("<|endoftext|>")[-1]
        mask = [learned and one != unlearned for one, learned in zip(ids, mask, strict=True)]
        return ids, mask if start == len(ids) else None

    def internvl2_5(
        self, messages: list[str], system: str | None, greeting: str | None
    ) -> Expected:
        ids: list[int] = [self.bos] if self.add_bos else []
        mask = [False] * len(ids)
        roles = ["user", "assistant"] * (len(messages) // 2)
        if greeting is not None:
            roles, messages = ["assistant", *roles], [greeting, *messages]
        if system is not None:
            roles, messages = ["system", *roles], [system, *messages]
        for role, message in zip(roles, messages, strict=True):
            own = self.ids(f"<|im_start|>{role}\n{message}<|im_end|>\n")
            learned = [False] * len(own)
            if role == "assistant":
                learned = [True] * len(own)
                header = len(self.ids("<|im_start|>assistant\n"))
                learned[:header] = [False] * header
                learned[-1] = False
            ids += own
            mask += learned
        return ids, mask


@dataclass(frozen=True)
class Case:
    tokenizer: Tokenizer
    reference: Reference
    name: str


@pytest.fixture(scope="module", params=["legacy", "no dummy prefix", "not legacy", "fast"])
def case(request, tmp_path_factory) -> Case:
    folder, name = tmp_path_factory.mktemp("tokenizer"), request.param
    if name == "fast":
        path = write_fast(folder)
        hugging_face = fast_of(path)
    elif name == "not legacy":
        llama = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
        path = write_sentencepiece(folder, rstrip=True, **llama)
        hugging_face = slow_of(path, LlamaNotLegacy, legacy=False)
    else:
        path = write_sentencepiece(folder, dummy_prefix=name == "legacy")
        hugging_face = slow_of(path)
    reference = Reference(
        ids=ids_by(hugging_face),
        bos=hugging_face.bos_token_id,
        add_bos=name != "fast",
        first_space=name == "not legacy",
    )
    return Case(open_tokenizer(path), reference, name)


def with_images(text: str, tiles: list[int]) -> str:
    for count in tiles:
        context = "<IMG_CONTEXT>" * (count * DIGITS.vision.tokens_per_item)
        text = text.replace("<image>", f"<img>{context}</img>", 1)
    return text


def expected_of(case: Case, model: ModelConfig, sample: Sample, tiles: list[int]) -> Expected:
    system = SYSTEM_2_5 if model.chat_template == "internvl2_5" else SYSTEM
    # Of the model, an empty one is none; of a sample, it is InternVL's own empty turn.
    system = system if model.system_message is None else model.system_message or None
    system = system if sample.system is None else sample.system
    left, messages = list(tiles), []
    for turn in sample.turns:
        images = turn.question.count("<image>")
        messages += [with_images(turn.question, left[:images]), turn.answer]
        left = left[images:]
    return case.reference(model.chat_template, messages, system, sample.greeting)


def assert_as_internvl(case: Case, model: ModelConfig, sample: Sample, tiles: list[int]) -> bool:
    """Whether there was a mask to compare."""
    ids, mask = expected_of(case, model, sample, tiles)
    encoded = encode_sample(sample, tiles, model, case.tokenizer)
    assert encoded.token_ids.tolist() == ids
    assert (encoded.token_ids.dtype, encoded.loss_mask.dtype) == (np.int64, np.bool_)
    if mask is not None:
        assert encoded.loss_mask.tolist() == mask
    return mask is not None


FRAMES = "Frame-1: <image>\nFrame-2: <image>\nFrame-3: <image>\n"
SAMPLES = {
    "text only": sample_of(("What is the sum of 1 and 2?", "The sum is 3.")),
    "one image": sample_of(("<image>\nRead the line, please.", "1, 2, 3")),
    "turns": sample_of(("<image>\nWhich?", " a tree "), ("And  here?\n", "user\n"), ("Why?", "7")),
    "images": sample_of(("<image>\nWhat, and <image> ?", "a <box>1</box>"), ("<image>", "b")),
    "video": sample_of((f"{FRAMES}What moves?", "a house<|endoftext|>")),
    "own system": sample_of(("Who?", "assistant"), ("<image>\nHow?", "so"), system="Read. "),
    "no system": sample_of(("Who?", "assistant"), ("<image>\nHow?", "so"), system=""),
    "greeting": sample_of(("<image>\nWho?", "so"), ("How?", "b"), greeting=" Ask. "),
    "greeting only": sample_of(("Who?", "so"), system="", greeting=""),
}


def skip_lost_line_ends(case: Case, template: str) -> None:
    if (case.name, template) == ("not legacy", "internvl2_5"):
        pytest.skip("its added tokens take away the line end that closes a message")


# The space that these tokenizers put before a text is what InternVL's lengths forget there.
FORGETFUL = {"legacy": ["internlm2-chat"], "not legacy": ["internlm2-chat", "Hermes-2"]}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", SAMPLES)
def test_known_samples_are_as_internvl_has_them(case, template, name):
    """Prevents any token of a template or its mask from being moved, dropped or doubled."""
    sample = SAMPLES[name]
    tiles = [1 + number % 3 for number in range(len(sample.images))]
    compared = assert_as_internvl(case, model_of(template), sample, tiles)
    assert compared or template in FORGETFUL.get(case.name, ())


def text_of(template: str) -> st.SearchStrategy[str]:
    """Any text, and what other templates write."""
    others = PHI[1:] if template != "phi3-chat" else ["<|im_start|>", "<|im_end|>"]
    words = [*WORDS, " ", "\n", "<s>", "<box>", "<quad>", "<|endoftext|>", *others]
    refused = [*own_pieces(template), "<image>"]
    return (
        st.lists(st.sampled_from(words) | st.text(max_size=6), max_size=5)
        .map("".join)
        .filter(lambda text: not any(piece in text for piece in refused))
    )


@given(
    st.sampled_from(TEMPLATES),
    st.none() | st.sampled_from(["", "Read the line."]),
    st.none() | st.sampled_from(["", "Answer.\n"]),
    st.data(),
)
def test_any_sample_is_as_internvl_has_it(case, template, message, system, data):
    """Prevents what only odd texts show: spaces at borders, line ends, tokens across the border,
    and other templates' pieces, which are text or tokens as the tokenizer has them."""
    text = text_of(template)
    question = st.lists(text, min_size=1, max_size=3).map("<image>\n".join)
    turns = data.draw(st.lists(st.tuples(question, text), min_size=1, max_size=3))
    sample = sample_of(*turns, system=system, greeting=data.draw(st.none() | text))
    tiles = [data.draw(st.integers(0, 2)) for _ in sample.images]
    assert_as_internvl(case, model_of(template, message), sample, tiles)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", SAMPLES)
def test_prompt_is_what_precedes_the_answer(case, template, name):
    """Prevents evaluation from asking in other words than training did."""
    skip_lost_line_ends(case, template)
    sample, model = SAMPLES[name], model_of(template)
    tiles = [2] * len(sample.images)
    encoded = encode_sample(sample, tiles, model, case.tokenizer)
    end = answer_end(model, case.tokenizer)
    previous = np.concatenate([[False], encoded.loss_mask[:-1]])
    starts = np.flatnonzero(encoded.loss_mask & ~previous)
    learned_ends = np.flatnonzero(encoded.loss_mask & (encoded.token_ids == end))
    greets = template == "internvl2_5" and sample.greeting is not None
    before = learned_ends if greets else [0, *learned_ends]
    assert len(before) == len(sample.turns) + 1
    for turn, after in enumerate(before[:-1]):
        prompt = encode_prompt(sample, turn, tiles, model, case.tokenizer)
        np.testing.assert_array_equal(prompt, encoded.token_ids[: starts[starts > after][0]])


def test_mask_begins_behind_the_header_where_a_token_straddles(tmp_path):
    """Prevents a lost sample, or a prompt that holds the first line end of the answer."""
    tokenizer = open_tokenizer(write_fast(tmp_path))
    header = tokenizer.encode("<|im_start|>assistant\n")
    straddled = tokenizer.encode("<|im_start|>assistant\n\nTwo.")
    assert straddled[: len(header)] != header
    sample = sample_of(("Which?", "\nTwo."))
    for template in ("Hermes-2", "internvl2_5"):
        model = model_of(template)
        encoded = encode_sample(sample, [], model, tokenizer)
        learned = encoded.token_ids[encoded.loss_mask].tolist()
        assert learned == [*straddled[len(header) :], tokenizer.id_of("<|im_end|>")]
        prompt = encode_prompt(sample, 0, [], model, tokenizer)
        assert prompt.tolist()[-len(header) :] == header


def runs(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Token ids of each unbroken stretch of the mask."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [ids[start:end].tolist() for start, end in borders.reshape(-1, 2)]


def test_quickstarts_template_spelled_out(tokenizer):
    """Prevents other ids than every piece gives alone: the quickstart's model knows those."""
    sample = sample_of(("<image>\nWhich digit is <image> this?", "7"), ("Read the line.\n", "3 1 "))
    encoded = encode_sample(sample, [1, 2], DIGITS, tokenizer)
    text, piece = tokenizer.encode, tokenizer.id_of
    start, end = piece("<|im_start|>"), piece("<|im_end|>")

    def image(tiles):
        context = [piece("<IMG_CONTEXT>")] * (tiles * DIGITS.vision.tokens_per_item)
        return [piece("<img>"), *context, piece("</img>")]

    expected = [
        *[piece("<s>"), start, *text("user\n"), *image(1), *text("\nWhich digit is "), *image(2)],
        *[*text(" this?"), end, *text("\n"), start, *text("assistant\n"), *text("7"), end],
        *[*text("\n"), start, *text("user\n"), *text("Read the line.\n"), end, *text("\n")],
        *[start, *text("assistant\n"), *text("3 1 "), end, *text("\n")],
    ]
    assert encoded.token_ids.tolist() == expected
    assert runs(encoded.token_ids, encoded.loss_mask) == [[*text("7"), end], [*text("3 1 "), end]]


@pytest.mark.parametrize("template", TEMPLATES)
def test_empty_messages_are_closed_and_learned(case, template):
    """Prevents a turn that runs into the next one, as in all of InternVL's templates but one; what
    docs/data.md says of it."""
    skip_lost_line_ends(case, template)
    model = model_of(template, "Read.")
    end = answer_end(model, case.tokenizer)
    for turns in ([("a", "")], [("", "b")], [("a", ""), ("Why?", "7")]):
        encoded = encode_sample(sample_of(*turns), [], model, case.tokenizer)
        ends = encoded.token_ids == end
        assert ends.sum() == 1 + 2 * len(turns)
        assert encoded.loss_mask[ends].sum() == len(turns)


def test_answers_are_compared_as_they_are_learned():
    """Prevents correct answers from counting as wrong for a space that was never learned."""
    assert as_written(" a b\n", model_of("internlm2-chat")) == "a b"
    assert as_written(" a b\n", model_of("Hermes-2")) == " a b\n"


def test_tile_counts_must_match_the_images(tokenizer):
    """Prevents images from silently taking each other's tiles."""
    with pytest.raises(ValueError, match=r"of 2 image\(s\) .* were given for 1"):
        encode_sample(sample_of(("<image>", "1")), [1, 1], DIGITS, tokenizer)


def test_control_tokens_in_text_are_refused(tmp_path):
    """Prevents a piece that an added token replaced from ending turns and moving the mask."""
    tokenizer = open_tokenizer(write_sentencepiece(tmp_path))
    assert tokenizer.encode("[UNUSED_1]")[-1] == tokenizer.id_of("<|im_end|>")
    sample = sample_of(("a [UNUSED_1]", "b"))
    for template in ("internlm2-chat", "internvl2_5"):
        with pytest.raises(UserError, match="makes control tokens"):
            encode_sample(sample, [], model_of(template), tokenizer)


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_keeps_its_own_pieces_to_itself(tmp_path, template):
    """Prevents a text of a sample from writing a turn or an image, and what another template would
    write from being refused."""
    tokenizer, model = open_tokenizer(write_fast(tmp_path)), model_of(template)
    for piece in own_pieces(template):
        odd = f"a {piece}\n"
        for sample in (
            sample_of((odd, "b")),
            sample_of(("a", "b"), ("a", odd)),
            sample_of(("a", "b"), system=odd),
            sample_of(("a", "b"), greeting=odd),
        ):
            message = re.escape(f"x.jsonl: line 1: has {piece!r} in its text")
            with pytest.raises(UserError, match=message):
                encode_sample(sample, [], model, tokenizer)
            with pytest.raises(UserError, match=message):
                encode_prompt(sample, 0, [], model, tokenizer)
    for piece in {*CHATML, *PHI} - set(own_pieces(template)):
        sample = sample_of((f"a {piece} b", f"{piece}"))
        learned = encode_sample(sample, [], model, tokenizer)
        words = learned.token_ids[learned.loss_mask].tolist()
        assert words == [tokenizer.id_of(piece), answer_end(model, tokenizer)]


def chat_query(template: str, message: str | None, texts: list[str], tiles: list[int]) -> str:
    """What InternVL's `chat` gives the tokenizer: a system turn, be it empty, and every text as it
    is, without an end behind the last."""
    phi = template == "phi3-chat"
    roles = PHI[1:3] if phi else [CHATML[0] + "user", CHATML[0] + "assistant"]
    first, end = (PHI[0], PHI[3]) if phi else (CHATML[0] + "system", CHATML[1])
    end += "\n" * (template == "internvl2_5")
    default = SYSTEM_2_5 if template == "internvl2_5" else SYSTEM
    query = f"{first}\n{default if message is None else message}{end}"
    for place, text in enumerate(texts):
        query += f"{roles[place % 2]}\n{text}{end}"
    return with_images(query + f"{roles[1]}\n", tiles)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("message", [None, "", "Read. "])
def test_chat_asks_as_internvl_does(case, template, message):
    """Prevents a chat from asking in other words than InternVL's: stripped of its spaces, which
    only training is, or after the system message of training."""
    skip_lost_line_ends(case, template)
    model = model_of(template, None, message)
    for sample in SAMPLES.values():
        if sample.system is not None or sample.greeting is not None:
            continue  # InternVL's chat is given neither
        tiles = [2] * len(sample.images)
        last = len(sample.turns) - 1
        texts = [text for turn in sample.turns for text in (turn.question, turn.answer)][:-1]
        prompt = encode_prompt(sample, last, tiles, model, case.tokenizer, chatting=True).tolist()
        own = prompt[1:] if prompt[0] == case.reference.bos else prompt
        assert own == case.reference.ids(chat_query(template, message, texts, tiles))


def test_training_does_not_take_the_message_of_chats(tokenizer):
    """Prevents a model from being trained after a system message that InternVL's training, and so
    the released model, never saw."""
    sample = sample_of(("Who?", "7"))
    for template in ("internlm2-chat", "internvl2_5"):
        plain, chats = model_of(template), model_of(template, None, "Read.")
        prompts = [encode_prompt(sample, 0, [], model, tokenizer) for model in (plain, chats)]
        np.testing.assert_array_equal(*prompts)
        ids = [encode_sample(sample, [], model, tokenizer).token_ids for model in (plain, chats)]
        np.testing.assert_array_equal(*ids)
        assert len(encode_prompt(sample, 0, [], chats, tokenizer, chatting=True)) < len(prompts[0])
