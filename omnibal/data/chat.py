"""A conversation to token ids and the mask of what is learned: InternVL's `internlm2-chat`.

    <s><|im_start|>user\\n{question}<|im_end|>\\n<|im_start|>assistant\\n{answer}<|im_end|>\\n ...

There is no system message. Loss falls on each answer and the `<|im_end|>` that closes it. Every
piece of text is encoded on its own, so no token straddles the border of the mask.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from omnibal.data.annotations import IMAGE, Sample
from omnibal.data.tokenizer import Tokenizer

_SEGMENTS_PER_TURN = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedSample:
    """One conversation; both arrays are [tokens]."""

    token_ids: np.ndarray
    """int64."""
    loss_mask: np.ndarray
    """bool: the token is to be predicted (not shifted)."""


def encode_sample(
    sample: Sample, tiles_per_image: Sequence[int], tokens_per_tile: int, tokenizer: Tokenizer
) -> EncodedSample:
    """The whole conversation; image i takes `tiles_per_image[i] * tokens_per_tile` tokens."""
    segments = list(_segments(sample, tiles_per_image, tokens_per_tile, tokenizer))
    return EncodedSample(
        token_ids=np.concatenate([np.array(ids, np.int64) for ids, _ in segments]),
        loss_mask=np.repeat(
            [learned for _, learned in segments], [len(ids) for ids, _ in segments]
        ),
    )


def encode_prompt(
    sample: Sample,
    turn: int,
    tiles_per_image: Sequence[int],
    tokens_per_tile: int,
    tokenizer: Tokenizer,
) -> np.ndarray:
    """What precedes the answer of `turn`, reference answers of earlier turns included. int64"""
    segments = _segments(sample, tiles_per_image, tokens_per_tile, tokenizer)
    asked = islice(segments, _SEGMENTS_PER_TURN * turn + 1)
    return np.concatenate([np.array(ids, np.int64) for ids, _ in asked])


def _segments(
    sample: Sample, tiles_per_image: Sequence[int], tokens_per_tile: int, tokenizer: Tokenizer
) -> Iterator[tuple[list[int], bool]]:
    """(token ids, carries loss) of each turn's question, answer and line end, in that order."""
    if len(tiles_per_image) != len(sample.images):
        raise ValueError(
            f"{sample.where}: tiles of {len(tiles_per_image)} image(s) were given for "
            f"{len(sample.images)}"
        )
    tiles = iter(tiles_per_image)
    line_end = tokenizer.encode("\n")
    assistant = [tokenizer.turn_start, *tokenizer.encode("assistant\n")]
    opening = [tokenizer.bos]
    for turn in sample.turns:
        question = [*opening, tokenizer.turn_start, *tokenizer.encode("user\n")]
        first, *others = turn.question.split(IMAGE)
        question += tokenizer.encode(first)
        for text in others:
            image_tokens = [tokenizer.image_context] * (next(tiles) * tokens_per_tile)
            question += [tokenizer.image_start, *image_tokens, tokenizer.image_end]
            question += tokenizer.encode(text)
        yield [*question, tokenizer.turn_end, *line_end, *assistant], False
        yield [*tokenizer.encode(turn.answer), tokenizer.turn_end], True
        yield line_end, False
        opening = []
