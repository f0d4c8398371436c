"""Write conversations by the tokenizer's own Jinja chat template.

Token ids equal Transformers' `apply_chat_template`. Text in `{% generation %}` carries loss.
Without it, loss covers the text that an answer adds after its prompt, up to the closing piece. The
prompt must then be a prefix of the conversation, which is checked.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.jinja_chat import BEGIN, END, compiled_template, render_chat
from omnibal.data.native_resolution import seen_videos
from omnibal.data.sample import IMAGE, VIDEO, Sample, Turn, frame_lines
from omnibal.data.tokenizer import Tokenizer
from omnibal.model.encoders import ImageRule, ImageText

_STAND_IN = "\U000f0002"  # private-use character, like the marks
_ITEM = re.compile(f"({IMAGE}|{VIDEO})")
_IMAGE = re.compile(f"({IMAGE})")
_REASONED = "</think>"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


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
"""Text of an image, by the piece that a model family's template writes."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a sample in the format of chat templates."""

    where: str
    messages: list[dict[str, Any]]
    learned: list[int]
    """Indices of learned messages."""
    turns: int
    tools: list | None = None
    videos: tuple[str, ...] = ()
    """Text of each video's frames."""

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
        """Return the messages of a sample with its questions' contents.

        `strips` strips answers and greeting.
        """
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
            messages.append(_answer(turn, strips))
        tools = [] if sample.tools is None else json.loads(sample.tools)
        wrapped = [t if "function" in t else {"type": "function", "function": t} for t in tools]
        return cls(sample.where, messages, learned, len(sample.turns), wrapped or None, videos)

    @property
    def answers(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]

    def before_answer(self, turn: int) -> list[dict[str, Any]]:
        """Return the messages before the answer of a turn."""
        return self.messages[: self.answers[turn - self.turns]]


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _answer(turn: Turn, strips: bool) -> dict[str, Any]:
    answer = _message("assistant", turn.answer.strip() if strips else turn.answer)
    if turn.reasoning is not None:
        answer["reasoning_content"] = turn.reasoning
    if turn.calls:
        calls = map(json.loads, turn.calls)
        answer["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTemplate:
    """Tokenizer's chat template and its detected properties."""

    tokenizer: Tokenizer
    text: str
    rule: ImageRule | None
    """Native-resolution rule of the model, if any."""
    image: str | None
    """Piece that the template writes for an image, of `_IMAGE_TEXTS`, or None."""
    video: str | None
    """Text for a video, replaced by its frames' text."""
    answer_end: str | None
    """Special piece that closes an answer, None if absent (GLM-4.5)."""
    strips_answers: bool
    """Whether answers are stripped."""

    @property
    def repeated_pieces(self) -> tuple[str, ...]:
        """Pieces repeated per image or video token."""
        shown = [] if self.image is None else [_IMAGE_TEXTS[self.image].each]
        if self.rule is not None and self.rule.video is not None:
            shown.append(self.rule.video.text.each)
        return tuple(dict.fromkeys(shown))

    @property
    def control_pieces(self) -> tuple[str, ...]:
        """Pieces reserved for the template."""
        shown = () if self.image is None else (self.image, _IMAGE_TEXTS[self.image].each)
        special = [piece for piece in self.tokenizer.special_pieces if piece in self.text]
        return tuple(dict.fromkeys((*special, *shown)))

    def conversation(self, sample: Sample, system: str | None) -> Conversation:
        """Return a sample's messages; `system` is the system message by default."""
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
                f"{sample.where}: shows a video, for which the chat template of "
                f"{self.tokenizer.path} writes nothing; name its frames as images"
            )
        given = system if sample.system is None else sample.system
        parts = [_parts(question, sample) for question in questions]
        return Conversation.from_sample(sample, given, parts, videos=videos)

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int64 [tokens], each image's once, and the loss mask, bool.

        A token is learned if its first character is.
        """
        marked = self._render_messages(conversation, conversation.messages)
        text = _remove_marks(marked)
        if _GENERATION.search(self.text):
            answers, marked_spans = conversation.answers, _marked_spans(marked)
            if len(marked_spans) != len(answers):
                raise UserError(
                    f"{conversation.where}: the chat template of {self.tokenizer.path} marks "
                    f"{len(marked_spans)} answers of {len(answers)} with {{% generation %}}; mend "
                    "the template"
                )
            of_answers = zip(marked_spans, answers, strict=True)
            spans = [span for span, place in of_answers if place in conversation.learned]
        else:
            spans = [self._span(conversation, place, text) for place in conversation.learned]
        ids, starts = self.tokenizer.encode_with_places(text)
        first = np.array(starts, np.int64)
        learned = np.zeros(len(ids), bool)
        for begin, end in spans:
            learned |= (begin <= first) & (first < end)
        return np.array(ids, np.int64), learned

    def encode_prompt(self, conversation: Conversation, turn: int) -> np.ndarray:
        """Return token ids before the answer of `turn`, int64 [tokens], each image's once."""
        asked = self._render_messages(conversation, conversation.before_answer(turn), prompt=True)
        return np.array(self.tokenizer.encode(_remove_marks(asked)), np.int64)

    def miscount(self, where: str, places: int, images: int) -> UserError:
        """Return the error of a conversation with another number of image pieces than images."""
        path = self.tokenizer.path
        if not self.repeated_pieces:
            return UserError(
                f"{where}: has images, and the chat template of {path} writes none of the pieces "
                f"that stand for one ({', '.join(_IMAGE_TEXTS)}); choose a model that takes "
                "images, or its own tokenizer"
            )
        return UserError(
            f"{where}: the chat template of {path} writes {places} "
            f"{' and '.join(self.repeated_pieces)} where {images} were to stand for images; the "
            "template must write each once"
        )

    def _check(self, sample: Sample) -> None:
        """Raise if the template would drop content, or if text contains reserved pieces."""
        needed = {
            "tools": sample.tools is not None,
            "tool_calls": any(turn.calls for turn in sample.turns),
            "tool": any(turn.results for turn in sample.turns),
            "reasoning_content": any(turn.reasoning is not None for turn in sample.turns),
        }
        for word, is_needed in needed.items():
            if is_needed and word not in self.text:
                raise UserError(
                    f"{sample.where}: has what templates write of {word!r}, and the chat template "
                    f"of {self.tokenizer.path} writes nothing of it; put it into its texts"
                )
        texts = [sample.system or "", sample.greeting or "", sample.tools or ""]
        for turn in sample.turns:
            texts += [turn.question, turn.answer, *turn.results, turn.reasoning or "", *turn.calls]
        pieces = (*self.control_pieces, BEGIN, END, _STAND_IN)
        self.tokenizer.check_text("\n".join(texts), sample.where, pieces, f"an image with {IMAGE}")

    def _render_messages(
        self, conversation: Conversation, messages: list[dict[str, Any]], prompt: bool = False
    ) -> str:
        """Render messages, with images and videos as text and generation marks."""
        text = _render(self.tokenizer, messages, conversation.where, conversation.tools, prompt)
        if conversation.videos and self.video is not None:
            # Only the first videos if only the first messages are written.
            first, *behind = text.split(self.video)
            pairs = zip(conversation.videos, behind, strict=False)
            text = first + "".join(video + rest for video, rest in pairs)
        image = self.image
        return text if image is None else text.replace(image, _IMAGE_TEXTS[image].text)

    def _span(self, conversation: Conversation, place: int, text: str) -> tuple[int, int]:
        """Span of an answer with its closing piece, for templates without generation marks."""
        messages = conversation.messages
        asked = self._render_messages(conversation, messages[:place], prompt=True)
        is_last = place + 1 == len(messages)
        answered = text if is_last else self._render_messages(conversation, messages[: place + 1])
        if text.startswith(answered) and answered.startswith(asked):
            return len(asked), self._end_with_piece(len(answered), text)
        return self._span_within(conversation, place, asked, text)

    def _span_within(
        self, conversation: Conversation, place: int, asked: str, text: str
    ) -> tuple[int, int]:
        """Span of an answer rendered differently before a question (Qwen3 drops reasoning)."""
        where, path = conversation.where, self.tokenizer.path
        message = conversation.messages[place]
        if "reasoning_content" in message or _REASONED in message["content"]:
            raise UserError(
                f"{where}: has an answer with reasoning before another question, where the "
                f"chat template of {path} leaves the reasoning out, so that it cannot be learned; "
                "make a sample of each answer, with what was said before it, or remove the "
                "reasoning"
            )
        stand_in = [*conversation.messages]
        stand_in[place] = message | {"content": _STAND_IN}
        before, _, behind = self._render_messages(conversation, stand_in).partition(_STAND_IN)
        has_both = text.startswith(before) and text.endswith(behind)
        if not (has_both and (before.startswith(asked) or asked.startswith(before))):
            raise UserError(
                f"{where}: the chat template of {path} writes message {place + 1} otherwise "
                "once more follows, so what is learned cannot be told; mark answers in the "
                "template with {% generation %} and {% endgeneration %}, or make a sample of each "
                "answer, with what was said before it"
            )
        start, end = min(len(asked), len(before)), len(text) - len(behind)
        piece = self.answer_end
        if piece is None or piece not in behind:
            return start, self._end_with_piece(end, text)
        # Other content, such as calls, precedes the closing piece.
        return start, end + behind.index(piece) + len(piece)

    def _end_with_piece(self, end: int, text: str) -> int:
        """End of an answer, including its closing piece."""
        if self.answer_end is not None and text[:end].rstrip().endswith(self.answer_end):
            return len(text[:end].rstrip())
        # Without a closing piece, the model stops at the piece that opens the next message.
        return end + len(_opening_piece(text[end:], self.tokenizer) or "")


@lru_cache(maxsize=16)
def own_template(tokenizer: Tokenizer, rule: ImageRule | None) -> OwnTemplate:
    """Return the tokenizer's chat template; `rule` is the model's for native-resolution images."""
    text = tokenizer.template
    if text is None:
        raise UserError(
            f"{tokenizer.path}: has no chat template beside it, and the model's is the tokenizer's "
            "own; pass the folder of the checkpoint, with its chat_template.jinja or "
            "tokenizer_config.json"
        )

    def render_answer(answer: str) -> str:
        said = [_message("user", "a"), _message("assistant", answer)]
        return _render(tokenizer, said, "its chat template")

    image = next((piece for piece in _IMAGE_TEXTS if piece in text), None)
    behind = render_answer(_STAND_IN).partition(_STAND_IN)[2]
    has_videos = image is not None and (rule is None or rule.video is not None)
    return OwnTemplate(
        tokenizer=tokenizer,
        text=text,
        rule=rule,
        image=image,
        video=_video_text(tokenizer) if has_videos else None,
        answer_end=_opening_piece(behind, tokenizer),
        strips_answers=f" {_STAND_IN} " not in render_answer(f" {_STAND_IN} "),
    )


def _video_text(tokenizer: Tokenizer) -> str | None:
    """Text that the template writes for a video, None if absent."""
    around = {"type": "text", "text": _STAND_IN}
    question = _message("user", [around, {"type": "video"}, around])
    try:
        text = _render(tokenizer, [question], "its chat template")
    except UserError:
        return None
    _, written, _ = (*text.split(_STAND_IN), "", "")[:3]
    return written or None


def _opening_piece(text: str, tokenizer: Tokenizer) -> str | None:
    pieces = [piece for piece in tokenizer.special_pieces if text.startswith(piece)]
    return max(pieces, key=len, default=None)


def _remove_marks(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def _marked_spans(marked: str) -> list[tuple[int, int]]:
    """Spans of marked parts in the unmarked text."""
    spans, length = [], 0
    for part in re.split(f"({BEGIN}.*?{END})", marked, flags=re.DOTALL):
        inside = part.strip(BEGIN + END)
        if part.startswith(BEGIN):
            spans.append((length, length + len(inside)))
        length += len(inside)
    return spans


def _parts(question: str, sample: Sample) -> str | list[dict[str, str]]:
    """Split a question into parts if it shows images or videos."""
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
    """Render messages, with generation marks."""
    template = compiled_template(tokenizer.template or "", str(tokenizer.path))
    try:
        return render_chat(
            template, messages, tools=tools, prompt=prompt, pieces=tokenizer.named_pieces
        )
    except Exception as error:  # templates may raise anything
        raise UserError(
            f"{where}: the chat template of {tokenizer.path} cannot write it ({error}); change the "
            "sample, or the template"
        ) from error
