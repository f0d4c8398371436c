"""Tokenize conversations, with a loss mask, by the model's chat template.

    internlm2-chat, Hermes-2   <|im_start|>user\\n{question}<|im_end|><|im_start|>assistant\\n...
    phi3-chat                  <|user|>\\n{question}<|end|><|assistant|>\\n{answer}<|end|>...
    internvl2_5, qwen2.5       like the first, with a newline after each <|im_end|>
    llama3                     <|start_header_id|>user<|end_header_id|>\\n\\n{question}<|eot_id|>...

Answers and their closing piece carry loss. The first three templates tokenize the conversation as a
single string. Its mask begins after the tokens of `assistant\\n` alone, even if a token straddles
that border (InternVL then drops the sample's loss). The others tokenize each message alone, keep a
sample's empty system message, and learn a greeting. own_template.py has the tokenizer's template.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.jinja_chat import packaged_template, render_chat
from omnibal.data.native_resolution import repeated_tokens, seen_videos
from omnibal.data.own_template import Conversation, OwnTemplate, cannot_write_error, own_template
from omnibal.data.sample import AUDIO, IMAGE, VIDEO, Sample
from omnibal.data.tokenizer import (
    AUDIO_CONTEXT,
    AUDIO_END,
    AUDIO_START,
    IMAGE_CONTEXT,
    IMAGE_END,
    IMAGE_START,
    Tokenizer,
    lacking_pieces,
)
from omnibal.model.config import ChatTemplateName, ModelConfig

_START, _END = "<|im_start|>", "<|im_end|>"
_PHI_END, _LLAMA_END = "<|end|>", "<|eot_id|>"
# InternVL's own text, full-width commas included, which released models were trained with.
_SYSTEM_MESSAGE = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"  # noqa: E501, RUF001
_SYSTEM_MESSAGE_2_5 = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"  # noqa: E501, RUF001
_QWEN_SYSTEM_MESSAGE = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedSample:
    """Token ids and loss mask of a conversation, both [tokens]."""

    token_ids: np.ndarray  # int64
    loss_mask: np.ndarray  # whether each token is a target, bool (not shifted)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Format:
    """Text and tokenization of a named template, as in InternVL."""

    file: str = "chatml"  # file in `omnibal/data/templates/`, without suffix
    system_message: str = _SYSTEM_MESSAGE
    end: str = _END  # piece that closes a message
    pieces: tuple[str, ...] = (_START, _END)  # control pieces, reserved in texts
    bos: bool | None  # whether BOS comes first, None to follow the tokenizer's settings
    strips: bool = False  # whether questions and answers are stripped in training
    strips_all: bool = False  # whether all texts are stripped, in chats too
    always_system: bool = False  # whether an absent system message is written empty
    message_by_message: bool = False

    def write(self, role: str, content: str) -> str:
        return render_chat(packaged_template(self.file), [{"role": role, "content": content}])

    @property
    def prompt(self) -> str:
        return render_chat(packaged_template(self.file), [], prompt=True)


_TEMPLATE_FORMATS: dict[ChatTemplateName, _Format] = {
    "internlm2-chat": _Format(bos=True, strips=True),
    "Hermes-2": _Format(bos=False),
    "phi3-chat": _Format(
        file="phi3",
        end=_PHI_END,
        pieces=("<|system|>", "<|user|>", "<|assistant|>", _PHI_END),
        bos=True,
    ),
    "internvl2_5": _Format(
        file="chatml_lines", system_message=_SYSTEM_MESSAGE_2_5, bos=None, message_by_message=True
    ),
    "llama3": _Format(
        file="llama3",
        system_message="",
        end=_LLAMA_END,
        pieces=("<|start_header_id|>", "<|end_header_id|>", _LLAMA_END),
        bos=True,
        strips_all=True,
        always_system=True,
        message_by_message=True,
    ),
    "qwen2.5": _Format(
        file="chatml_lines", system_message=_QWEN_SYSTEM_MESSAGE, bos=False, message_by_message=True
    ),
}


@dataclass(frozen=True, slots=True)
class _InternVLTemplate:
    """Named template for a model, with the interface of `OwnTemplate`."""

    format: _Format
    model: ModelConfig
    tokenizer: Tokenizer

    @property
    def answer_end(self) -> str:
        return self.format.end

    @property
    def strips_answers(self) -> bool:
        return self.format.strips or self.format.strips_all

    @property
    def repeated_pieces(self) -> tuple[str, ...]:
        """Pieces repeated per image or video token."""
        if self.model.images is not None:
            return repeated_tokens(self.model.images)
        return (IMAGE_CONTEXT,) if self.model.takes_images else ()

    @property
    def bos(self) -> tuple[str, ...]:
        """Piece that begins every text, if any."""
        begins = self.tokenizer.add_bos if self.format.bos is None else self.format.bos
        return (self.tokenizer.bos_piece,) if begins else ()

    @property
    def text_pieces(self) -> tuple[str, ...]:
        """Pieces reserved for the template, images and recordings."""
        images = (IMAGE_START, *self.repeated_pieces, IMAGE_END) if self.model.takes_images else ()
        audio = (AUDIO_START, AUDIO_CONTEXT, AUDIO_END) if self.model.takes_audio else ()
        return (*(images or self.repeated_pieces), *audio, *self.format.pieces)

    @property
    def control_pieces(self) -> tuple[str, ...]:
        return (*self.bos, *self.text_pieces)

    def conversation(self, sample: Sample, chatting: bool) -> Conversation:
        """Return messages; `chatting` as InternVL's `chat`: its system message, less stripping."""
        self._check(sample)
        strips = self.format.strips_all or (self.format.strips and not chatting)
        questions = [turn.question.strip() if strips else turn.question for turn in sample.turns]
        system, has_empty_turn = self.model.system_message, self.format.always_system
        system = self.format.system_message if system is None else system
        if sample.system is not None:
            system, has_empty_turn = sample.system, self.format.message_by_message
        elif chatting and self.model.chat_system_message is not None:
            system, has_empty_turn = self.model.chat_system_message, True
        system = system.strip() if self.format.strips_all else system
        if not self.format.message_by_message:
            sample = replace(sample, greeting=None)
        return Conversation.from_sample(
            sample,
            system if system or has_empty_turn else None,
            self._write_items(questions, sample),
            strips=strips,
        )

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int64 [tokens], with one per placeholder, and the loss mask, bool."""
        texts = [self.format.write(**message) for message in conversation.messages]
        apart = self.format.message_by_message
        encoded = list(map(self.tokenizer.encode, texts if apart else ["".join(texts)]))
        token_ids = np.array([number for ids in encoded for number in ids], np.int64)
        end = self.tokenizer.require_id(self.format.end)
        ends = np.flatnonzero(token_ids == end)
        if len(ends) != len(texts):
            raise self.miscount(conversation.where)
        stops = np.cumsum([len(ids) for ids in encoded]) if apart else ends + 1
        header = _count_header_tokens(self.format, self.tokenizer)
        learned = np.zeros(len(token_ids), bool)
        for answer in conversation.learned:
            # No loss on the line end after the closing piece, unless its `rstrip` removed it.
            has_line_end = token_ids[stops[answer] - 1] != end
            start = stops[answer - 1] if answer else 0
            learned[start + header : stops[answer] - has_line_end] = True
        bos = self._bos_ids()
        return np.append(bos, token_ids), np.append(np.zeros(len(bos), bool), learned)

    def encode_prompt(self, conversation: Conversation, turn: int) -> np.ndarray:
        """Return token ids before the answer of `turn`, int64 [tokens], one per placeholder."""
        asked = conversation.before_answer(turn)
        texts = [*(self.format.write(**message) for message in asked), self.format.prompt]
        texts = texts if self.format.message_by_message else ["".join(texts)]
        ids = [number for text in texts for number in self.tokenizer.encode(text)]
        return np.array([*self._bos_ids(), *ids], np.int64)

    def miscount(self, where: str, *_: int) -> UserError:
        """Return the error if token ids have more or fewer control tokens than the text."""
        return UserError(f"{where}: has control tokens in its text, as <|im_end|>; remove them")

    def _check(self, sample: Sample) -> None:
        """Raise on tools and reasoning, which the template cannot write, and on reserved pieces."""
        if sample.extras:
            name = f"chat_template {self.model.chat_template!r}"
            raise cannot_write_error(sample, sample.extras, name)
        marked = f"an image with {IMAGE}"
        if self.model.takes_audio:
            marked += f", a recording with {AUDIO}"
        self.tokenizer.check_text(sample.text, sample.where, self.text_pieces, marked)

    def _write_items(self, questions: Sequence[str], sample: Sample) -> list[str]:
        """Replace marks in questions by the template's text for images, videos and recordings."""
        rule, image = self.model.images, IMAGE_START + IMAGE_CONTEXT + IMAGE_END
        if rule is not None:
            texts = iter([video.text(rule) for video in seen_videos(sample, rule)])
            image = rule.image_text.text
            if sample.videos:
                questions = [re.sub(VIDEO, lambda mark: next(texts), text) for text in questions]
        audio = AUDIO_START + AUDIO_CONTEXT + AUDIO_END if sample.recordings else AUDIO
        return [text.replace(IMAGE, image).replace(AUDIO, audio) for text in questions]

    def _bos_ids(self) -> np.ndarray:
        return np.array([self.tokenizer.require_id(piece) for piece in self.bos], np.int64)


@lru_cache(maxsize=16)
def _count_header_tokens(form: _Format, tokenizer: Tokenizer) -> int:
    """Return the tokens of an answer before its text."""
    if form.message_by_message:
        return len(tokenizer.encode(form.prompt))
    # Encode after another message: some tokenizers treat the beginning of a text differently.
    opening = tokenizer.encode(form.end + form.prompt)
    return len(opening) - opening.index(tokenizer.require_id(form.end)) - 1


def _open_template(model: ModelConfig, tokenizer: Tokenizer) -> _InternVLTemplate | OwnTemplate:
    if model.chat_template == "tokenizer":
        return own_template(tokenizer, model.images)
    return _InternVLTemplate(_TEMPLATE_FORMATS[model.chat_template], model, tokenizer)


def chatml_texts(model: ModelConfig) -> tuple[str, str] | None:
    """Return a ChatML template's system message in chats and text after <|im_end|>, else None."""
    form = _TEMPLATE_FORMATS.get(model.chat_template)
    if form is None or form.end != _END:
        return None
    texts = (model.chat_system_message, model.system_message, form.system_message)
    message = next(text for text in texts if text is not None)
    return message, form.write("user", "").partition(_END)[2]


def check_tokenizer(model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise if the tokenizer lacks template pieces, or has more pieces than the vocabulary."""
    needed = _open_template(model, tokenizer).control_pieces
    missing = [piece for piece in needed if tokenizer.id_of(piece) is None]
    if missing:
        raise UserError(
            f"{tokenizer.path}, for chat_template {model.chat_template!r} of {model.name}: "
            f"{lacking_pieces(missing)}"
        )
    if tokenizer.vocab_size > model.language.vocab_size:
        raise UserError(
            f"{tokenizer.path} has {tokenizer.vocab_size} pieces, but {model.name} embeds "
            f"{model.language.vocab_size}; pass the model's own tokenizer or raise vocab_size"
        )


def text_sha256(model: ModelConfig, tokenizer: Tokenizer) -> str:
    """Return a hash of the tokenizer, and of its chat template if the model uses that."""
    if model.chat_template != "tokenizer":
        return tokenizer.sha256
    return hashlib.sha256(f"{tokenizer.sha256}{tokenizer.template}".encode()).hexdigest()


def answer_end(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Return the token id that closes an answer and stops generation; raises UserError."""
    end = _open_template(model, tokenizer).answer_end or tokenizer.named_pieces.get("eos_token")
    if end is None:
        raise UserError(f"{tokenizer.path}: has no eos_token; add one to tokenizer_config.json")
    return tokenizer.require_id(end)


def expected_answer(text: str, model: ModelConfig, tokenizer: Tokenizer) -> str:
    """Return an answer's text as trained on: stripped if the template strips answers."""
    return text.strip() if _open_template(model, tokenizer).strips_answers else text


def encode_sample(
    sample: Sample,
    tiles_per_image: Sequence[int],
    model: ModelConfig,
    tokenizer: Tokenizer,
    clips_per_recording: Sequence[int] = (),
) -> EncodedSample:
    """Return token ids and loss mask, with placeholders repeated by tiles and clips.

    At native resolution, `tiles_per_image` has the tokens per placeholder (`tokens_of_places`).
    """
    given = (len(tiles_per_image), len(clips_per_recording))
    needed = (image_places(sample, model), len(sample.recordings))
    if given != needed:
        raise ValueError(f"{sample.where}: counts of {given} images and recordings for {needed}")
    template = _open_template(model, tokenizer)
    token_ids, learned = template.encode(
        _make_conversation(sample, template, model, chatting=False)
    )
    where = sample.where
    repeats = _count_repeats(
        token_ids, where, tiles_per_image, clips_per_recording, template, model
    )
    return EncodedSample(
        token_ids=np.repeat(token_ids, repeats), loss_mask=np.repeat(learned, repeats)
    )


def encode_prompt(
    sample: Sample,
    turn: int,
    tiles_per_image: Sequence[int],
    model: ModelConfig,
    tokenizer: Tokenizer,
    chatting: bool = False,
    clips_per_recording: Sequence[int] = (),
) -> np.ndarray:
    """Return token ids before the answer of `turn`, with earlier reference answers, int64 [tokens].

    `encode_sample`'s begin with them, unless a token straddles the prompt's end, or `chatting`:
    InternVL's `chat` has unstripped texts and its own system message.
    """
    template = _open_template(model, tokenizer)
    conversation = _make_conversation(sample, template, model, chatting)
    token_ids = template.encode_prompt(conversation, turn)
    tiles = tiles_per_image[: image_places(sample, model, turn)]
    clips = clips_per_recording[: sample.items_until(AUDIO, turn)]
    repeats = _count_repeats(token_ids, sample.where, tiles, clips, template, model)
    return np.repeat(token_ids, repeats)


def image_places(sample: Sample, model: ModelConfig, turn: int | None = None) -> int:
    """Count image and video placeholders, up to and including question `turn` if given."""
    last = len(sample.turns) if turn is None else turn
    rule = model.images
    images = sample.items_until(IMAGE, last)
    if rule is None or not sample.videos:
        return images
    videos = seen_videos(sample, rule)[: sample.items_until(VIDEO, last)]
    return images + sum(video.count_places(rule) for video in videos)


def _make_conversation(
    sample: Sample, template: _InternVLTemplate | OwnTemplate, model: ModelConfig, chatting: bool
) -> Conversation:
    """Return a sample's messages. Raise UserError for recordings that cannot be written."""
    recordings = f"{sample.where}: has {len(sample.recordings)} recording(s)"
    if isinstance(template, OwnTemplate):
        if sample.recordings:
            raise UserError(f"{recordings}, which the chat template cannot write; choose another")
        system = model.chat_system_message if chatting else None
        return template.conversation(sample, model.system_message if system is None else system)
    if sample.recordings and not model.takes_audio:
        raise UserError(f"{recordings}, but the model has no audio encoder; leave the sample out")
    return template.conversation(sample, chatting)


def _count_repeats(
    token_ids: np.ndarray,
    where: str,
    tiles: Sequence[int],
    clips: Sequence[int],
    template: _InternVLTemplate | OwnTemplate,
    model: ModelConfig,
) -> np.ndarray:
    """Return repeats of each token, int64 [tokens]: a placeholder's tokens, 1 for others."""
    repeats, required = np.ones(len(token_ids), np.int64), template.tokenizer.require_id
    items = [
        (template.repeated_pieces, tiles, model.vision.tokens_per_item if model.takes_images else 1)
    ]
    if model.takes_audio:
        items.append(((AUDIO_CONTEXT,), clips, model.audio.tokens_per_item))
    for pieces, counts, tokens_per_item in items:
        places = np.flatnonzero(np.isin(token_ids, [required(piece) for piece in pieces]))
        if len(places) != len(counts):
            raise template.miscount(where, len(places), len(counts))
        repeats[places] = np.array(counts, np.int64) * tokens_per_item
    return repeats
