"""Layers by stage as Megatron's layout strings, lists and shorter flags.

In a layout string E is the embedding, t a language model layer, m a layer of multi-token prediction
and L the head with its loss; `|` ends a chunk, x*3 means xxx and (xy)*3 xyxyxy. With P stages,
chunk i is chunk i // P of stage i % P (megatron-core 0.16.1,
transformer/pipeline_parallel_layer_layout.py).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from omnibal.base.errors import UserError
from omnibal.model.units import HEAD, LANGUAGE
from omnibal.pipeline.stage import Stage

EMBEDDING, DECODER, PREDICTION, LOSS, ENCODER = "embedding", "decoder", "mtp", "loss", "encoder"
_WORDS = {"E": EMBEDDING, "t": DECODER, "m": PREDICTION, "L": LOSS}
_LETTERS = {word: letter for letter, word in _WORDS.items()}
_GROUP, _ONE = re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)")
_MOST_LETTERS, _MOST_UNITS = 4_000, 100_000
"""Max letters of a layout as given and expanded, far above any model's layers."""
_SPLIT = "decoder-{}-pipeline-num-layers"

Chunk = tuple[str, ...]
"""Letters or words of a chunk, in model order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Layers of every chunk of every stage."""

    pipeline: int
    chunks: tuple[Chunk, ...]
    """Chunk i is chunk i // pipeline of stage i % pipeline, in model order."""

    @property
    def virtual(self) -> int:
        return len(self.chunks) // self.pipeline

    @property
    def units(self) -> Chunk:
        return tuple(word for chunk in self.chunks for word in chunk)

    def of_stage(self, stage: int) -> tuple[Chunk, ...]:
        """Chunks of one stage, in execution order."""
        return self.chunks[stage :: self.pipeline]

    @property
    def layers(self) -> tuple[int, ...]:
        """Language model layers by stage, [stages]."""
        stages = range(self.pipeline)
        return tuple(sum(c.count(DECODER) for c in self.of_stage(stage)) for stage in stages)

    def place(self, chunk: int) -> str:
        stage, virtual = chunk % self.pipeline, chunk // self.pipeline
        return f"stage {stage}" if self.virtual == 1 else f"chunk {virtual} of stage {stage}"

    @property
    def text(self) -> str:
        """Layout string with a letter per layer."""
        return "|".join("".join(_LETTERS[word] for word in chunk) for chunk in self.chunks)

    @property
    def short_text(self) -> str:
        """Layout string with repeats, such as `Et*17|t*23mL`."""
        return "|".join(
            "".join(
                f"{letter}*{count}" if count > 2 else letter * count
                for letter, count in ((_LETTERS[w], len(list(run))) for w, run in groupby(chunk))
            )
            for chunk in self.chunks
        )

    @property
    def ends(self) -> tuple[int, int] | None:
        """Layers of the first and last stage, or None if others differ or chunks are several."""
        layers = self.layers
        between = set(layers[1:-1])
        if self.pipeline < 2 or self.virtual > 1 or not all(layers) or len(between) > 1:
            return None
        return layers[0], layers[-1]

    @property
    def is_even(self) -> bool:
        """Whether all stages have equal numbers of layers."""
        return self.virtual == 1 and len(set(self.layers)) == 1


def layout_of(stages: Sequence[Stage], prediction_layers: int, chunks: int = 1) -> Layout:
    """Return the language model layers of every stage, or of every chunk in model order.

    Multi-token prediction layers are planned with the head.
    """
    first = Stage.of("language embed").units[0].name
    if not stages[0].holds(first):
        raise UserError(
            "stage 0 does not hold the language embed, and a layout begins with it: encoders must "
            "all be on stage 0, as those of a plan made with --for are"
        )
    held = []
    for stage in stages:
        words = [EMBEDDING] if stage.holds(first) else []
        words += [DECODER] * len(stage.layers(LANGUAGE))
        if stage.holds(HEAD):
            words += [PREDICTION] * prediction_layers + [LOSS]
        held.append(tuple(words))
    return Layout(pipeline=len(stages) // chunks, chunks=tuple(held))


def split_flags(layout: Layout) -> dict[str, str]:
    """Return Megatron's shortest flags for a split, by name without dashes.

    Empty for equal stages, else layers of the first and last stage if the middle is equal, else the
    layout. Multi-token prediction is always with the head.
    """
    if layout.is_even:
        return {}
    if layout.ends is not None:
        names = (_SPLIT.format(end) for end in ("first", "last"))
        return {name: str(layers) for name, layers in zip(names, layout.ends, strict=True)}
    return {"pipeline-model-parallel-layout": layout.short_text}


def parse_layout(given: str | Sequence[Sequence[str]], pipeline: int) -> Layout:
    """Parse a layout as Megatron-core does, without checks against a model."""
    chunks = _letters_of(given) if isinstance(given, str) else _words_of(given)
    if len(chunks) % pipeline:
        raise UserError(
            f"the layout has {len(chunks)} chunks for {pipeline} pipeline stages, and every stage "
            "must have equally many: write a multiple, a chunk for every stage and its layers' turn"
        )
    return Layout(pipeline=pipeline, chunks=chunks)


def _letters_of(text: str) -> tuple[Chunk, ...]:
    """Return the letters of a string's chunks. Groups expand first and cannot nest."""
    if len(text) > _MOST_LETTERS:
        raise UserError(
            f"the layout {_shown(text)} has {len(text):,} letters; write at most "
            f"{_MOST_LETTERS:,}, with equal layers as t*3"
        )
    whole = _repeated(_ONE, _repeated(_GROUP, text.replace(",", "")))
    chunks = whole.split("|")
    for number, chunk in enumerate(chunks):
        wrong = next((letter for letter in chunk if letter not in _WORDS), None)
        if wrong is not None:
            raise UserError(
                f"the layout {_shown(text)} has {wrong!r} in chunk {number}, written out as "
                f"{_shown(chunk)}; it may hold E, t, m, L and | alone, repeated as x*3 or (xy)*3, "
                "without blanks and without a group in a group"
            )
    return tuple(tuple(_WORDS[letter] for letter in chunk) for chunk in chunks)


def _repeated(pattern: re.Pattern[str], text: str) -> str:
    found = list(pattern.finditer(text))
    size = sum(len(match[1]) * int(match[2]) for match in found)
    if size > _MOST_UNITS:
        raise UserError(
            f"the layout {_shown(text)} has {size:,} letters when it is written out; a model has "
            f"at most {_MOST_UNITS:,}: correct its repeats"
        )
    return pattern.sub(lambda match: match[1] * int(match[2]), text)


def _words_of(lists: Sequence[Sequence[str]]) -> tuple[Chunk, ...]:
    chunks = []
    known = (*_LETTERS, ENCODER)
    for number, given in enumerate(lists):
        if isinstance(given, str) or not all(isinstance(word, str) for word in given):
            raise UserError(
                f"chunk {number} of the layout is {_shown(str(given))}; each must be a list of "
                f"words, of {', '.join(known)}"
            )
        words = tuple(word.strip().lower() for word in given)
        wrong = next((word for word in words if word not in known), None)
        if wrong is not None:
            raise UserError(
                f"chunk {number} of the layout has {wrong!r}; its words may be {', '.join(known)}"
            )
        chunks.append(words)
    return tuple(chunks)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}..."
