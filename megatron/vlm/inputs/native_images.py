"""Native-resolution images and videos of a sample: the grids and frames that a stage needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.vlm.inputs.reader import SampleReader, UnreadableFile, check_count
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
    """Image fields and RoPE positions that a stage needs."""

    grids: bool = False  # for borders and rotations in encoder units
    places: bool = False  # positions of features, for the language embed and deepstack layers
    rope: bool = False  # time, row and column of every token, for layers with sectioned RoPE

    @classmethod
    def of_stage(cls, model: ModelConfig, stage: Stage) -> "ImageNeeds":
        layers = stage.layers("language")
        rope = bool(layers) and model.language.rope_sections is not None
        if model.images is None:
            return cls(rope=rope)
        name = next(name for name, tower in model.encoders.items() if tower is model.images)
        takes_deepstack = bool(layers) and layers.start < len(model.images.deepstack_layers)
        return cls(
            grids=bool(stage.layers(name))
            or stage.holds(f"{name} embed")
            or stage.holds(projector_unit(model, name)),
            places=takes_deepstack or stage.holds("language embed"),
            rope=rope,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeImages:
    """Images and videos of one sample, and the frame groups that this rank encodes."""

    shown: tuple[Shown, ...] = ()  # all images and videos of the sample
    times: tuple[range, ...] = ()  # own frame groups of each of `shown`; may be empty
    grids: tuple[Grid, ...] = ()  # only of own frame groups
    is_whole: bool = True  # whether all frame groups are own
    unreadable: str | None = None  # error of unreadable headers, if any
    blank_cells: int | None = None  # planned cells, if unreadable headers prevent encoding


def list_native_images(
    reader: SampleReader, sample: Sample, planned: Sequence[int], own: range
) -> NativeImages:
    """Return a sample's images and videos, from headers.

    Args:
        planned: planned cells of every image and frame group of a video, or their sum alone.
        own: cells that this rank encodes, of complete images and frame groups.
    """
    encoder = reader.model.images
    if encoder is None:
        return NativeImages()
    try:
        shown = tuple(reader.list_shown(sample))
    except UnreadableFile as error:
        return _blank(sum(planned), len(own), encoder, str(error))
    # Cells of an image, or of each frame group of a video.
    segments = [segments_of(item.grid, encoder) for item in shown]
    cells_of_segments = [item.tokens for item in segments for _ in range(item.number)]
    cells = sum(cells_of_segments)
    if cells != sum(planned) and any(video.file is None for video in sample.videos):
        missing = (
            f"{sample.where}: {cells} image tokens where the plan counted {sum(planned)}, and a "
            "video of frames; restore frames, or take the sample out and plan again"
        )
        return _blank(sum(planned), len(own), encoder, missing)
    check_count(cells, sum(planned), "image tokens", sample)
    is_whole = len(own) == cells
    if not is_whole and cells_of_segments != list(planned):
        raise UserError(
            f"{sample.where}: its images do not have the tokens that the plan counted for each; "
            "the data changed after it was planned: run `omnibal lengths` and `omnibal plan` again"
        )
    # This rank's frame groups of each item: `own` is a run of cells of the sample.
    times, start = list[range](), 0
    for segment in segments:
        first, stop = (
            min(max(cell - start, 0) // segment.tokens, segment.number)
            for cell in (own.start, own.stop)
        )
        times.append(range(first, stop))
        start += segment.all_tokens
    pairs = zip(shown, times, strict=True)
    return NativeImages(
        shown=shown,
        times=tuple(times),
        grids=tuple(item.grid._replace(times=len(groups)) for item, groups in pairs if groups),
        is_whole=is_whole,
    )


def _blank(cells: int, own: int, encoder: ImagesEncoder, error: str) -> NativeImages:
    """Return one blank image with a single row of `cells`. This rank encodes `own` of them."""
    all_cells, grid = (
        Grid(1, encoder.merge_size, number * encoder.merge_size) for number in (cells, own)
    )
    return NativeImages(
        shown=(Shown(all_cells),) if cells else (),
        grids=(grid,) if own else (),
        unreadable=error,
        blank_cells=cells,
    )


def blank_text(cells: int, tokens: int, reader: SampleReader) -> EncodedSample:
    """Return placeholder text of the planned length, without loss, for unreadable headers."""
    encoder = reader.model.images
    assert encoder is not None, "the model takes native-resolution images"
    # `cells` image tokens, as other stages insert that many features.
    token_ids = np.full(tokens, reader.answer_end)
    token_ids[:cells] = reader.tokenizer.require_id(repeated_tokens(encoder)[0])
    return EncodedSample(token_ids=token_ids, loss_mask=np.zeros(tokens, bool))
