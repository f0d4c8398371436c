"""Layers by stage as Megatron's layouts and shorter flags; recomputed layers as numbers.

In a layout string E is the embedding, t a language model layer, m a layer of multi-token prediction
and L the head with its loss. `|` ends a chunk, x*3 means xxx and (xy)*3 xyxyxy. With P stages,
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

EMBEDDING, DECODER, PREDICTION, LOSS = LETTERS = "EtmL"
ENCODER = "e"  # only in lists of words
# Core's word for each letter, in layouts written as lists.
LAYOUT_WORDS = {EMBEDDING: "embedding", DECODER: "decoder", PREDICTION: "mtp", LOSS: "loss"}
_LETTER_OF_WORD = {word: letter for letter, word in LAYOUT_WORDS.items()} | {"encoder": ENCODER}
_GROUP, _ONE = re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)")
# Letters as given and expanded, far above any model's layers: repeats multiply.
_MAX_GIVEN, _MAX_EXPANDED = 4_000, 100_000


class LayoutError(UserError):
    """Problem of a layout that Megatron-core's parser refuses, and its correction."""

    def __init__(self, problem: str, change: str):
        super().__init__(problem, change)
        self.problem, self.change = problem, change

    def __str__(self) -> str:
        return f"{self.problem}; {self.change}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PPLayout:
    """Units of every chunk of every stage."""

    pipeline: int  # number of stages
    # Letters of every chunk, in model order: i is chunk i // pipeline of stage i % pipeline.
    chunks: tuple[str, ...]

    @property
    def virtual(self) -> int:  # chunks per stage
        return len(self.chunks) // self.pipeline

    @property
    def units(self) -> str:
        return "".join(self.chunks)

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
        """PPLayout string with a letter per layer."""
        return "|".join(self.chunks)

    @property
    def short_text(self) -> str:
        """PPLayout string with repeats, such as `Et*17|t*23mL`."""
        runs = ((letter, len(list(run))) for letter, run in groupby(self.text))
        return "".join(
            f"{letter}*{count}" if count > 2 and letter != "|" else letter * count
            for letter, count in runs
        )

    @property
    def end_layers(self) -> tuple[int, int] | None:
        """Layers of the first and last stage. None if Megatron's flags for them do not suffice."""
        layers = self.layers
        between = set(layers[1:-1])
        # These flags split the middle evenly, and refuse stages without layers.
        if self.pipeline < 2 or self.virtual > 1 or not all(layers) or len(between) > 1:
            return None
        return layers[0], layers[-1]

    @property
    def is_even(self) -> bool:
        """Whether all stages have one chunk, with equal numbers of layers."""
        return self.virtual == 1 and len(set(self.layers)) == 1


def layout_of(stages: Sequence[Stage], prediction_layers: int, chunks: int = 1) -> PPLayout:
    """Return the layout of `stages`, which are chunks in model order if `chunks` > 1.

    Multi-token prediction layers are put with the head. Raises UserError if stage 0 has no embed.
    """
    first = "language embed"
    if not stages[0].holds(first):
        raise UserError("stage 0 does not hold the language embed: put all encoders there")
    letters = [
        EMBEDDING * stage.holds(first)
        + DECODER * len(stage.layers(LANGUAGE))
        + (PREDICTION * prediction_layers + LOSS) * stage.holds(HEAD)
        for stage in stages
    ]
    return PPLayout(pipeline=len(stages) // chunks, chunks=tuple(letters))


def split_flags(layout: PPLayout) -> dict[str, str]:
    """Return Megatron's shortest flags for a split, by name without dashes.

    Empty for equal stages, else layers of the first and last stage if the middle is equal, else the
    layout.
    """
    # Without a layout, Megatron puts multi-token prediction with the head, as the plan does.
    if layout.is_even:
        return {}
    if layout.end_layers is not None:
        first, last = map(str, layout.end_layers)
        flags = {"decoder-first-pipeline-num-layers": first}
        return flags | {"decoder-last-pipeline-num-layers": last}
    return {"pipeline-model-parallel-layout": layout.short_text}


def first_layers(stage: Stage, tower: str) -> int | None:
    """Return the n if a stage recomputes the first n of its layers of a tower, else None."""
    recomputed = sorted(stage.recomputed_in(tower))
    count = len(recomputed)
    return count if recomputed == list(stage.layers(tower)[:count]) else None


def one_number(stages: Sequence[Stage], tower: str) -> int | None:
    """Return the n with which `block` recomputes a tower's layers in all stages, or None.

    Megatron's `block` recomputes the first min(n, held) layers of each stage or chunk.
    """
    counts = [first_layers(stage, tower) for stage in stages]
    number = max(count or 0 for count in counts)
    return number if counts == [min(number, len(s.layers(tower))) for s in stages] else None


def all_or_none(stages: Sequence[Stage], tower: str) -> bool | None:
    """Return whether all (or no) layers of a tower are recomputed, or None for some."""
    held = sum(len(stage.layers(tower)) for stage in stages)
    recomputed = sum(len(stage.recomputed_in(tower)) for stage in stages)
    return recomputed > 0 if recomputed in (0, held) else None


def parse_layout(given: str | Sequence[Sequence[str]], pipeline: int) -> PPLayout:
    """Parse a layout as Megatron-core does, apart from any model. Raises LayoutError.

    Whether the chunks are a multiple of the stages is not checked.
    """
    chunks = _parse_letters(given) if isinstance(given, str) else [*map(_parse_words, given)]
    return PPLayout(pipeline=pipeline, chunks=tuple(chunks))


def _parse_letters(text: str) -> list[str]:
    """Return the chunks of a layout string."""
    if len(text) > _MAX_GIVEN:
        raise LayoutError(
            f"the layout {_shorten(text)} has {len(text):,} letters",
            f"write at most {_MAX_GIVEN:,}, with equal layers as t*3",
        )
    # As in core's parser: groups expand first and cannot nest, and commas are ignored.
    chunks = _expand(_ONE, _expand(_GROUP, text.replace(",", ""))).split("|")
    for number, chunk in enumerate(chunks):
        wrong = chunk.lstrip(LETTERS)[:1]
        if wrong:
            raise LayoutError(
                f"the layout {_shorten(text)} has {wrong!r} in chunk {number}, {_shorten(chunk)}",
                "use only E, t, m, L and |, repeated as x*3 or (xy)*3, without blanks or nesting",
            )
    return chunks


def _expand(pattern: re.Pattern[str], text: str) -> str:
    # Counted before expansion, so that x*999999999 takes no memory.
    size = sum(len(match[1]) * int(match[2]) for match in pattern.finditer(text))
    if size > _MAX_EXPANDED:
        raise LayoutError(
            f"the layout {_shorten(text)} has {size:,} letters when it is expanded",
            f"a model has at most {_MAX_EXPANDED:,}: correct its repeats",
        )
    return pattern.sub(lambda match: match[1] * int(match[2]), text)


def _parse_words(words: Sequence[str]) -> str:
    """Return the letters of a chunk given as words."""
    try:
        return "".join(_LETTER_OF_WORD[word.strip().lower()] for word in words)
    except KeyError as error:
        known = ", ".join(_LETTER_OF_WORD)
        raise LayoutError(f"the layout has the word {error}", f"use {known}") from error


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}..."
