"""Tokenize conversations with a loss mask, by the model's chat template.

    internlm2-chat, Hermes-2   <|im_start|>user\\n{question}<|im_end|><|im_start|>assistant\\n...
    phi3-chat                  <|user|>\\n{question}<|end|><|assistant|>\\n{answer}<|end|>...
    internvl2_5, qwen2.5       like the first, with a newline after each <|im_end|>
    llama3                     <|start_header_id|>user<|end_header_id|>\\n\\n{question}<|eot_id|>...

Answers and their closing piece carry loss. The first three templates tokenize the conversation as a
single string. Its mask begins after the tokens of `assistant\\n` alone, even if a token straddles
that border (InternVL drops the loss of some samples). Other templates tokenize each message alone,
keep an empty system message, and learn a greeting before the first question.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.jinja_chat import packaged_template, render_chat
from omnibal.data.native_resolution import repeated_tokens, text_places
from omnibal.data.own_template import encode_conversation, encode_own_prompt, own_template
from omnibal.data.sample import AUDIO, IMAGE, VIDEO, Sample
from omnibal.data.shown import seen_videos
from omnibal.data.tokenizer import (
    AUDIO_CONTEXT,
    AUDIO_END,
    AUDIO_START,
    IMAGE_CONTEXT,
    IMAGE_END,
    IMAGE_START,
    Tokenizer,
    lacking,
)
from omnibal.model.config import ChatTemplate, ModelConfig

_START, _END = "<|im_start|>", "<|im_end|>"
_PHI_END, _LLAMA_END = "<|end|>", "<|eot_id|>"
# InternVL's own text, full-width commas included, which released models were trained with.
_SYSTEM_MESSAGE = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"  # noqa: E501, RUF001
_SYSTEM_MESSAGE_2_5 = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"  # noqa: E501, RUF001
_QWEN_SYSTEM_MESSAGE = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedSample:
    """Token ids and loss mask of a conversation, both [tokens]."""

    token_ids: np.ndarray
    """int64."""
    loss_mask: np.ndarray
    """Whether each token is a target, bool (not shifted)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Template:
    file: str = "chatml"
    """File in `omnibal/data/templates/`, without suffix."""
    system_message: str = _SYSTEM_MESSAGE
    end: str = _END
    """Piece that closes a message."""
    pieces: tuple[str, ...] = (_START, _END)
    bos: bool | None
    """Whether BOS comes first, None to follow the tokenizer's settings."""
    strips: bool = False
    """Whether questions and answers are stripped in training."""
    strips_all: bool = False
    """Whether all texts are stripped, in chats too."""
    always_system: bool = False
    """Whether an empty system message is written if a sample has no system message."""
    message_by_message: bool = False

    def write_message(self, role: str, content: str) -> str:
        message = {"role": role, "content": content}
        return render_chat(packaged_template(self.file), [message])

    @property
    def prompt(self) -> str:
        return render_chat(packaged_template(self.file), [], prompt=True)


_TEMPLATES: dict[ChatTemplate, _Template] = {
    "internlm2-chat": _Template(bos=True, strips=True),
    "Hermes-2": _Template(bos=False),
    "phi3-chat": _Template(
        file="phi3",
        end=_PHI_END,
        pieces=("<|system|>", "<|user|>", "<|assistant|>", _PHI_END),
        bos=True,
    ),
    "internvl2_5": _Template(
        file="chatml_lines", system_message=_SYSTEM_MESSAGE_2_5, bos=None, message_by_message=True
    ),
    "llama3": _Template(
        file="llama3",
        system_message="",
        end=_LLAMA_END,
        pieces=("<|start_header_id|>", "<|end_header_id|>", _LLAMA_END),
        bos=True,
        strips_all=True,
        always_system=True,
        message_by_message=True,
    ),
    "qwen2.5": _Template(
        file="chatml_lines", system_message=_QWEN_SYSTEM_MESSAGE, bos=False, message_by_message=True
    ),
}


def chatml_texts(model: ModelConfig) -> tuple[str, str] | None:
    """Return the system message of chats and the text behind <|im_end|>, or None for a template
    with other marks."""
    template = None if _is_own(model) else _TEMPLATES[model.chat_template]
    if template is None or template.end != _END:
        return None
    given = (model.chat_system_message, model.system_message, template.system_message)
    message = next(each for each in given if each is not None)
    return message, template.write_message("user", "").partition(_END)[2]


def check_tokenizer(model: ModelConfig, tokenizer: Tokenizer) -> None:
    if _is_own(model):
        needed = own_template(tokenizer, model.images).control_pieces
    else:
        needed = (*_bos_pieces(_TEMPLATES[model.chat_template], tokenizer), *_pieces(model))
    missing = [piece for piece in needed if tokenizer.id_of(piece) is None]
    if missing:
        raise UserError(
            f"{tokenizer.path}, for chat_template {model.chat_template!r} of {model.name}: "
            f"{lacking(missing)}"
        )
    if tokenizer.vocab_size > model.language.vocab_size:
        raise UserError(
            f"{tokenizer.path} has {tokenizer.vocab_size} pieces, but {model.name} embeds "
            f"{model.language.vocab_size}; pass the model's own tokenizer or raise vocab_size"
        )


def _is_own(model: ModelConfig) -> bool:
    return model.chat_template == "tokenizer"


def text_sha256(model: ModelConfig, tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer files that determine token ids."""
    if not _is_own(model):
        return tokenizer.sha256
    return hashlib.sha256(f"{tokenizer.sha256}{tokenizer.template}".encode()).hexdigest()


def answer_end(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """Id that closes an answer and stops generation."""
    if _is_own(model):
        piece = own_template(tokenizer, model.images).answer_end or tokenizer.named_pieces.get(
            "eos_token"
        )
        if piece is None:
            raise UserError(
                f"{tokenizer.path}: neither closes its chat template an answer, nor is there an "
                "eos_token; add one to tokenizer_config.json"
            )
        return tokenizer.required(piece)
    return tokenizer.required(_TEMPLATES[model.chat_template].end)


def expected_answer(text: str, model: ModelConfig, tokenizer: Tokenizer) -> str:
    """Answer text as a trained model would generate it."""
    if _is_own(model):
        return text.strip() if own_template(tokenizer, model.images).strips_answers else text
    return as_written(text, model)


def as_written(text: str, model: ModelConfig) -> str:
    """Question or answer after the template's stripping."""
    template = _TEMPLATES[model.chat_template]
    return text.strip() if template.strips or template.strips_all else text


def _pieces(model: ModelConfig) -> tuple[str, ...]:
    """Pieces reserved for the template, images and recordings."""
    images: tuple[str, ...] = ()
    if model.takes_images:
        images = (IMAGE_START, IMAGE_CONTEXT, IMAGE_END)
    elif model.images is not None:
        images = repeated_tokens(model.images)
    recordings = (AUDIO_START, AUDIO_CONTEXT, AUDIO_END) if model.takes_audio else ()
    return (*images, *recordings, *_TEMPLATES[model.chat_template].pieces)


def encode_sample(
    sample: Sample,
    tiles_per_image: Sequence[int],
    model: ModelConfig,
    tokenizer: Tokenizer,
    clips_per_recording: Sequence[int] = (),
) -> EncodedSample:
    """Encode a conversation, with each image repeated by its tiles and each recording by its clips.

    At native resolution, `tiles_per_image` holds tokens per image or video segment, minimum 1.
    """
    given = (len(tiles_per_image), len(clips_per_recording))
    needed = (image_places(sample, model), len(sample.recordings))
    if given != needed:
        raise ValueError(
            f"{sample.where}: tiles of {given[0]} image(s) and clips of {given[1]} recording(s) "
            f"were given for {needed[0]} and {needed[1]}"
        )
    if _is_own(model):
        _check_recordings(sample, model, own=True)
        places = _tokens_per_image(tiles_per_image, model)
        own = own_template(tokenizer, model.images)
        token_ids, loss_mask = encode_conversation(sample, places, model.system_message, own)
        return EncodedSample(token_ids=token_ids, loss_mask=loss_mask)
    template = _TEMPLATES[model.chat_template]
    messages = _messages(sample, model, tokenizer, chatting=False)
    apart = template.message_by_message
    encoded = list(map(tokenizer.encode, messages if apart else ["".join(messages)]))
    token_ids = np.array([number for ids in encoded for number in ids], np.int64)
    end = tokenizer.required(template.end)
    ends = np.flatnonzero(token_ids == end)
    if len(ends) != len(messages):
        raise _control_tokens(sample)
    stops = np.cumsum([len(ids) for ids in encoded]) if apart else ends + 1
    header = _header_tokens(template, tokenizer)
    loss_mask = np.zeros(len(token_ids), bool)
    for answer in _answers(sample, messages, template):
        # A piece with `rstrip` takes the line end away.
        has_line_end = token_ids[stops[answer] - 1] != end
        start = stops[answer - 1] if answer else 0
        loss_mask[start + header : stops[answer] - has_line_end] = True
    before, contexts = _item_tokens(
        token_ids, tiles_per_image, clips_per_recording, model, tokenizer, sample
    )
    token_ids = np.insert(token_ids, before, contexts)
    loss_mask = np.insert(loss_mask, before, False)
    bos = _bos(template, tokenizer)
    return EncodedSample(
        token_ids=np.concatenate([bos, token_ids]),
        loss_mask=np.concatenate([np.zeros(len(bos), bool), loss_mask]),
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
    """Token ids before the answer of `turn`, with earlier reference answers, int64 [tokens].

    Equal to the start of the whole conversation unless a token straddles the prompt's end.

    Args:
        chatting: use InternVL's `chat` prompt: unstripped texts and the chat system message.
    """
    if _is_own(model):
        shown = tiles_per_image[: image_places(sample, model, turn)]
        system = model.system_message
        if chatting and model.chat_system_message is not None:
            system = model.chat_system_message
        tokens = _tokens_per_image(shown, model)
        return encode_own_prompt(
            sample, turn, tokens, system, own_template(tokenizer, model.images)
        )
    template = _TEMPLATES[model.chat_template]
    messages = _messages(sample, model, tokenizer, chatting)
    asked = messages[: len(messages) - 2 * (len(sample.turns) - turn) + 1]
    texts = [*asked, template.prompt]
    if not template.message_by_message:
        texts = ["".join(texts)]
    token_ids = np.array([number for text in texts for number in tokenizer.encode(text)], np.int64)
    tiles = tiles_per_image[: image_places(sample, model, turn)]
    clips = clips_per_recording[: sample.items_until(AUDIO, turn)]
    token_ids = np.insert(
        token_ids, *_item_tokens(token_ids, tiles, clips, model, tokenizer, sample)
    )
    return np.concatenate([_bos(template, tokenizer), token_ids])


def image_places(sample: Sample, model: ModelConfig, turn: int | None = None) -> int:
    """Count image placeholders in the text, up to and including `turn` if given."""
    last = len(sample.turns) if turn is None else turn
    rule = model.images
    images = sample.items_until(IMAGE, last)
    if rule is None or not sample.videos:
        return images
    videos = seen_videos(sample, rule)[: sample.items_until(VIDEO, last)]
    return images + sum(text_places(video.frames, rule) for video in videos)


def _with_images(questions: Sequence[str], sample: Sample, model: ModelConfig) -> list[str]:
    """Questions with the template's text for images and videos."""
    rule = model.images
    if rule is None:
        return [question.replace(IMAGE, IMAGE_START + IMAGE_END) for question in questions]
    texts = iter([video.text(rule) for video in seen_videos(sample, rule)])
    if sample.videos:
        questions = [re.sub(VIDEO, lambda mark: next(texts), question) for question in questions]
    return [question.replace(IMAGE, rule.image_text.text) for question in questions]


def _messages(
    sample: Sample, model: ModelConfig, tokenizer: Tokenizer, chatting: bool
) -> list[str]:
    """System message, greeting, questions and answers, in order."""
    template = _TEMPLATES[model.chat_template]
    _check_recordings(sample, model)
    _check_tools(sample, model)
    texts = [sample.system or "", sample.greeting or ""]
    texts += [text for turn in sample.turns for text in (turn.question, turn.answer)]
    marked = f"an image with {IMAGE}"
    if model.takes_audio:
        marked += f", a recording with {AUDIO}"
    tokenizer.check_text("\n".join(texts), sample.where, _pieces(model), marked)
    system = _system(sample, model, chatting)
    messages = [] if system is None else [template.write_message("system", system)]
    if _greets(sample, template):
        greeting = as_written(sample.greeting or "", model)
        messages.append(template.write_message("assistant", greeting))
    questions = [turn.question for turn in sample.turns]
    answers = [turn.answer for turn in sample.turns]
    if not chatting or template.strips_all:
        questions, answers = (
            [as_written(text, model) for text in texts] for texts in (questions, answers)
        )
    questions = _with_images(questions, sample, model)
    for question, answered in zip(questions, answers, strict=True):
        if sample.recordings:
            question = question.replace(AUDIO, AUDIO_START + AUDIO_END)
        messages.append(template.write_message("user", question))
        messages.append(template.write_message("assistant", answered))
    return messages


def _tokens_per_image(items: Sequence[int], model: ModelConfig) -> list[int]:
    if not items:
        return []
    per_item = model.encoders["vision"].tokens_per_item
    return [count * per_item for count in items]


def _system(sample: Sample, model: ModelConfig, chatting: bool) -> str | None:
    """System message, empty for an empty turn, None without a system turn."""
    template = _TEMPLATES[model.chat_template]
    given = template.system_message if model.system_message is None else model.system_message
    has_empty_turn = template.always_system
    if sample.system is not None:
        given, has_empty_turn = sample.system, template.message_by_message
    elif chatting and model.chat_system_message is not None:
        given, has_empty_turn = model.chat_system_message, True
    given = given.strip() if template.strips_all else given
    return given if given or has_empty_turn else None


def _check_recordings(sample: Sample, model: ModelConfig, own: bool = False) -> None:
    """Raise if a recording is given but the model or template cannot use it."""
    if sample.recordings and own:
        raise UserError(
            f"{sample.where}: has {len(sample.recordings)} recording(s), which the tokenizer's own "
            "chat template is not known to write; choose another chat_template"
        )
    if sample.recordings and not model.takes_audio:
        raise UserError(
            f"{sample.where}: has {len(sample.recordings)} recording(s), but the model has no "
            "encoder for them; leave the sample out, or choose a model with an audio encoder"
        )


def _check_tools(sample: Sample, model: ModelConfig) -> None:
    """Raise if a sample uses tools, which these templates do not support."""
    calls = any(turn.calls or turn.results for turn in sample.turns)
    reasons = any(turn.reasoning is not None for turn in sample.turns)
    given = [*["tools"] * (sample.tools is not None or calls), *['"reasoning_content"'] * reasons]
    if given:
        raise UserError(
            f"{sample.where}: has {' and '.join(given)}, which chat_template "
            f"{model.chat_template!r} cannot write; put them into its texts, or leave it out"
        )


def _answers(sample: Sample, messages: Sequence[str], template: _Template) -> list[int]:
    first = len(messages) - 2 * len(sample.turns) + 1
    greeting = [first - 2] if _greets(sample, template) and sample.greeting_learned else []
    learned = [first + 2 * place for place, turn in enumerate(sample.turns) if turn.learned]
    return [*greeting, *learned]


def _greets(sample: Sample, template: _Template) -> bool:
    """Whether a greeting before the first question is written and learned."""
    return template.message_by_message and sample.greeting is not None


@lru_cache(maxsize=16)
def _header_tokens(template: _Template, tokenizer: Tokenizer) -> int:
    if template.message_by_message:
        return len(tokenizer.encode(template.prompt))
    # Encode after another message: some tokenizers treat the beginning of a text differently.
    opening = tokenizer.encode(template.end + template.prompt)
    return len(opening) - opening.index(tokenizer.required(template.end)) - 1


def _item_tokens(
    token_ids: np.ndarray,
    tiles_per_image: Sequence[int],
    clips_per_recording: Sequence[int],
    model: ModelConfig,
    tokenizer: Tokenizer,
    sample: Sample,
) -> tuple[np.ndarray, np.ndarray]:
    """Insertion positions and ids of image and audio tokens."""
    given = []
    if model.takes_images:
        tokens = np.array(tiles_per_image, np.int64) * model.vision.tokens_per_item
        given.append((IMAGE_START, tokenizer.image_context, tokens))
    if model.takes_audio:
        tokens = np.array(clips_per_recording, np.int64) * model.audio.tokens_per_item
        given.append((AUDIO_START, tokenizer.audio_context, tokens))
    before, contexts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    if model.images is not None:
        repeated = [tokenizer.required(piece) for piece in repeated_tokens(model.images)]
        places = np.flatnonzero(np.isin(token_ids, repeated))
        if len(places) != len(tiles_per_image):
            raise _control_tokens(sample)
        again = np.array(tiles_per_image, np.int64) - 1
        before.append(np.repeat(places + 1, again))
        contexts.append(np.repeat(token_ids[places], again))
    for start, context, tokens in given:
        starts = np.flatnonzero(token_ids == tokenizer.required(start))
        if len(starts) != len(tokens) or (token_ids == context).any():
            raise _control_tokens(sample)
        before.append(np.repeat(starts + 1, tokens))
        contexts.append(np.full(tokens.sum(), context))
    return np.concatenate(before), np.concatenate(contexts)


def _control_tokens(sample: Sample) -> UserError:
    return UserError(
        f"{sample.where}: the tokenizer makes control tokens of the chat template from its text; "
        "spell or remove what looks like <|im_end|>, <|end|>, <img> or <IMG_CONTEXT>"
    )


def _bos_pieces(template: _Template, tokenizer: Tokenizer) -> list[str]:
    begins = tokenizer.add_bos if template.bos is None else template.bos
    return [tokenizer.bos_piece] if begins else []


def _bos(template: _Template, tokenizer: Tokenizer) -> np.ndarray:
    pieces = _bos_pieces(template, tokenizer)
    return np.array([tokenizer.required(piece) for piece in pieces], np.int64)
