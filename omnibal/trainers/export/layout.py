"""Layers by stage as Megatron's layouts and shorter flags; recomputed layers as numbers.

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
from omnibal.pipeline.stage_units import Stage

EMBEDDING, DECODER, PREDICTION, LOSS, ENCODER = "embedding", "decoder", "mtp", "loss", "encoder"
_WORDS = {"E": EMBEDDING, "t": DECODER, "m": PREDICTION, "L": LOSS}
_LETTERS = {word: letter for letter, word in _WORDS.items()}
_GROUP, _ONE = re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)")
_MOST_LETTERS, _MOST_UNITS = 4_000, 100_000
"""Max letters of a layout as given and expanded, far above any model's layers."""

Chunk = tuple[str, ...]
"""Words of a chunk, in model order."""


class LayoutError(UserError):
    """A layout that Megatron-core's parser refuses, and the change that it needs."""

    def __init__(self, problem: str, change: str):
        super().__init__(problem, change)
        self.problem, self.change = problem, change

    def __str__(self) -> str:
        return f"{self.problem}; {self.change}"


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

    @property
    def layers_by_chunk(self) -> tuple[tuple[int, ...], ...]:
        """Language model layers, [stages][chunks]."""
        counts = [chunk.count(DECODER) for chunk in self.chunks]
        return tuple(tuple(counts[stage :: self.pipeline]) for stage in range(self.pipeline))

    @property
    def layers(self) -> tuple[int, ...]:
        """Language model layers by stage, [stages]."""
        return tuple(map(sum, self.layers_by_chunk))

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
        runs = ((letter, len(list(run))) for letter, run in groupby(self.text))
        return "".join(
            f"{letter}*{count}" if count > 2 and letter != "|" else letter * count
            for letter, count in runs
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
    first = "language embed"
    if not stages[0].holds(first):
        raise UserError(
            "stage 0 does not hold the language embed, and a layout begins with it: encoders must "
            "all be on stage 0, as those of a plan made with --for are"
        )
    words = [
        (EMBEDDING,) * stage.holds(first)
        + (DECODER,) * len(stage.layers(LANGUAGE))
        + ((PREDICTION,) * prediction_layers + (LOSS,)) * stage.holds(HEAD)
        for stage in stages
    ]
    return Layout(pipeline=len(stages) // chunks, chunks=tuple(words))


def split_flags(layout: Layout) -> dict[str, str]:
    """Return Megatron's shortest flags for a split, by name without dashes.

    Empty for equal stages, else layers of the first and last stage if the middle is equal, else the
    layout. Multi-token prediction is always with the head.
    """
    if layout.is_even:
        return {}
    if layout.ends is not None:
        first, last = map(str, layout.ends)
        flags = {"decoder-first-pipeline-num-layers": first}
        return flags | {"decoder-last-pipeline-num-layers": last}
    return {"pipeline-model-parallel-layout": layout.short_text}


def first_layers(stage: Stage, tower: str) -> int | None:
    """Return the recomputed layers of a tower in a stage, or None if not its first layers."""
    again = sorted(stage.recomputed_in(tower))
    return len(again) if again == list(stage.layers(tower)[: len(again)]) else None


def one_number(stages: Sequence[Stage], tower: str) -> int | None:
    """Return a single number n for all stages' recomputation of a tower, or None.

    Megatron's method `block` recomputes the first min(n, held) layers of each stage or chunk.
    """
    counts = [first_layers(stage, tower) for stage in stages]
    number = max(count or 0 for count in counts)
    return number if counts == [min(number, len(s.layers(tower))) for s in stages] else None


def all_or_none(stages: Sequence[Stage], tower: str) -> bool | None:
    """Return whether all (or no) layers of a tower are recomputed, or None for some."""
    held = sum(len(stage.layers(tower)) for stage in stages)
    again = sum(len(stage.recomputed_in(tower)) for stage in stages)
    return again > 0 if again in (0, held) else None


def parse_layout(given: str | Sequence[Sequence[str]], pipeline: int) -> Layout:
    """Parse a layout as Megatron-core does, without checks against a model."""
    chunks = _parse_letters(given) if isinstance(given, str) else _parse_words(given)
    if len(chunks) % pipeline:
        raise LayoutError(
            f"the layout has {len(chunks)} chunks for {pipeline} pipeline stages, and every stage "
            "must have equally many",
            "write a multiple, a chunk for every stage and its layers' turn",
        )
    return Layout(pipeline=pipeline, chunks=chunks)


def _parse_letters(text: str) -> tuple[Chunk, ...]:
    """Return the words of a string's chunks. Groups expand first and cannot nest."""
    if len(text) > _MOST_LETTERS:
        raise LayoutError(
            f"the layout {_shorten(text)} has {len(text):,} letters",
            f"write at most {_MOST_LETTERS:,}, with equal layers as t*3",
        )
    whole = _expand(_ONE, _expand(_GROUP, text.replace(",", "")))
    chunks = whole.split("|")
    for number, chunk in enumerate(chunks):
        wrong = next((letter for letter in chunk if letter not in _WORDS), None)
        if wrong is not None:
            raise LayoutError(
                f"the layout {_shorten(text)} has {wrong!r} in chunk {number}, written out as "
                f"{_shorten(chunk)}",
                "it may hold E, t, m, L and | alone, repeated as x*3 or (xy)*3, without blanks and "
                "without a group in a group",
            )
    return tuple(tuple(_WORDS[letter] for letter in chunk) for chunk in chunks)


def _expand(pattern: re.Pattern[str], text: str) -> str:
    """Write out repeats."""
    size = sum(len(match[1]) * int(match[2]) for match in pattern.finditer(text))
    if size > _MOST_UNITS:
        raise LayoutError(
            f"the layout {_shorten(text)} has {size:,} letters when it is written out",
            f"a model has at most {_MOST_UNITS:,}: correct its repeats",
        )
    return pattern.sub(lambda match: match[1] * int(match[2]), text)


def _parse_words(lists: Sequence[Sequence[str]]) -> tuple[Chunk, ...]:
    """Return chunks given as lists of words."""
    chunks, known = [], (*_LETTERS, ENCODER)
    for number, given in enumerate(lists):
        if isinstance(given, str) or not all(isinstance(word, str) for word in given):
            raise LayoutError(
                f"chunk {number} of the layout is {_shorten(str(given))}",
                f"each must be a list of words, of {', '.join(known)}",
            )
        words = tuple(word.strip().lower() for word in given)
        wrong = next((word for word in words if word not in known), None)
        if wrong is not None:
            raise LayoutError(
                f"chunk {number} of the layout has {wrong!r}",
                f"its words may be {', '.join(known)}",
            )
        chunks.append(words)
    return tuple(chunks)


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}..."
