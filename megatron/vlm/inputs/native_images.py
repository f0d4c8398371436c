"""Images and videos at native resolution as a stage needs them: grids, patches, positions.

Shapes: Y patches of X values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.vlm.inputs.reader import (
    SampleReader,
    UnreadableFile,
    all_times,
    check_count,
    shown_frames,
)
from omnibal.base.errors import UserError
from omnibal.data.chat import EncodedSample
from omnibal.data.native_resolution import Grid, Shown, repeated_tokens, segments_of
from omnibal.data.sample import Sample
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ImagesEncoder
from omnibal.model.units import projector_unit
from omnibal.pipeline.stage_units import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageNeeds:
    """Fields of native-resolution images and RoPE positions that a stage needs."""

    grids: bool = False
    """Whether grids are needed, for borders and rotations of encoder units."""
    patches: bool = False
    places: bool = False
    """Whether features are inserted: the language embed or deepstack features."""
    rope: bool = False
    """Whether layers use RoPE by time, row and column."""

    @classmethod
    def of(cls, model: ModelConfig, stage: Stage) -> "ImageNeeds":
        layers = stage.layers("language")
        rope = bool(layers) and model.language.rope_sections is not None
        name = next((name for name, each in model.encoders.items() if each is model.images), None)
        if model.images is None or name is None:
            return cls(rope=rope)
        embeds = stage.holds(f"{name} embed")
        takes_deepstack = bool(layers) and layers.start < len(model.images.deepstack_layers)
        return cls(
            grids=embeds or bool(stage.layers(name)) or stage.holds(projector_unit(model, name)),
            patches=embeds,
            places=takes_deepstack or stage.holds("language embed"),
            rope=rope,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeImages:
    """Images and videos of one sample, as read by a stage."""

    shown: tuple[Shown, ...] = ()
    grids: tuple[Grid, ...] = ()
    patches_YX: torch.Tensor | None = None
    unreadable: str | None = None
    blank_cells: int | None = None
    """Planned cells if headers are unreadable, so that the text is unknown."""


def read_native_images(
    reader: SampleReader,
    sample: Sample,
    planned: Sequence[int],
    own: range,
    *,
    patches: bool,
    verdict: bool,
) -> NativeImages:
    """Read a sample's images and videos at native resolution.

    Unreadable files become blank patches, numbered by the header or else the plan.

    Args:
        planned: planned cells of every image and video time, or in total.
        own: cells that this rank encodes, of whole images and times.
        patches: whether patch values are needed.
        verdict: whether all files must be checked.
    """
    encoder = reader.model.images
    if encoder is None:
        return NativeImages()
    try:
        shown = tuple(reader.shown(sample))
    except UnreadableFile as error:
        return _blank(sum(planned), len(own), encoder, patches, str(error))
    # Cells of an image, or of each time of a video.
    segments = (segments_of(item.grid, encoder) for item in shown)
    found = [segment.tokens for segment in segments for _ in range(segment.number)]
    cells = sum(found)
    if cells != sum(planned) and any(video.file is None for video in sample.videos):
        fewer = (
            f"{sample.where}: {cells} image tokens where the plan counted {sum(planned)}, and a "
            "video of frames; restore frames that are missing, or take the sample out and plan anew"
        )
        return _blank(sum(planned), len(own), encoder, patches, fewer)
    check_count(cells, sum(planned), "image tokens", sample)
    is_whole = len(own) == cells
    if not is_whole and found != list(planned):
        raise UserError(
            f"{sample.where}: its images do not have the tokens that the plan counted for each; "
            "the data changed after it was planned: run `omnibal lengths` and `omnibal plan` again"
        )
    times = _own_times(shown, own, encoder)
    values, unreadable = None, None
    try:
        if verdict and not (patches and is_whole):
            # All ranks with parts of the sample decode the same files, for one verdict.
            for _ in shown_frames(sample, encoder, all_times(shown)):
                pass
        if patches:
            values = reader.patches(sample, shown, times)
    except UnreadableFile as error:
        values, unreadable = _no_values(len(own), encoder, patches), str(error)
    pairs = zip(shown, times, strict=True)
    return NativeImages(
        shown=shown,
        grids=tuple(item.grid._replace(times=len(own)) for item, own in pairs if own),
        patches_YX=values,
        unreadable=unreadable,
    )


def _own_times(shown: Sequence[Shown], own: range, encoder: ImagesEncoder) -> list[range]:
    """Return each image's or video's times within these cells of a sample."""
    times, start = [], 0
    for item in shown:
        found = segments_of(item.grid, encoder)
        first, stop = (
            min(max(cell - start, 0) // found.tokens, found.number)
            for cell in (own.start, own.stop)
        )
        times.append(range(first, stop))
        start += found.all_tokens
    return times


def _blank(cells: int, own: int, encoder: ImagesEncoder, patches: bool, error: str) -> NativeImages:
    """Return a blank image with `cells` in one row, some of them this rank's."""
    all_cells, grid = (
        Grid(1, encoder.merge_size, number * encoder.merge_size) for number in (cells, own)
    )
    return NativeImages(
        shown=(Shown(all_cells),) if cells else (),
        grids=(grid,) if own else (),
        patches_YX=_no_values(own, encoder, patches),
        unreadable=error,
        blank_cells=cells,
    )


def _no_values(cells: int, encoder: ImagesEncoder, patches: bool) -> torch.Tensor | None:
    sizes = cells * encoder.positions_per_item, encoder.values_per_patch
    return torch.zeros(sizes) if patches else None


def blank_text(cells: int, tokens: int, reader: SampleReader) -> EncodedSample:
    """Return placeholder text of the planned length, without loss, for unreadable headers."""
    encoder = reader.model.images
    assert encoder is not None, "the model takes images at their native resolution"
    token_ids = np.full(tokens, reader.answer_end)
    token_ids[:cells] = reader.tokenizer.require_id(repeated_tokens(encoder)[0])
    return EncodedSample(token_ids=token_ids, loss_mask=np.zeros(tokens, bool))
