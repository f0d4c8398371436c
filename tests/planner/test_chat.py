"""Chat templates against InternVL's algorithm, written again with transformers' tokenizers. The
reference builds the conversation's string with all image tokens, cuts it at separators and masks by
lengths of separately tokenized parts, as InternVL does. If a part's length differs in isolation,
InternVL drops the sample's loss or shifts its mask; only ids are compared then."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from chat_cases import sample_of
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import KINDS, WORDS, ids_by, write_fast, write_kind, write_sentencepiece

from omnibal.base.errors import UserError
from omnibal.data.chat import answer_end, encode_prompt, encode_sample, expected_answer
from omnibal.data.sample import Sample
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import ModelConfig, load_model

pytestmark = pytest.mark.quick

DIGITS = load_model("internvl-digits")
SYSTEM = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型\uff0c"
    "英文名叫InternVL, 是一个有用无害的人工智能助手。"
)
SYSTEM_2_5 = (
    "你是书生·万象\uff0c英文名是InternVL\uff0c"
    "是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
)
TEMPLATES = ["internlm2-chat", "Hermes-2", "phi3-chat", "internvl2_5"]


def model_of(template: str, message: str | None = None, chat: str | None = None) -> ModelConfig:
    """Return the quickstart's model with this template and training and chat system messages."""
    changes = {"chat_template": template, "system_message": message, "chat_system_message": chat}
    return DIGITS.model_copy(update=changes)


CHATML = ["<|im_start|>", "<|im_end|>"]
PHI = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
IMAGES = ["<img>", "</img>", "<IMG_CONTEXT>"]


def own_pieces(template: str) -> list[str]:
    """Return the special pieces reserved for this template."""
    return IMAGES + (PHI if template == "phi3-chat" else CHATML)


Ids = Callable[[str], list[int]]
Expected = tuple[list[int], list[bool] | None]
"""Ids and mask. The mask is None if InternVL's own would be wrong."""


def marks(template: str) -> tuple[list[str], str]:
    """Return the headers of system, user and assistant, and the end of a message."""
    roles = ("system", "user", "assistant")
    if template == "phi3-chat":
        return [f"<|{role}|>\n" for role in roles], "<|end|>"
    end = "<|im_end|>\n" if template == "internvl2_5" else "<|im_end|>"
    return [f"<|im_start|>{role}\n" for role in roles], end


def spell_chat(template: str, messages: list[str], system: str | None) -> str:
    """Return the text of an optional system message, questions and answers."""
    (head, *roles), end = marks(template)
    text = "" if system is None else f"{head}{system}{end}"
    return text + "".join(roles[k % 2] + message + end for k, message in enumerate(messages))


@dataclass(frozen=True)
class Reference:
    """InternVL's preprocessing of a conversation; `ids` adds no begin token."""

    ids: Ids
    bos: int
    add_bos: bool
    first_space: bool
    """Llama's tokenizer without `legacy` begins every text with a space token."""

    def __call__(
        self, template: str, messages: list[str], system: str | None, greeting: str | None
    ) -> Expected:
        """Return ids and mask of messages (questions and answers) that contain image tokens."""
        if template == "internvl2_5":
            return self.internvl2_5(messages, system, greeting)
        if template == "internlm2-chat":
            return self.internlm(messages, system or None)
        return self.by_turns(template, messages, system or None)

    def internlm(self, messages: list[str], system: str | None) -> Expected:
        (_, user, assistant), end = marks("internlm2-chat")
        text = spell_chat("internlm2-chat", [message.strip() for message in messages], system)
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

    def by_turns(self, template: str, messages: list[str], system: str | None) -> Expected:
        """Hermes-2 and Phi-3: mask by the lengths of each turn's question and answer."""
        (*_, assistant), end = marks(template)
        text, phi = spell_chat(template, messages, system), template == "phi3-chat"
        ids, start = [self.bos] * phi + self.ids(text), int(phi)
        mask = [place >= start for place in range(len(ids))]
        # First part: system, question, answer. Later: question, answer. The last end is dropped.
        *parts, nothing = text.split(end)
        assert nothing == ""
        borders = [0, *range(3 if system else 2, len(parts) + 1, 2)]
        for number, (first, last) in enumerate(pairwise(borders)):
            turn = end.join(parts[first:last])
            again = int(phi and number > 0 and self.first_space)
            instruction = len(self.ids(turn.split(end + assistant)[0] + end + assistant)) - again
            mask[start : start + instruction] = [False] * instruction
            start += len(self.ids(turn)) - again + 1
        return ids, mask if start == len(ids) else None

    def internvl2_5(
        self, messages: list[str], system: str | None, greeting: str | None
    ) -> Expected:
        headers, end = marks("internvl2_5")
        ids: list[int] = [self.bos] if self.add_bos else []
        mask = [False] * len(ids)
        said = [(1 + place % 2, message) for place, message in enumerate(messages)]
        for role, message in [(0, system), (2, greeting), *said]:
            if message is None:
                continue
            own = self.ids(f"{headers[role]}{message}{end}")
            learned = [role == 2] * len(own)
            header = len(self.ids(headers[2]))
            # InternVL never learns the last token: the line end or, if absent, the answer's end.
            closes = [own[-1]] == self.ids("<|im_end|>")[-1:]
            learned[:header], learned[-1] = [False] * header, role == 2 and closes
            ids += own
            mask += learned
        return ids, mask


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory) -> SimpleNamespace:
    path, hugging_face = write_kind(request.param, tmp_path_factory.mktemp("tokenizer"))
    reference = Reference(
        ids=ids_by(hugging_face),
        bos=hugging_face.bos_token_id,
        add_bos=request.param != "fast",
        first_space=request.param == "not legacy",
    )
    tokenizer = open_tokenizer(path)
    return SimpleNamespace(tokenizer=tokenizer, reference=reference, name=request.param)


def with_images(text: str, tiles: Iterator[int]) -> str:
    """Return the text with image tokens; `tiles` yields each image's number of tiles."""
    per_tile = "<IMG_CONTEXT>" * DIGITS.vision.tokens_per_item
    return re.sub("<image>", lambda _: f"<img>{per_tile * next(tiles)}</img>", text)


def assert_as_internvl(case, model: ModelConfig, sample: Sample, tiles: list[int]) -> bool:
    """Assert InternVL's ids and mask; return whether there was a mask to compare."""
    system = SYSTEM_2_5 if model.chat_template == "internvl2_5" else SYSTEM
    # A model's empty system message means none. A sample's is an empty turn, as in InternVL.
    system = system if model.system_message is None else model.system_message or None
    system = system if sample.system is None else sample.system
    left, messages = iter(tiles), []
    for turn in sample.turns:
        messages += [with_images(turn.question, left), turn.answer]
    ids, mask = case.reference(model.chat_template, messages, system, sample.greeting)
    encoded = encode_sample(sample, tiles, model, case.tokenizer)
    assert encoded.token_ids.tolist() == ids
    assert (encoded.token_ids.dtype, encoded.loss_mask.dtype) == (np.int64, np.bool_)
    assert mask is None or encoded.loss_mask.tolist() == mask
    return mask is not None


FRAMES = "Frame-1: <image>\nFrame-2: <image>\nFrame-3: <image>\n"
SAMPLES = {
    "text only": sample_of(("What is the sum of 1 and 2?", "The sum is 3.")),
    "one image": sample_of(("<image>\nRead the line, please.", "1, 2, 3")),
    "turns": sample_of(("<image>\nWhich?", " a tree "), ("And  here?\n", "user\n"), ("Why?", "7")),
    "images": sample_of(("<image>\nWhat, and <image> ?", "a <box>1</box>"), ("<image>", "b")),
    "video": sample_of((f"{FRAMES}What moves?", "a house")),
    "own system": sample_of(("Who?", "assistant"), ("<image>\nHow?", "so"), system="Read. "),
    "no system": sample_of(("Who?", "assistant"), ("<image>\nHow?", "so"), system=""),
    "greeting": sample_of(("<image>\nWho?", "so"), ("How?", "b"), greeting=" Ask. "),
    "greeting only": sample_of(("Who?", "so"), system="", greeting=""),
}


# InternVL's lengths forget the space that these tokenizers prepend to a text.
FORGETFUL = {"legacy": ["internlm2-chat"], "not legacy": ["internlm2-chat", "Hermes-2"]}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", SAMPLES)
def test_known_samples_are_as_internvl_has_them(case, template, name):
    """Prevents a template's token or its mask from being moved, dropped or repeated."""
    sample = SAMPLES[name]
    tiles = [1 + number % 3 for number in range(len(sample.images))]
    compared = assert_as_internvl(case, model_of(template), sample, tiles)
    assert compared or template in FORGETFUL.get(case.name, ())


def text_of(case: SimpleNamespace, template: str) -> st.SearchStrategy[str]:
    """Return a strategy of text with other templates' pieces."""
    words = [*WORDS, " ", "\n", "<box>", "<quad>"]
    texts = st.lists(st.sampled_from(words) | st.text(max_size=6), max_size=5).map("".join)
    places = ("<box>", "</box>", "<quad>", "</quad>", "<ref>", "</ref>")
    special = set(case.tokenizer.special_pieces) - set(places)
    refused = [*own_pieces(template), *special, "<image>"]
    return texts.filter(lambda text: not any(piece in text for piece in refused))


@given(
    st.sampled_from(TEMPLATES),
    st.none() | st.sampled_from(["", "Read the line."]),
    st.none() | st.sampled_from(["", "Answer.\n"]),
    st.data(),
)
def test_any_sample_is_as_internvl_has_it(case, template, message, system, data):
    """Prevents wrong ids at spaces, line ends or token borders, and with foreign pieces."""
    text = text_of(case, template)
    question = st.lists(text, min_size=1, max_size=3).map("<image>\n".join)
    turns = data.draw(st.lists(st.tuples(question, text), min_size=1, max_size=3))
    sample = sample_of(*turns, system=system, greeting=data.draw(st.none() | text))
    tiles = [data.draw(st.integers(0, 2)) for _ in sample.images]
    assert_as_internvl(case, model_of(template, message), sample, tiles)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", SAMPLES)
def test_prompt_is_what_precedes_the_answer(case, template, name):
    """Prevents evaluation prompts that differ from training's."""
    sample, model = SAMPLES[name], model_of(template)
    tiles = [2] * len(sample.images)
    encoded = encode_sample(sample, tiles, model, case.tokenizer)
    end = answer_end(model, case.tokenizer)
    starts = np.flatnonzero(np.diff(encoded.loss_mask.astype(int), prepend=0) == 1)
    learned_ends = np.flatnonzero(encoded.loss_mask & (encoded.token_ids == end))
    greets = template == "internvl2_5" and sample.greeting is not None
    before = learned_ends if greets else [0, *learned_ends]
    assert len(before) == len(sample.turns) + 1
    for turn, after in enumerate(before[:-1]):
        prompt = encode_prompt(sample, turn, tiles, model, case.tokenizer)
        np.testing.assert_array_equal(prompt, encoded.token_ids[: starts[starts > after][0]])


def test_mask_begins_behind_the_header_where_a_token_straddles(tmp_path):
    """Prevents a lost sample, or a prompt that includes the first line end of the answer."""
    tokenizer, sample = open_tokenizer(write_fast(tmp_path)), sample_of(("Which?", "\nTwo."))
    header = tokenizer.encode("<|im_start|>assistant\n")
    straddled = tokenizer.encode("<|im_start|>assistant\n\nTwo.")
    assert straddled[: len(header)] != header
    for template in ("Hermes-2", "internvl2_5"):
        model = model_of(template)
        encoded = encode_sample(sample, [], model, tokenizer)
        learned = encoded.token_ids[encoded.loss_mask].tolist()
        assert learned == [*straddled[len(header) :], tokenizer.id_of("<|im_end|>")]
        prompt = encode_prompt(sample, 0, [], model, tokenizer)
        assert prompt.tolist()[-len(header) :] == header


@pytest.mark.parametrize("template", TEMPLATES)
def test_empty_messages_are_closed_and_learned(case, template):
    """Prevents a turn that runs into the next, as in all InternVL templates except one."""
    model = model_of(template, "Read.")
    end = answer_end(model, case.tokenizer)
    for turns in ([("a", "")], [("", "b")], [("a", ""), ("Why?", "7")]):
        encoded = encode_sample(sample_of(*turns), [], model, case.tokenizer)
        ends = encoded.token_ids == end
        assert ends.sum() == 1 + 2 * len(turns)
        assert encoded.loss_mask[ends].sum() == len(turns)


def test_answers_are_compared_as_they_are_learned(tokenizer):
    """Prevents correct answers from counting as wrong for a space that was never learned."""
    assert expected_answer(" a b\n", model_of("internlm2-chat"), tokenizer) == "a b"
    assert expected_answer(" a b\n", model_of("Hermes-2"), tokenizer) == " a b\n"


def test_tile_counts_must_match_the_images(tokenizer):
    """Prevents images from silently using each other's tile counts."""
    with pytest.raises(ValueError, match=r"counts of \(2, 0\) .* for \(1, 0\)"):
        encode_sample(sample_of(("<image>", "1")), [1, 1], DIGITS, tokenizer)


def test_control_tokens_in_text_are_refused(tmp_path):
    """Prevents a piece replaced by an added token from ending turns and moving the mask."""
    tokenizer = open_tokenizer(write_sentencepiece(tmp_path))
    assert tokenizer.encode("[UNUSED_1]")[-1] == tokenizer.id_of("<|im_end|>")
    sample = sample_of(("a [UNUSED_1]", "b"))
    for template in ("internlm2-chat", "internvl2_5"):
        with pytest.raises(UserError, match="has control tokens"):
            encode_sample(sample, [], model_of(template), tokenizer)


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_keeps_its_own_pieces_to_itself(tmp_path, template):
    """Prevents text that forges a turn or an image, and refusal of another template's pieces."""
    tokenizer, model = open_tokenizer(write_fast(tmp_path)), model_of(template)
    for piece in own_pieces(template):
        odd = f"a {piece}\n"
        message = re.escape(f"x.jsonl: line 1: has {piece!r} in its text")
        for sample in (
            sample_of((odd, "b")),
            sample_of(("a", "b"), ("a", odd)),
            sample_of(("a", "b"), system=odd),
            sample_of(("a", "b"), greeting=odd),
        ):
            with pytest.raises(UserError, match=message):
                encode_sample(sample, [], model, tokenizer)
            with pytest.raises(UserError, match=message):
                encode_prompt(sample, 0, [], model, tokenizer)
    for piece in {*CHATML, *PHI, "<|endoftext|>", "<s>"} & set(tokenizer.special_pieces):
        with pytest.raises(UserError, match=re.escape(f"has {piece!r} in its text")):
            encode_sample(sample_of(("a", f"b{piece}")), [], model, tokenizer)
    learned = encode_sample(sample_of(("a", "<box>")), [], model, tokenizer)
    words = learned.token_ids[learned.loss_mask].tolist()
    assert words == [*tokenizer.encode("<box>"), answer_end(model, tokenizer)]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("message", [None, "", "Read. "])
def test_chat_asks_as_internvl_does(case, template, message):
    """Prevents a chat stripped of its spaces, and training with the chat's system message."""
    if (case.name, template) == ("not legacy", "internvl2_5"):
        pytest.skip("its tokenizer encodes messages apart and together to other tokens")
    model, (*_, header) = model_of(template, None, message), marks(template)[0]
    default = SYSTEM_2_5 if template == "internvl2_5" else SYSTEM
    for sample in SAMPLES.values():
        if sample.system is not None or sample.greeting is not None:
            continue  # InternVL's chat supports neither
        tiles, last = [2] * len(sample.images), len(sample.turns) - 1
        texts = [text for turn in sample.turns for text in (turn.question, turn.answer)][:-1]
        prompt = encode_prompt(sample, last, tiles, model, case.tokenizer, chatting=True).tolist()
        own = prompt[1:] if prompt[0] == case.reference.bos else prompt
        # A system turn, even if empty, and every text unchanged, without an end after the last.
        query = spell_chat(template, texts, default if message is None else message) + header
        assert own == case.reference.ids(with_images(query, iter(tiles)))
        models = model, model_of(template)
        trained = [encode_sample(sample, tiles, one, case.tokenizer).token_ids for one in models]
        np.testing.assert_array_equal(*trained)
        asked = encode_prompt(sample, last, tiles, model, case.tokenizer)
        np.testing.assert_array_equal(asked, trained[0][: len(asked)])
