"""Micro-batches to measure: with random content, and shares of context-parallel packs.

Shapes: T tiles of C channels and P x P pixels, Y patches of X values, C clips of B bins and F
frames, S tokens, M image tokens, N audio tokens, L tokens with loss.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.pack_share import PackShare
from megatron.vlm.model.embeddings import IMAGE_CHANNELS
from omnibal.base.errors import UserError
from omnibal.cost.context import exchange_mistake
from omnibal.cost.share_features import part_features
from omnibal.data.lengths import Lengths
from omnibal.data.native_resolution import Grid
from omnibal.job.job import JobSpec
from omnibal.model.config import ModelConfig, Provider
from omnibal.model.encoders import ImagesEncoder, squares_of
from omnibal.model.levels import ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import EXCHANGED, LANGUAGE, deepstack_of
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_units import Stage

_SMALLEST_SHARE = 0.25  # smaller shares of the token cap are dominated by latency
_SHARES = (1 / 4, 1 / 16)
"""Tokens of a context-parallel rank's share, as shares of a pack's cap."""
_MIN_IMAGE_TOKENS = 16
"""Minimum tokens of an image among several of a pack: smaller images are rare."""


class _PackShape(NamedTuple):
    """A pack to measure, by shares of caps."""

    tiles: float
    """Share of the cap of tiles, or of image tokens at native resolution."""
    tokens: float
    loss: float
    """Share of its tokens with loss."""
    clips: float
    is_even: bool
    """Whether samples are equally long; else the first has over a third of the tokens."""
    samples: int | None = None
    """Number of samples. None for samples of the mean length."""


_PACKS = (
    # Linearly independent, so that every cost can be fitted.
    _PackShape(1.0, 1.0, 0.1, 0.25, is_even=True),
    _PackShape(0.5, 1.0, 0.5, 1.0, is_even=False),
    _PackShape(0.25, 1.0, 0.3, 0.5, is_even=True),
    _PackShape(1.0, 0.75, 0.4, 0.25, is_even=False),
    _PackShape(0.5, 0.75, 0.05, 1.0, is_even=True),
    _PackShape(0.75, 0.5, 0.5, 0.75, is_even=False),
    _PackShape(0.25, 0.5, 0.1, 0.5, is_even=True),
    _PackShape(_SMALLEST_SHARE, _SMALLEST_SHARE, 0.3, _SMALLEST_SHARE, is_even=False),
    # The longest samples that fit: attention's cost is quadratic in their length.
    _PackShape(0.75, 1.0, 0.2, 1.0, is_even=True, samples=1),
    _PackShape(0.75, 0.75, 0.4, 0.25, is_even=True, samples=2),
    _PackShape(0.5, _SMALLEST_SHARE, 0.2, 0.75, is_even=True, samples=1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    max_tiles: int
    max_tokens: int
    tokens_per_sample: int
    """Mean sample length of the packs; attention's cost depends on it."""
    layers: int
    """Layers of each tower in the measured stage; at most the model's."""
    repetitions: int
    """Timed rounds after a warm-up round. A round runs every micro-batch once."""
    provider: Provider = "local"
    max_clips: int = 0
    """For models with recordings."""
    max_image_tokens: int = 0
    """For models with native-resolution images."""
    contexts: tuple[int, ...] = ()
    """Context-parallel sizes to measure language layers with."""

    def caps(self, model: ModelConfig) -> Caps:
        """Return the caps, with tiles and clips only if the model has them."""
        items = {
            "tiles": self.max_tiles,
            "clips": self.max_clips,
            "image_tokens": self.max_image_tokens,
        }
        return Caps.of(
            **{name: items[name] for name in model.item_features}, tokens=self.max_tokens
        )

    def check(self, model: ModelConfig) -> None:
        """Raise UserError unless the smallest packs hold an item of each encoder."""
        towers = model.encoders.values()
        one_of_each = sum(tower.tokens_per_item for tower in towers)
        smallest = math.ceil(one_of_each / _SMALLEST_SHARE)
        if self.max_tokens < smallest:
            items = " and ".join(f"one {tower.feature.removesuffix('s')}" for tower in towers)
            raise UserError(
                f"--max-tokens {self.max_tokens}: packs of a quarter of the cap are measured too, "
                f"and must hold {items} of {model.name} ({one_of_each} tokens); "
                f"give at least {smallest}"
            )


def make_profiled_batches(model: ModelConfig, options: ProfileOptions) -> Iterator[MicroBatch]:
    """Yield a micro-batch per entry of `_PACKS`, with random content, on the device."""
    for shape in _PACKS:
        tokens = max(round(options.max_tokens * shape.tokens), 1)
        samples = shape.samples or max(round(tokens / options.tokens_per_sample), 1)
        room, tiles, clips, images = tokens, 0, 0, list[int]()
        if model.takes_audio:
            wanted = max(round(options.max_clips * shape.clips), 1)
            room -= model.vision.tokens_per_item if model.takes_images else 0
            clips = min(wanted, room // model.audio.tokens_per_item)
            room = tokens - clips * model.audio.tokens_per_item
        if model.takes_images:
            wanted = max(round(options.max_tiles * shape.tiles), 1)
            tiles = min(wanted, room // model.vision.tokens_per_item)
        elif model.images is not None:
            wanted = max(round(options.max_image_tokens * shape.tiles), 1)
            images = _equal_images(min(wanted, room), samples)
        longest = tokens // samples if shape.is_even else tokens * (samples + 2) // (3 * samples)
        others = np.diff(np.linspace(longest, tokens, samples).round().astype(int))
        segments = tuple(int(length) for length in (longest, *others) if length)
        loss_tokens = max(round(tokens * shape.loss), 1)
        batch = random_batch(model, tiles, segments, loss_tokens, clips=clips, images=images)
        yield batch.to(current_device())


def random_batch(
    model: ModelConfig,
    tiles: int,
    segment_tokens: tuple[int, ...],
    loss_tokens: int,
    stage: Stage | None = None,
    *,
    clips: int = 0,
    images: Sequence[int] = (),
) -> MicroBatch:
    """Make a micro-batch of these sizes with random content, on the host.

    `images` are tokens of images at native resolution, which come first. Only what the stage needs
    is made; None for all.
    """
    tokens, image_tokens = sum(segment_tokens), sum(images)
    seed = clips * 104_729 + (tiles + image_tokens) * 7919 + tokens
    generator, fields = torch.Generator().manual_seed(seed), dict[str, Any]()

    def holds(unit: str) -> bool:
        return stage is None or stage.holds(unit)

    if model.images is not None:
        fields |= _image_fields(model, model.images, images, stage, generator)
    if model.language.rope_sections is not None and (stage is None or stage.layers(LANGUAGE)):
        positions_S = torch.cat([torch.arange(length) for length in segment_tokens])
        fields["rope_positions_3S"] = positions_S.expand(3, -1).contiguous()
    if model.takes_images and holds("vision embed"):
        shape = (tiles, IMAGE_CHANNELS, model.vision.image_size, model.vision.image_size)
        fields["pixels_TCPP"] = torch.randn(shape, generator=generator)
    if model.takes_audio and holds("audio embed"):
        frames = (clips, model.audio.mel_bins, model.audio.frames)
        fields["frames_CBF"] = torch.randn(frames, generator=generator)
    ids_S = torch.randint(model.language.vocab_size, (tokens,), generator=generator)
    if holds("language embed"):
        fields["token_ids_S"], first = ids_S, image_tokens
        if model.takes_images:
            first = tiles * model.vision.tokens_per_item
            fields["image_positions_M"] = torch.arange(first)
        if model.takes_audio:
            stop = first + clips * model.audio.tokens_per_item
            fields["audio_positions_N"] = torch.arange(first, stop)
    if holds("head"):
        positions_L = torch.randperm(tokens, generator=generator)[:loss_tokens].sort().values
        fields["loss_positions_L"] = positions_L
        fields["labels_L"] = ids_S[positions_L]
        fields["loss_weights_L"] = torch.ones(len(positions_L))
    return MicroBatch(
        tiles=tiles, clips=clips, tokens=tokens, segment_tokens=segment_tokens, **fields
    )


def _image_fields(
    model: ModelConfig,
    tower: ImagesEncoder,
    sizes: Sequence[int],
    stage: Stage | None,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Fields of native-resolution images with these tokens, at the micro-batch's first tokens."""
    grids = tuple(_grid_of(size, tower.merge_size) for size in sizes)
    fields: dict[str, Any] = {"image_tokens": sum(sizes), "image_grids": grids}
    if stage is None or stage.holds("vision embed"):
        shape = (sum(sizes) * tower.positions_per_item, tower.values_per_patch)
        fields["patches_YX"] = torch.randn(shape, generator=generator)
    # Only on stages that insert image features or add deepstack features.
    deep = {*range(len(deepstack_of(model)))}
    if stage is None or stage.holds("language embed") or deep & {*stage.layers(LANGUAGE)}:
        fields["image_positions_M"] = torch.arange(sum(sizes))
    return fields


def image_sizes(lengths: Lengths, samples: np.ndarray) -> list[int]:
    """Tokens of possible images: per sample, equal images that match its sum of squared tokens."""
    feature = ImagesEncoder.feature
    names = (feature, squares_of(feature))
    tokens, squares = (lengths.column(name)[samples] for name in names)
    sizes = []
    for all_tokens, square in zip(tokens.tolist(), squares.tolist(), strict=True):
        if all_tokens:
            bounds = np.linspace(0, all_tokens, max(round(all_tokens**2 / square), 1) + 1)
            sizes += np.diff(bounds.round().astype(int)).tolist()
    return sizes


def _grid_of(tokens: int, merge: int) -> Grid:
    """Grid of an image of `tokens` tokens, as near to a square as possible."""
    rows = max(count for count in range(1, math.isqrt(tokens) + 1) if tokens % count == 0)
    return Grid(1, rows * merge, tokens // rows * merge)


def _equal_images(tokens: int, most: int) -> list[int]:
    """Tokens of up to `most` equal, nearly square images, slightly less than `tokens` in total."""
    images = max(min(most, tokens // _MIN_IMAGE_TOKENS), 1)
    rows = math.isqrt(tokens // images)
    return [rows * (tokens // images // rows)] * images


def squared_tokens(grids: Sequence[Grid], tower: ImagesEncoder) -> int:
    """Sum of squared tokens over images and video frames."""
    sizes = ((grid.times, grid.rows * grid.columns // tower.positions_per_item) for grid in grids)
    return sum(times * tokens**2 for times, tokens in sizes)


def with_every_kind(model: ModelConfig, layers: int) -> ModelConfig:
    """Give the first `layers` encoder layers every kind: deepstack projector, full attention."""
    for name, tower in model.encoders.items():
        if isinstance(tower, ImagesEncoder):
            deepstack = (0,) if tower.deepstack_layers else ()
            full = (layers - 1,) if tower.full_layers else ()
            model = model.with_tower(name, deepstack_layers=deepstack, full_layers=full)
    return model


@dataclass(frozen=True, slots=True)
class MeasuredShare:
    """This process's share of a pack."""

    batch: MicroBatch
    """Sizes only. A layer needs no content."""
    context: int
    exchange: ContextExchange
    features: dict[str, int]
    """Features, by name, of the largest share in the rank's block, which all ranks wait for."""


def context_sizes(processes: int) -> tuple[int, ...]:
    """Context-parallel sizes that divide the number of processes: powers of two."""
    powers = (2**exponent for exponent in range(1, processes.bit_length()))
    return tuple(size for size in powers if processes % size == 0)


def shares_of_process(
    job: JobSpec, contexts: Iterable[int], max_tokens: int, tokens_per_sample: int
) -> Iterator[MeasuredShare]:
    """Yield shares of every context size and exchange that the model's heads allow.

    Packs of one sample exchange all tokens, packs of typical samples only tokens at the cuts. This
    separates the costs that depend on exchanged tokens.
    """
    for context, exchange, size in product(contexts, ContextExchange, _SHARES):
        tokens = max(round(max_tokens * size), 1) * context
        several = max(round(tokens / tokens_per_sample), 1)
        for samples, cut in ((1, CutRule.ZIGZAG), (several, CutRule.CONTIGUOUS)):
            level = Level(caps=Caps.of(tokens=tokens), context=context, exchange=exchange, cut=cut)
            if exchange_mistake(job.model, Parallel(pipeline=1), level) is None:
                bounds = np.linspace(0, tokens, samples + 1).round().astype(int)
                yield _share(np.diff(bounds).tolist(), level)


def _share(sample_tokens: Sequence[int], level: Level) -> MeasuredShare:
    tokens = np.array(sample_tokens)
    share = PackShare.cut(tokens, level, dist.get_rank() % level.context)
    batch = MicroBatch(
        tiles=0,
        tokens=share.tokens,
        segment_tokens=tuple(share.own_pieces.tokens.tolist()),
        share=share,
    )
    names = ("tokens", "squared_tokens", EXCHANGED)
    pack = Packs.from_lists([list(range(len(tokens)))])
    lengths = Lengths(
        items={},
        tokens=tokens,
        loss_tokens=tokens,
        source=np.zeros(len(tokens), np.int32),
        source_names=("",),
    )
    largest = part_features(pack, lengths, level, names)[0].max(axis=0)
    features = dict(zip(names, map(round, largest.tolist()), strict=True))
    return MeasuredShare(batch, level.context, level.exchange, features)
