"""Conversations written by the tokenizer's own Jinja chat template.

Token ids equal Transformers' `apply_chat_template`. Text in `{% generation %}` carries loss.
Without it, loss covers the text that an answer adds after its prompt, up to the closing piece. Of
the prompt and the text before the answer, one must begin the other.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.jinja_chat import BEGIN, END, compiled_template, render_chat
from omnibal.data.native_resolution import seen_videos
from omnibal.data.sample import IMAGE, VIDEO, Sample, frame_lines
from omnibal.data.tokenizer import Tokenizer
from omnibal.model.encoders import ImageRule, ImageText

_STAND_IN = "\U000f0002"  # private-use character, like the marks
_ITEM = re.compile(f"({IMAGE}|{VIDEO})")
_IMAGE = re.compile(f"({IMAGE})")
_REASONING_END = "</think>"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


# Text of an image, by the piece that a model family's template writes.
_IMAGE_TEXTS: dict[str, ImageText] = {
    "<|image_pad|>": ImageText(before="", after=""),  # Qwen2-VL to Qwen3.5, LLaVA-OneVision-1.5
    "<|image|>": ImageText(before="", each="<|image|>", after=""),  # GLM-4.5V
    "<|media_pad|>": ImageText(before="", each="<|media_pad|>", after=""),  # Kimi-VL, Kimi K2.5
    # InternVL in Transformers.
    "<IMG_CONTEXT>": ImageText(before="<img>", each="<IMG_CONTEXT>", after="</img>"),
    # Gemma 3.
    "<start_of_image>": ImageText(
        before="\n\n<start_of_image>", each="<image_soft_token>", after="<end_of_image>\n\n"
    ),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a sample in the format of chat templates."""

    where: str
    messages: list[dict[str, Any]]
    learned: list[int]  # indices of messages with loss
    turns: int  # pairs of question and answer
    tools: list | None = None
    videos: tuple[str, ...] = ()  # text of each video's frames

    @classmethod
    def from_sample(
        cls,
        sample: Sample,
        system: str | None,
        questions: Sequence[Any],
        *,
        strips: bool = False,
        videos: tuple[str, ...] = (),
    ) -> "Conversation":
        """Return a sample's messages with these questions; `strips` answers and greeting."""
        messages = [] if system is None else [_message("system", system)]
        learned = []
        if sample.greeting is not None:
            learned += [len(messages)] * sample.greeting_learned
            greeting = sample.greeting.strip() if strips else sample.greeting
            messages.append(_message("assistant", greeting))
        for turn, question in zip(sample.turns, questions, strict=True):
            messages += [_message("tool", result) for result in turn.results]
            messages += [] if turn.results else [_message("user", question)]
            learned += [len(messages)] * turn.learned
            answer = _message("assistant", turn.answer.strip() if strips else turn.answer)
            if turn.reasoning is not None:
                answer["reasoning_content"] = turn.reasoning
            if turn.calls:
                calls = map(json.loads, turn.calls)
                answer["tool_calls"] = [{"type": "function", "function": call} for call in calls]
            messages.append(answer)
        tools = [] if sample.tools is None else json.loads(sample.tools)
        wrapped = [t if "function" in t else {"type": "function", "function": t} for t in tools]
        return cls(sample.where, messages, learned, len(sample.turns), wrapped or None, videos)

    @property
    def answers(self) -> list[int]:
        return [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]

    def before_answer(self, turn: int) -> list[dict[str, Any]]:
        return self.messages[: self.answers[turn - self.turns]]


def cannot_write_error(sample: Sample, extras: Sequence[str], template: str) -> UserError:
    return UserError(
        f"{sample.where}: has {' and '.join(extras)}, which {template} cannot write; put it into "
        "texts, or leave it out"
    )


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTemplate:
    """A tokenizer's chat template, with properties read or rendered from it."""

    tokenizer: Tokenizer
    text: str
    rule: ImageRule | None  # native-resolution rule of the model, if any
    image: str | None  # key of `_IMAGE_TEXTS` that the template writes for an image, or None
    video: str | None  # text written for a video, to be replaced by its frames', or None
    answer_end: str | None  # special piece that closes an answer, None if absent (GLM-4.5)
    strips_answers: bool  # whether the template strips answers

    @property
    def repeated_pieces(self) -> tuple[str, ...]:
        shown = [] if self.image is None else [_IMAGE_TEXTS[self.image].each]
        if self.rule is not None and self.rule.video is not None:
            shown.append(self.rule.video.text.each)
        return tuple(dict.fromkeys(shown))

    @property
    def control_pieces(self) -> tuple[str, ...]:
        """Pieces that only the template may write."""
        shown = () if self.image is None else (self.image, _IMAGE_TEXTS[self.image].each)
        special = [piece for piece in self.tokenizer.special_pieces if piece in self.text]
        return tuple(dict.fromkeys((*special, *shown)))

    def conversation(self, sample: Sample, system: str | None) -> Conversation:
        """Return a sample's messages, with `system` unless it has a system message."""
        self._check(sample)
        seen = [] if self.rule is None else seen_videos(sample, self.rule)
        videos: tuple[str, ...] = ()
        questions = [turn.question for turn in sample.turns]
        if self.rule is not None and self.rule.video is not None:
            videos = tuple(video.text(self.rule) for video in seen)
        elif sample.of_frames and (self.video or "").startswith(VIDEO):
            # As InternVL's processor writes frames.
            frames = (f"Frame{number}: {self.image}" for number, _ in enumerate(sample.images, 1))
            videos = ("\n".join(frames) + (self.video or "").removeprefix(VIDEO),)
            questions[0] = questions[0].replace(frame_lines(len(sample.images)), VIDEO)
        elif seen:
            left = iter(seen)  # an image per shown frame
            questions = [
                re.sub(VIDEO, lambda mark: IMAGE * len(next(left).frames), text)
                for text in questions
            ]
        if videos and self.video is None:
            raise UserError(
                f"{sample.where}: shows a video, and the chat template of {self.tokenizer.path} "
                "writes nothing for videos; name its frames as images"
            )
        system = system if sample.system is None else sample.system
        parts = [_split_parts(question, sample) for question in questions]
        return Conversation.from_sample(sample, system, parts, videos=videos)

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int64 [tokens], with one per placeholder, and the loss mask, bool."""
        marked = self._render_messages(conversation, conversation.messages)
        text = _remove_marks(marked)
        if _GENERATION.search(self.text):
            answers, length = conversation.answers, 0
            marked_spans: list[tuple[int, int]] = []
            for part in re.split(f"({BEGIN}.*?{END})", marked, flags=re.DOTALL):
                end = length + len(part.strip(BEGIN + END))
                marked_spans += [(length, end)] * part.startswith(BEGIN)
                length = end
            if len(marked_spans) != len(answers):
                raise UserError(
                    f"{conversation.where}: the chat template of {self.tokenizer.path} marks "
                    f"{len(marked_spans)} of {len(answers)} answers by {{% generation %}}; mend it"
                )
            of_answers = zip(marked_spans, answers, strict=True)
            spans = [span for span, place in of_answers if place in conversation.learned]
        else:
            spans = [self._find_span(conversation, place, text) for place in conversation.learned]
        ids, starts = self.tokenizer.encode_with_places(text)
        first = np.array(starts, np.int64)  # a token is learned if its first character is
        learned = np.zeros(len(ids), bool)
        for begin, end in spans:
            learned |= (begin <= first) & (first < end)
        return np.array(ids, np.int64), learned

    def encode_prompt(self, conversation: Conversation, turn: int) -> np.ndarray:
        """Return token ids before the answer of `turn`, int64 [tokens], one per placeholder."""
        asked = self._render_messages(conversation, conversation.before_answer(turn), prompt=True)
        return np.array(self.tokenizer.encode(_remove_marks(asked)), np.int64)

    def miscount(self, where: str, places: int, images: int) -> UserError:
        """Return the error of a text with other than `images` placeholders."""
        path = self.tokenizer.path
        if not self.repeated_pieces:
            return UserError(
                f"{where}: has images, and the chat template of {path} writes no piece of an image "
                f"({', '.join(_IMAGE_TEXTS)}); choose a model of images, or its own tokenizer"
            )
        return UserError(
            f"{where}: the chat template of {path} writes {places} pieces for {images} images"
        )

    def _check(self, sample: Sample) -> None:
        """Raise UserError if the template would drop content, or texts have reserved pieces."""
        refused = [word for word in sample.extras if word not in self.text]
        if refused:
            raise cannot_write_error(sample, refused, f"the chat template of {self.tokenizer.path}")
        pieces = (*self.control_pieces, BEGIN, END, _STAND_IN)
        self.tokenizer.check_text(sample.text, sample.where, pieces, f"an image with {IMAGE}")

    def _render_messages(
        self, conversation: Conversation, messages: list[dict[str, Any]], prompt: bool = False
    ) -> str:
        """Render messages to text, with images, videos and generation marks."""
        text = _render(self.tokenizer, messages, conversation.where, conversation.tools, prompt)
        if conversation.videos and self.video is not None:
            # Fewer videos if only the first messages are rendered.
            first, *behind = text.split(self.video)
            pairs = zip(conversation.videos, behind, strict=False)
            text = first + "".join(video + rest for video, rest in pairs)
        image = self.image
        return text if image is None else text.replace(image, _IMAGE_TEXTS[image].text)

    def _find_span(self, conversation: Conversation, place: int, text: str) -> tuple[int, int]:
        """Return first and end character of an answer and its closing piece in `text`."""
        messages = conversation.messages
        asked = self._render_messages(conversation, messages[:place], prompt=True)
        is_last = place + 1 == len(messages)
        answered = text if is_last else self._render_messages(conversation, messages[: place + 1])
        if text.startswith(answered) and answered.startswith(asked):
            return len(asked), self._end_with_piece(len(answered), text)
        return self._find_span_within(conversation, place, asked, text)

    def _find_span_within(
        self, conversation: Conversation, place: int, asked: str, text: str
    ) -> tuple[int, int]:
        """Return the span of an answer that is written differently if messages follow (Qwen3)."""
        where, path = conversation.where, self.tokenizer.path
        message = conversation.messages[place]
        if "reasoning_content" in message or _REASONING_END in message["content"]:
            raise UserError(
                f"{where}: has an answer with reasoning before another question, which the chat "
                f"template of {path} leaves out; make a sample of each answer, or remove it"
            )
        # The answer is where the same text surrounds a stand-in for it.
        stand_in = [*conversation.messages]
        stand_in[place] = message | {"content": _STAND_IN}
        before, _, behind = self._render_messages(conversation, stand_in).partition(_STAND_IN)
        has_both = text.startswith(before) and text.endswith(behind)
        if not (has_both and (before.startswith(asked) or asked.startswith(before))):
            raise UserError(
                f"{where}: the chat template of {path} writes message {place + 1} otherwise if "
                "more messages follow, so its loss is unknown; mark answers by {% generation %}, "
                "or make a sample of each answer, with the messages before it"
            )
        start, end = min(len(asked), len(before)), len(text) - len(behind)
        piece = self.answer_end
        if piece is None or piece not in behind:
            return start, self._end_with_piece(end, text)
        # Other content, such as calls, precedes the closing piece.
        return start, end + behind.index(piece) + len(piece)

    def _end_with_piece(self, end: int, text: str) -> int:
        """Return the end of an answer, including its closing piece."""
        if self.answer_end is not None and text[:end].rstrip().endswith(self.answer_end):
            return len(text[:end].rstrip())
        # Without a closing piece, the model stops at the piece that opens the next message.
        return end + len(_find_opening_piece(text[end:], self.tokenizer) or "")


@lru_cache(maxsize=16)
def own_template(tokenizer: Tokenizer, rule: ImageRule | None) -> OwnTemplate:
    """Return the tokenizer's template, with properties found from it; raises UserError."""
    text = tokenizer.template
    if text is None:
        raise UserError(
            f"{tokenizer.path}: has no chat template in its folder, which the model uses; pass the "
            "folder of the checkpoint, with its chat_template.jinja or tokenizer_config.json"
        )

    def render_answer(answer: str) -> str:
        messages = [_message("user", "a"), _message("assistant", answer)]
        return _render(tokenizer, messages, "its chat template")

    image = next((piece for piece in _IMAGE_TEXTS if piece in text), None)
    video = None
    if image is not None and (rule is None or rule.video is not None):
        around = {"type": "text", "text": _STAND_IN}
        question = _message("user", [around, {"type": "video"}, around])
        with suppress(UserError):  # a template that takes no videos
            written = _render(tokenizer, [question], "its chat template").split(_STAND_IN)
            video = written[1] or None if len(written) > 1 else None
    behind = render_answer(_STAND_IN).partition(_STAND_IN)[2]
    return OwnTemplate(
        tokenizer=tokenizer,
        text=text,
        rule=rule,
        image=image,
        video=video,
        answer_end=_find_opening_piece(behind, tokenizer),
        strips_answers=f" {_STAND_IN} " not in render_answer(f" {_STAND_IN} "),
    )


def _find_opening_piece(text: str, tokenizer: Tokenizer) -> str | None:
    pieces = [piece for piece in tokenizer.special_pieces if text.startswith(piece)]
    return max(pieces, key=len, default=None)


def _remove_marks(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def _split_parts(question: str, sample: Sample) -> str | list[dict[str, str]]:
    """Return a question as text and media parts, or unchanged without images and videos."""
    if not (sample.images or sample.videos):
        return question
    mark = _ITEM if sample.videos or sample.of_frames else _IMAGE
    if not mark.search(question):
        return question
    return [
        {"type": piece.strip("<>")} if mark.fullmatch(piece) else {"type": "text", "text": piece}
        for piece in filter(None, mark.split(question))
    ]


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    where: str,
    tools: list | None = None,
    prompt: bool = False,
) -> str:
    """Render messages with generation marks. Raise UserError if the template fails."""
    template = compiled_template(tokenizer.template or "", str(tokenizer.path))
    try:
        return render_chat(
            template, messages, tools=tools, prompt=prompt, pieces=tokenizer.named_pieces
        )
    except Exception as error:  # templates may raise anything
        raise UserError(
            f"{where}: the chat template of {tokenizer.path} cannot write it ({error}); mend either"
        ) from error
