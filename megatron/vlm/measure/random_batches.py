"""Micro-batches to measure: random content, or a context-parallel rank's share of a pack.

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
from megatron.vlm.inputs.batch import EMBEDDING_UNITS, MicroBatch, encoder_inputs
from megatron.vlm.inputs.native_images import ImageNeeds
from megatron.vlm.inputs.pack_share import PackShare
from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.data.native_resolution import Grid
from omnibal.job.job import JobSpec
from omnibal.model.config import ModelConfig, Provider
from omnibal.model.encoders import ImagesEncoder, squares_of
from omnibal.model.layer_kinds import LayerRun
from omnibal.model.levels import ContextExchange, CutRule, Level, exchange_mistake
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.units import EXCHANGED, LANGUAGE
from omnibal.packing.features import part_features
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import stages_from_cuts

_SMALLEST_SHARE = 0.25  # smaller shares of the token cap are dominated by latency
_SHARES = (1 / 4, 1 / 16)  # tokens of a context-parallel rank, as fractions of a pack's cap
_MIN_IMAGE_TOKENS = 16  # of an image among several of a pack: smaller images are rare


class _PackShape(NamedTuple):
    """Sizes of a pack to measure, as shares of the caps."""

    tiles: float  # share of the cap of tiles, or of image tokens at native resolution
    tokens: float
    loss: float  # share of the pack's tokens with loss
    clips: float
    is_even: bool  # equally long samples, else the first has over a third of the tokens
    samples: int | None = None  # number of samples, or None for the mean length


_PACKS = (
    # Linearly independent in tiles, tokens, loss tokens and clips, to fit every cost.
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
    tokens_per_sample: int  # mean sample length of the packs; attention's cost depends on it
    layers: int  # per tower in the measured stage; at most the model's, at least one per kind
    repetitions: int  # timed rounds of all micro-batches, after a warm-up round
    provider: Provider = "local"
    max_clips: int = 0  # for models with recordings
    max_image_tokens: int = 0  # for models with native-resolution images
    contexts: tuple[int, ...] = ()  # context-parallel sizes to measure language layers with

    def caps(self, model: ModelConfig) -> Caps:
        """Return the caps, with items (tiles, clips, image tokens) only if the model has them."""
        names = (*model.item_features, "tokens")
        return Caps.of(**{name: getattr(self, f"max_{name}") for name in names})

    def check(self, model: ModelConfig) -> None:
        """Raise UserError unless the smallest packs hold an item of each encoder."""
        towers = model.encoders.values()
        item_tokens = sum(tower.tokens_per_item for tower in towers)
        smallest = math.ceil(item_tokens / _SMALLEST_SHARE)
        if self.max_tokens < smallest:
            raise UserError(
                f"--max-tokens {self.max_tokens}: a quarter of it must hold an item of each "
                f"encoder of {model.name} ({item_tokens} tokens); give at least {smallest}"
            )


def make_profiled_batches(model: ModelConfig, options: ProfileOptions) -> Iterator[MicroBatch]:
    """Yield a micro-batch per shape in `_PACKS`, with random content, on the device."""
    for shape in _PACKS:
        tokens = max(round(options.max_tokens * shape.tokens), 1)
        samples = shape.samples or max(round(tokens / options.tokens_per_sample), 1)
        free, tiles, clips, images = tokens, 0, 0, list[int]()
        if model.takes_audio:
            wanted = max(round(options.max_clips * shape.clips), 1)
            free -= model.vision.tokens_per_item if model.takes_images else 0  # for one tile
            clips = min(wanted, free // model.audio.tokens_per_item)
            free = tokens - clips * model.audio.tokens_per_item
        if model.takes_images:
            wanted = max(round(options.max_tiles * shape.tiles), 1)
            tiles = min(wanted, free // model.vision.tokens_per_item)
        elif model.images is not None:
            wanted = max(round(options.max_image_tokens * shape.tiles), 1)
            # Equal, nearly square images, with slightly fewer tokens in total.
            wanted = min(wanted, free)
            count = max(min(samples, wanted // _MIN_IMAGE_TOKENS), 1)
            rows = math.isqrt(wanted // count)
            images = [rows * (wanted // count // rows)] * count
        # Uneven samples: the first has a third of the tokens and two thirds of a mean sample.
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
    """Return a micro-batch of these sizes with random content, on the host.

    Args:
        stage: units that need fields, or None for all units.
        images: tokens of each native-resolution image, at the first positions.
    """
    tokens, image_tokens = sum(segment_tokens), sum(images)
    # Seeded by sizes, so that all stages and processes make the same content.
    seed = clips * 104_729 + (tiles + image_tokens) * 7919 + tokens
    generator, fields = torch.Generator().manual_seed(seed), dict[str, Any]()
    stage = stages_from_cuts(model, ())[0] if stage is None else stage
    needs = ImageNeeds.of_stage(model, stage)
    items = {"tiles": tiles, "clips": clips, "image_tokens": image_tokens}
    if model.images is not None:
        fields["image_tokens"] = image_tokens
        fields["image_grids"] = tuple(_nearly_square(model.images, size) for size in images)
    if needs.places:
        fields["image_positions_M"] = torch.arange(image_tokens)
    if needs.rope:
        positions_S = torch.cat([torch.arange(length) for length in segment_tokens])
        fields["rope_positions_3S"] = positions_S.expand(3, -1).contiguous()  # as in text
    for name, (feature, rows, shape) in encoder_inputs(model).items():
        if stage.holds(EMBEDDING_UNITS[name]):
            fields[name] = torch.randn((items[feature] * rows, *shape), generator=generator)
    ids_S = torch.randint(model.language.vocab_size, (tokens,), generator=generator)
    if stage.holds("language embed"):
        # Images are first, then recordings.
        fields["token_ids_S"], first = ids_S, image_tokens
        if model.takes_images:
            first = tiles * model.vision.tokens_per_item
            fields["image_positions_M"] = torch.arange(first)
        if model.takes_audio:
            stop = first + clips * model.audio.tokens_per_item
            fields["audio_positions_N"] = torch.arange(first, stop)
    if stage.holds("head"):
        fields |= {"token_ids_S": ids_S} if model.language.prediction_layers else {}
        positions_L = torch.randperm(tokens, generator=generator)[:loss_tokens].sort().values
        fields["loss_positions_L"] = positions_L
        fields["labels_L"] = ids_S[positions_L]
        fields["loss_weights_L"] = torch.ones(len(positions_L))
    return MicroBatch(
        tiles=tiles, clips=clips, tokens=tokens, segment_tokens=segment_tokens, **fields
    )


def _nearly_square(tower: ImagesEncoder, tokens: int) -> Grid:
    """Return the grid of an image of these tokens, as close to a square as possible."""
    rows = max(count for count in range(1, math.isqrt(tokens) + 1) if tokens % count == 0)
    return Grid(1, rows * tower.merge_size, tokens // rows * tower.merge_size)


def image_sizes(lengths: Lengths, samples: np.ndarray) -> list[int]:
    """Return image sizes in tokens that give about each sample's tokens and squared tokens."""
    feature = ImagesEncoder.feature
    names = (feature, squares_of(feature))
    tokens, squares = (lengths.column(name)[samples] for name in names)
    sizes = []
    for all_tokens, square in zip(tokens.tolist(), squares.tolist(), strict=True):
        if all_tokens:
            # n equal images of t tokens in total have t^2 / n squared tokens.
            bounds = np.linspace(0, all_tokens, max(round(all_tokens**2 / square), 1) + 1)
            sizes += np.diff(bounds.round().astype(int)).tolist()
    return sizes


def squared_tokens(grids: Sequence[Grid], tower: ImagesEncoder) -> int:
    """Return the squared tokens of each image or frame group, in total."""
    sizes = ((grid.times, grid.rows * grid.columns // tower.positions_per_item) for grid in grids)
    return sum(times * tokens**2 for times, tokens in sizes)


def with_every_kind(model: ModelConfig, layers: int) -> ModelConfig:
    """Return the model with all kinds of layer in its first `layers`, or the last kinds if few."""
    kinds = list(dict.fromkeys(model.language.kinds))
    if len(kinds) > 1:
        runs = tuple(LayerRun(layers=1, **dict(kind)) for kind in kinds[-layers:])
        model = model.with_tower(LANGUAGE, runs=runs)
    for name, tower in model.encoders.items():
        if isinstance(tower, ImagesEncoder):
            deepstack = (0,) if tower.deepstack_layers else ()
            full = (layers - 1,) if tower.full_layers else ()
            model = model.with_tower(name, deepstack_layers=deepstack, full_layers=full)
    return model


@dataclass(frozen=True, slots=True)
class MeasuredShare:
    batch: MicroBatch  # without content, which a layer does not need
    context: int
    exchange: ContextExchange
    features: dict[str, int]  # of the largest share of the pack, as all its ranks wait for it


def context_sizes(processes: int) -> tuple[int, ...]:
    """Return the powers of two above 1 that divide the number of processes."""
    powers = (2**exponent for exponent in range(1, processes.bit_length()))
    return tuple(size for size in powers if processes % size == 0)


def shares_of_process(
    job: JobSpec, contexts: Iterable[int], max_tokens: int, tokens_per_sample: int
) -> Iterator[MeasuredShare]:
    """Yield this process's shares, for each context-parallel size and exchange the model allows."""
    for context, exchange, size in product(contexts, ContextExchange, _SHARES):
        tokens = max(round(max_tokens * size), 1) * context
        several = max(round(tokens / tokens_per_sample), 1)
        # A single sample exchanges all tokens, several only those at cuts: fits tell costs apart.
        for samples, cut in ((1, CutRule.ZIGZAG), (several, CutRule.CONTIGUOUS)):
            level = Level(caps=Caps.of(tokens=tokens), context=context, exchange=exchange, cut=cut)
            if exchange_mistake(job.model, Parallel(pipeline=1), level) is None:
                bounds = np.linspace(0, tokens, samples + 1).round().astype(int)
                yield _make_share(np.diff(bounds), level)


def _make_share(tokens: np.ndarray, level: Level) -> MeasuredShare:
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
