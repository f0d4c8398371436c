"""Conversations as the chat template that comes with a tokenizer writes them.

The template is Jinja text beside the tokenizer (`chat_template.jinja`, or in
`tokenizer_config.json`), rendered as Transformers does, so that token ids are those of its
`apply_chat_template`; it is not imported, since it would import torch. Where the template marks
what the model says (`{% generation %}`), loss falls there. Else it falls on what an answer's
message adds behind the prompt for it, up to the piece that closes it; so a prompt and its
conversation must begin equally, which is checked.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omnibal.data.sample import IMAGE, VIDEO, Sample
from omnibal.data.tokenizer import Tokenizer
from omnibal.errors import UserError

# Of a private plane of Unicode: no text has them but to deceive.
_BEGIN, _END, _STAND_IN = "\U000f0000", "\U000f0001", "\U000f0002"
_ITEM = re.compile(f"({IMAGE}|{VIDEO})")
_REASONED = "</think>"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(frozen=True, slots=True)
class ItemPieces:
    """How a family writes an image, of which its template writes one piece."""

    written: str
    """The piece that the template writes for an image."""
    repeated: str
    """The piece that stands once for every token of the image."""
    before: str = ""
    """Text that takes the place of the written piece together with the repeated one."""
    after: str = ""

    @property
    def text(self) -> str:
        """What an image becomes, with the repeated piece once."""
        return f"{self.before}{self.repeated}{self.after}"


_FAMILIES = (
    ItemPieces("<|image_pad|>", "<|image_pad|>"),  # Qwen2-VL to Qwen3.5, LLaVA-OneVision-1.5
    ItemPieces("<|image|>", "<|image|>"),  # GLM-4.5V
    ItemPieces("<|media_pad|>", "<|media_pad|>"),  # Kimi-VL, Kimi K2.5
    ItemPieces("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>", "</img>"),  # InternVL in Transformers
    ItemPieces(
        "<start_of_image>", "<image_soft_token>", "\n\n<start_of_image>", "<end_of_image>\n\n"
    ),  # Gemma 3
)


@dataclass(frozen=True, slots=True)
class WrittenConversation:
    """A conversation as text."""

    text: str
    learned: tuple[tuple[int, int], ...]
    """First character, and the one behind the last, of what carries loss."""


def item_pieces(tokenizer: Tokenizer) -> ItemPieces | None:
    """How the tokenizer's template writes an image; None where it writes none that is known."""
    template = _template(tokenizer)
    return next((pieces for pieces in _FAMILIES if pieces.written in template), None)


def control_pieces(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Pieces that only the template may write: special ones in it, and those of images."""
    template, images = _template(tokenizer), item_pieces(tokenizer)
    shown = () if images is None else (images.written, images.repeated)
    special = [piece for piece in tokenizer.special_pieces if piece in template]
    return tuple(dict.fromkeys((*special, *shown)))


@lru_cache(maxsize=16)
def answer_end_piece(tokenizer: Tokenizer) -> str | None:
    """The special piece that closes an answer; None where the template writes none (GLM-4.5)."""
    said = [_message("user", "a"), _message("assistant", _STAND_IN)]
    behind = _render(tokenizer, said, "the chat template").partition(_STAND_IN)[2]
    return _opening_piece(behind, tokenizer)


@lru_cache(maxsize=16)
def strips_answers(tokenizer: Tokenizer) -> bool:
    """Whether the template removes the spaces around an answer."""
    said = [_message("user", "a"), _message("assistant", f" {_STAND_IN} ")]
    return f" {_STAND_IN} " not in _render(tokenizer, said, "the chat template")


def encode_conversation(
    sample: Sample, tokens_per_image: Sequence[int], system: str | None, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the whole conversation, int64 [tokens], and whether each is learned, bool.

    A token is learned if it begins in what is.

    Raises:
        UserError: as `write_conversation` has it, or the template does not write every image once.
    """
    written = write_conversation(sample, system, tokenizer)
    ids, starts = tokenizer.encode_with_places(written.text)
    token_ids, first = np.array(ids, np.int64), np.array(starts, np.int64)
    learned = np.zeros(len(token_ids), bool)
    for begin, end in written.learned:
        learned |= (begin <= first) & (first < end)
    counts = _counts(token_ids, tokens_per_image, tokenizer, sample)
    return np.repeat(token_ids, counts), np.repeat(learned, counts)


def encode_own_prompt(
    sample: Sample,
    turn: int,
    tokens_per_image: Sequence[int],
    system: str | None,
    tokenizer: Tokenizer,
) -> np.ndarray:
    """Token ids of everything before the answer of `turn`, int64 [tokens].

    Args:
        tokens_per_image: of the images that are shown so far.
    """
    text = write_prompt(sample, turn, system, tokenizer)
    token_ids = np.array(tokenizer.encode(text), np.int64)
    return np.repeat(token_ids, _counts(token_ids, tokens_per_image, tokenizer, sample))


def _counts(
    token_ids: np.ndarray, tokens_per_image: Sequence[int], tokenizer: Tokenizer, sample: Sample
) -> np.ndarray:
    """How often each token stands: 1, or as the image needs it, int64 [tokens]."""
    counts = np.ones(len(token_ids), np.int64)
    pieces = item_pieces(tokenizer)
    if pieces is None and not len(tokens_per_image):
        return counts
    known = ", ".join(family.written for family in _FAMILIES)
    if pieces is None:
        raise UserError(
            f"{sample.where}: has images, and the chat template of {tokenizer.path} writes none of "
            f"the pieces that stand for one ({known}); choose a model that takes images, or its "
            "own tokenizer"
        )
    places = np.flatnonzero(token_ids == tokenizer.required(pieces.repeated))
    if len(places) != len(tokens_per_image):
        raise UserError(
            f"{sample.where}: the chat template of {tokenizer.path} writes {len(places)} "
            f"{pieces.repeated} for {len(tokens_per_image)} image(s); the template must write "
            "each once"
        )
    counts[places] = tokens_per_image
    return counts


def write_conversation(
    sample: Sample, system: str | None, tokenizer: Tokenizer
) -> WrittenConversation:
    """The whole conversation with what of it is learned.

    Args:
        system: message of the model's config, for samples without their own.

    Raises:
        UserError: the template cannot write it, or writes earlier answers otherwise once another
            question follows.
    """
    messages, learned = _messages(sample, system)
    _check(sample, tokenizer)
    tools = _tools(sample)
    marked = _render(tokenizer, messages, sample.where, tools)
    text = marked.replace(_BEGIN, "").replace(_END, "")
    if _GENERATION.search(_template(tokenizer)):
        spans = _marked_spans(marked)
        places = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(places):
            raise UserError(
                f"{sample.where}: the chat template of {tokenizer.path} marks {len(spans)} answers "
                f"of {len(places)} with {{% generation %}}; mend the template"
            )
        kept = [span for span, place in zip(spans, places, strict=True) if place in learned]
        return WrittenConversation(text, tuple(kept))
    found = _Spans(tokenizer, sample, messages, tools, text)
    return WrittenConversation(text, tuple(found.of(place) for place in learned))


def write_prompt(sample: Sample, turn: int, system: str | None, tokenizer: Tokenizer) -> str:
    """Everything before the answer of `turn`, with what the template asks it by."""
    _check(sample, tokenizer)
    messages, _ = _messages(sample, system)
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    place = answers[len(answers) - len(sample.turns) + turn]
    asked = _render(tokenizer, messages[:place], sample.where, _tools(sample), prompt=True)
    return asked.replace(_BEGIN, "").replace(_END, "")


@dataclass(frozen=True, slots=True)
class _Spans:
    """Where answers stand in a conversation whose template does not mark them."""

    tokenizer: Tokenizer
    sample: Sample
    messages: list[dict[str, Any]]
    tools: list | None
    text: str
    """The whole conversation."""

    def of(self, place: int) -> tuple[int, int]:
        """The answer that is the message of this number, with the piece that closes it."""
        asked = self._rendered(self.messages[:place], prompt=True)
        answered = self._rendered(self.messages[: place + 1])
        if self.text.startswith(answered) and answered.startswith(asked):
            return len(asked), self._closed(len(answered))
        return self._found(place, asked)

    def _found(self, place: int, asked: str) -> tuple[int, int]:
        """The same where the template writes an answer otherwise once another question follows, as
        Qwen3's does, which shows no more what was thought before earlier answers."""
        message = self.messages[place]
        if "reasoning_content" in message or _REASONED in message["content"]:
            raise UserError(
                f"{self.sample.where}: has an answer with reasoning before another question, where "
                f"the chat template of {self.tokenizer.path} leaves the reasoning out, so that it "
                "cannot be learned; make a sample of each answer, with what was said before it, or "
                "remove the reasoning"
            )
        stand_in = [*self.messages]
        stand_in[place] = message | {"content": _STAND_IN}
        before, _, behind = self._rendered(stand_in).partition(_STAND_IN)
        has_both = self.text.startswith(before) and self.text.endswith(behind)
        begins = before.startswith(asked) or asked.startswith(before)
        if not (has_both and begins):
            raise UserError(
                f"{self.sample.where}: the chat template of {self.tokenizer.path} writes message "
                f"{place + 1} otherwise once more follows, so what is learned cannot be told; "
                "mark answers in the template with {% generation %} and {% endgeneration %}, or "
                "make a sample of each answer, with what was said before it"
            )
        start, end = min(len(asked), len(before)), len(self.text) - len(behind)
        piece = answer_end_piece(self.tokenizer)
        if piece is None or piece not in behind:
            return start, self._closed(end)
        # What else the message has, such as calls, stands before the piece that closes it.
        return start, end + behind.index(piece) + len(piece)

    def _closed(self, end: int) -> int:
        """The end of an answer, with the piece that closes it and without what is behind."""
        piece = answer_end_piece(self.tokenizer)
        if piece is not None and self.text[:end].rstrip().endswith(piece):
            return len(self.text[:end].rstrip())
        # Where none does, the model stops with the piece that opens the next message.
        return end + len(_opening_piece(self.text[end:], self.tokenizer) or "")

    def _rendered(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return _render(self.tokenizer, messages, self.sample.where, self.tools, prompt)


def _opening_piece(text: str, tokenizer: Tokenizer) -> str | None:
    """The special piece with which a text begins."""
    found = [piece for piece in tokenizer.special_pieces if text.startswith(piece)]
    return max(found, key=len, default=None)


def _marked_spans(marked: str) -> list[tuple[int, int]]:
    """Places of marked parts in the text without the marks."""
    spans, length = [], 0
    for part in re.split(f"({_BEGIN}.*?{_END})", marked, flags=re.DOTALL):
        inside = part.strip(_BEGIN + _END)
        if part.startswith(_BEGIN):
            spans.append((length, length + len(inside)))
        length += len(inside)
    return spans


def _messages(sample: Sample, system: str | None) -> tuple[list[dict[str, Any]], list[int]]:
    """Messages as templates take them, and the numbers of those that are learned."""
    given = system if sample.system is None else sample.system
    messages = [] if given is None else [_message("system", given)]
    learned = []
    if sample.greeting is not None:
        learned += [len(messages)] * sample.greeting_learned
        messages.append(_message("assistant", sample.greeting))
    for turn in sample.turns:
        if turn.results:
            messages += [_message("tool", result) for result in turn.results]
        else:
            messages.append(_message("user", _parts(turn.question, sample)))
        learned += [len(messages)] * turn.learned
        answer = _message("assistant", turn.answer)
        if turn.reasoning is not None:
            answer["reasoning_content"] = turn.reasoning
        if turn.calls:
            calls = map(json.loads, turn.calls)
            answer["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        messages.append(answer)
    return messages, learned


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _parts(question: str, sample: Sample) -> str | list[dict[str, str]]:
    """A question as parts, if it shows something."""
    if not sample.images:
        return question
    pieces = list(filter(None, _ITEM.split(question)))
    if not _ITEM.search(question):
        return question
    return [
        {"type": piece.strip("<>")} if _ITEM.fullmatch(piece) else {"type": "text", "text": piece}
        for piece in pieces
    ]


def _tools(sample: Sample) -> list | None:
    tools = [] if sample.tools is None else json.loads(sample.tools)
    wrapped = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    return wrapped or None


def _check(sample: Sample, tokenizer: Tokenizer) -> None:
    """Refuse what the template would leave out, and text that only it may write."""
    template = _template(tokenizer)
    needed = {
        "tools": sample.tools is not None,
        "tool_calls": any(turn.calls for turn in sample.turns),
        "tool": any(turn.results for turn in sample.turns),
        "reasoning_content": any(turn.reasoning is not None for turn in sample.turns),
    }
    for word, is_needed in needed.items():
        if is_needed and word not in template:
            raise UserError(
                f"{sample.where}: has what templates write of {word!r}, and the chat template of "
                f"{tokenizer.path} writes nothing of it; put it into the texts, or leave it out"
            )
    texts = [text for turn in sample.turns for text in (turn.question, turn.answer, *turn.results)]
    texts += [turn.reasoning or "" for turn in sample.turns]
    texts += [text for turn in sample.turns for text in turn.calls]
    texts += [sample.system or "", sample.greeting or "", sample.tools or ""]
    whole = "\n".join(texts)
    for piece in (*control_pieces(tokenizer), _BEGIN, _END, _STAND_IN):
        if piece in whole:
            raise UserError(
                f"{sample.where}: has {piece!r} in its text, which only the chat template may "
                f"write; mark an image with {IMAGE}, and spell or remove any other use"
            )


def _template(tokenizer: Tokenizer) -> str:
    if tokenizer.template is None:
        raise UserError(
            f"{tokenizer.path}: has no chat template beside it, and the model's is the tokenizer's "
            "own; pass the folder of the checkpoint, with its chat_template.jinja or "
            "tokenizer_config.json"
        )
    return tokenizer.template


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    where: str,
    tools: list | None = None,
    prompt: bool = False,
) -> str:
    """The messages as the template writes them, with marks around what it marks."""
    compiled = _compiled(_template(tokenizer), str(tokenizer.path))
    try:
        text = compiled.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **tokenizer.named_pieces,
        )
    except Exception as error:  # templates fail in ways of their own
        raise UserError(
            f"{where}: the chat template of {tokenizer.path} cannot write it ({error}); change the "
            "sample, or the template"
        ) from error
    images = item_pieces(tokenizer)
    return text if images is None else text.replace(images.written, images.text)


@lru_cache(maxsize=16)
def _compiled(template: str, path: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    # Without strftime_now, on purpose: the same data is the same tokens on any day.
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"{path}: its chat template is not Jinja ({error.message}, line {error.lineno}); "
            "restore the checkpoint's own"
        ) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` around what the model says."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja has it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block into a call that puts marks around what it writes."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
