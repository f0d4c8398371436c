"""Measure every kind of unit on this device: the program behind `omnibal profile`.

    torchrun --nproc-per-node 2 -m megatron.vlm.measure.profiler --model MODEL -o PROFILE

Each process builds a stage with every kind of unit and times units during full forward and backward
passes, so that caches are as cold as in training. A second pass recomputes every layer: that adds
less than a forward, as caches are warm. Times are means over processes, which measure at once.
Shapes as in `megatron.vlm.model.stage`.
"""

import argparse
import gc
import math
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from rich.console import Console
from rich.progress import track

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.measured_shares import context_sizes, shares_of_process
from megatron.vlm.measure.random_images import (
    equal_images,
    image_fields,
    squared_tokens,
    with_every_kind,
)
from megatron.vlm.measure.rates import mean_ms, measure_rates, timed_ms
from megatron.vlm.measure.reading import Reading, reading
from megatron.vlm.model.deferred_weights import LateProduct
from megatron.vlm.model.embeddings import IMAGE_CHANNELS
from megatron.vlm.model.encoder import EncoderUnits
from megatron.vlm.model.groups import create_context_groups
from megatron.vlm.model.image_places import ImagePlaces
from megatron.vlm.model.providers import check_provider
from megatron.vlm.model.stage import ByTower, VLMStage, items_of
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.clock import elapsed_ms, moment
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import (
    OptimizationOptions,
    SeenBatches,
    Trainer,
    build_trainer,
    global_sums,
)
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.cost.measured_sizes import measured_sizes
from omnibal.cost.profile import (
    LinkMeasurement,
    OptimizerMeasurement,
    Profile,
    ShareMeasurement,
    UnitMeasurement,
    model_sha256,
    write_profile,
)
from omnibal.data.annotations import Annotations
from omnibal.data.tokenizer import open_tokenizer
from omnibal.families.named import named_model
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, PlainPrecision, Provider, load_cluster
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.rates import CollectiveTime
from omnibal.model.units import (
    HEAD,
    LANGUAGE,
    LANGUAGE_EMBED,
    deepstack_of,
    layer_names,
    projector_name,
)
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.unit_runs import stages_from_cuts

_LINK_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # from latency to bandwidth
_SMALLEST_SHARE = 0.25  # smaller shares are dominated by latency
_PACK_SHARES = (
    # tiles, tokens, loss, even, samples: linearly independent, so that every cost can be fitted.
    (1.0, 1.0, 0.1, True, None),
    (0.5, 1.0, 0.5, False, None),
    (0.25, 1.0, 0.3, True, None),
    (1.0, 0.75, 0.4, False, None),
    (0.5, 0.75, 0.05, True, None),
    (0.75, 0.5, 0.5, False, None),
    (0.25, 0.5, 0.1, True, None),
    (_SMALLEST_SHARE, _SMALLEST_SHARE, 0.3, False, None),
    # The longest samples that fit: attention's cost is quadratic in their length.
    (0.75, 1.0, 0.2, True, 1),
    (0.75, 0.75, 0.4, True, 2),
    (0.5, _SMALLEST_SHARE, 0.2, True, 1),
)
"""Packs to measure: shares of tile and token caps, share of tokens with loss, whether samples are
equal, number of samples (None: from the mean length)."""
_CLIP_SHARES = (0.25, 1.0, 0.5, 0.25, 1.0, 0.75, 0.5, _SMALLEST_SHARE, 1.0, 0.25, 0.75)
"""Shares of the clip cap in these packs, for models with clips."""
OPTIMIZATION = OptimizationOptions(
    lr=1e-4, min_lr=1e-4, lr_decay_style="constant", lr_warmup_fraction=0.0, weight_decay=0.01,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip
build_for_times = partial(build_trainer, options=OPTIMIZATION, steps=1, seed=0, origin="measured")


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


def profile(
    job: JobSpec,
    launch: Launch,
    options: ProfileOptions,
    progress: Console,
    reader: SampleReader | None = None,
) -> Profile:
    """Measure units, optimizer, links, and rates by shape; collective."""
    _check_options(job.model, options)
    parallel = Parallel(pipeline=launch.world_size)
    links = initialize_distributed(launch, parallel, seed=0)
    # Before the model's layers take the device's memory.
    sizes = measured_sizes(job.model, job.cluster, options.caps(job.model), job.precision)
    rates = measure_rates(device_name(), job.precision, sizes, progress)
    samples = max(round(options.max_tokens / options.tokens_per_sample), 1)
    beside = nullcontext() if reader is None else reading(reader, samples)
    with beside as read:
        profiler = Profiler(job, links, options, read)
        repetitions = track(
            range(options.repetitions),
            "measuring units",
            console=progress,
            disable=dist.get_rank() != 0,
        )
        result = profiler.result([profiler.round() for _ in repetitions])
    shut_down_distributed()
    sends = [
        CollectiveTime(kind="send", ranks=2, bytes=one.bytes, ms=one.ms) for one in result.links
    ]
    rates = rates.model_copy(update={"collectives": (*rates.collectives, *sends)})
    return result.model_copy(update={"rates": rates})


def _check_options(model: ModelConfig, options: ProfileOptions) -> None:
    towers = model.encoders.values()
    one_of_each = sum(tower.tokens_per_item for tower in towers)
    smallest = math.ceil(one_of_each / _SMALLEST_SHARE)
    if options.max_tokens < smallest:
        items = " and ".join(f"one {tower.feature.removesuffix('s')}" for tower in towers)
        raise UserError(
            f"--max-tokens {options.max_tokens}: packs of a quarter of the cap are measured too, "
            f"and must hold {items} of {model.name} ({one_of_each} tokens); "
            f"give at least {smallest}"
        )


Round = dict[Hashable, list[float]]
"""Milliseconds of everything timed in a round on this process, a list per key."""


class Profiler:
    """Measures everything once per round, to spread a machine's slow seconds; collective."""

    def __init__(
        self,
        job: JobSpec,
        links: PipelineLinks,
        options: ProfileOptions,
        reading: Reading | None = None,
    ) -> None:
        self._job, self._links, self._reading = job, links, reading
        self._batches = list(profiled_batches(job.model, options))
        towers = (*job.model.encoders.values(), job.model.language)
        deep = min(options.layers, *(tower.layers for tower in towers))
        # Each kind of layer of the tower is measured.
        kinds = [len(set(layer_names(job.model, tower))) for tower in job.model.encoders]
        deep = max(deep, *kinds, 1)

        def build(depth: int) -> Trainer:
            plan = _plan_of_whole_stages(job, links.size, depth)
            return build_for_times(plan, links, provider=options.provider)

        self._provider = options.provider
        self._shallow_optimizer: list[OptimizerMeasurement] = []
        if deep > 1:
            shallow = build(depth=1)
            update = RepeatedUpdate(shallow)
            samples_ms = [update.timed_ms() for _ in range(options.repetitions + 1)]
            self._shallow_optimizer = [_optimizer_measurement(shallow, mean_ms(samples_ms[1:]))]
            del shallow, update
            gc.collect()  # free the shallow stage before building the deep one
        self._trainer = build(depth=deep)
        self._shares = list(
            shares_of_process(job, options.contexts, options.max_tokens, options.tokens_per_sample)
        )
        self._trainer.stage.context_groups = create_context_groups(
            Parallel(pipeline=1, data=dist.get_world_size()), options.contexts
        )
        self._update = RepeatedUpdate(self._trainer)
        self._kept_bytes = [
            kept_bytes_of_units(self._trainer.stage, batch) for batch in self._batches
        ]
        self.round()  # warm-up

    def round(self) -> Round:
        """Time every unit on every pack and share, one update, and one transfer of every size."""
        samples_ms: Round = defaultdict(list)
        stage = self._trainer.stage
        for index, batch in enumerate(self._batches):
            for unit, forward_ms, backward_ms in _times_ms(_units(stage, batch)):
                samples_ms[index, unit, "forward"].append(forward_ms)
                samples_ms[index, unit, "backward"].append(backward_ms)
            for unit, *both_ms in _times_ms(_units(stage, batch), recompute=True):
                if _is_layer(unit):
                    samples_ms[index, unit, "recomputing"].append(sum(both_ms))
            if self._reading is not None:
                self._reading.take(2 * batch.tokens)
        for index, share in enumerate(self._shares):
            layers = _layer_units(stage, share.batch, {})
            hidden_S1E = torch.randn(
                (share.batch.tokens, 1, stage.config.hidden_size),
                dtype=stage.config.params_dtype,
                device=current_device(),
            )
            for unit, forward_ms, backward_ms in _times_ms(layers, hidden_S1E.requires_grad_()):
                samples_ms["share", index, unit, "forward"].append(forward_ms)
                samples_ms["share", index, unit, "backward"].append(backward_ms)
        samples_ms["optimizer"].append(self._update.timed_ms())
        for size in _LINK_BYTES if self._links.size > 1 else ():
            samples_ms["link", size] += _one_way_ms(self._links, size)
        return samples_ms

    def result(self, rounds: Sequence[Round]) -> Profile:
        """Average the rounds into a profile, without the fastest and the slowest tenth.

        Whole rounds and plain means keep the sum of units equal to a step; trimming per unit would
        drop the short stalls that nearly every step has. Not medians: a shared machine may
        alternate between two speeds, and a long run sees both.
        """
        totals_ms = torch.tensor(
            [sum(sum(samples) for samples in ms.values()) for ms in rounds],
            dtype=torch.float64,
            device=current_device(),
        )
        dist.all_reduce(totals_ms)
        extremes = len(rounds) // 10
        chosen = totals_ms.argsort()[extremes : len(rounds) - extremes]
        typical = [rounds[index] for index in chosen.tolist()]
        layer = self._job.model.language.kinds[0].name
        taken_ms = {key: mean_ms([one for ms in typical for one in ms[key]]) for key in rounds[0]}
        deep_optimizer = _optimizer_measurement(self._trainer, taken_ms["optimizer"])
        return Profile(
            device=device_name(),
            precision=self._job.precision,
            model=self._job.model.name,
            model_sha256=model_sha256(self._job.model),
            tensor=1,
            processes=dist.get_world_size(),
            provider=self._provider,
            measurements=tuple(
                UnitMeasurement(
                    unit=unit,
                    **_features(self._job.model, batch),
                    forward_ms=taken_ms[index, unit, "forward"],
                    backward_ms=taken_ms[index, unit, "backward"],
                    recompute_ms=_recompute_ms(taken_ms, index, unit) if _is_layer(unit) else None,
                    activation_bytes=self._kept_bytes[index][unit],
                )
                for index, batch in enumerate(self._batches)
                for unit in self._kept_bytes[index]
            ),
            shares=tuple(
                ShareMeasurement(
                    unit=layer,
                    context=one.context,
                    exchange=one.exchange,
                    **one.features,
                    forward_ms=taken_ms["share", index, layer, "forward"],
                    backward_ms=taken_ms["share", index, layer, "backward"],
                )
                for index, one in enumerate(self._shares)
            ),
            optimizer=(*self._shallow_optimizer, deep_optimizer),
            links=tuple(
                LinkMeasurement(bytes=size, ms=taken_ms["link", size])
                for size in _LINK_BYTES
                if self._links.size > 1
            ),
            reading=None if self._reading is None else self._reading.result(),
        )


def _features(model: ModelConfig, batch: MicroBatch) -> dict[str, int]:
    items = {"tiles": batch.tiles, "clips": batch.clips, "image_tokens": batch.image_tokens}
    squares = {}
    if model.images is not None:
        squares[model.images.squares] = squared_tokens(batch.image_grids, model.images)
    return (
        {name: items[name] for name in model.item_features}
        | squares
        | {
            "tokens": batch.tokens,
            "squared_tokens": sum(length**2 for length in batch.segment_tokens),
            "loss_tokens": len(cast(torch.Tensor, batch.loss_positions_L)),
        }
    )


def _recompute_ms(taken_ms: dict[Hashable, float], batch: int, unit: str) -> float:
    """Time that recomputation adds to forward and backward."""
    without_ms = taken_ms[batch, unit, "forward"] + taken_ms[batch, unit, "backward"]
    return max(taken_ms[batch, unit, "recomputing"] - without_ms, 0.0)


def device_name() -> str:
    if has_cuda():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _plan_of_whole_stages(job: JobSpec, processes: int, depth: int) -> Plan:
    """Plan, no valid pipeline, with all kinds of units and `depth` layers per tower everywhere."""
    towers, model = job.model.towers, with_every_kind(job.model, depth)
    whole = stages_from_cuts(model.with_layers(**dict.fromkeys(towers, depth)), ())
    return Plan(
        model=model.with_layers(**dict.fromkeys(towers, depth * processes)),
        precision=job.precision,
        parallel=Parallel(pipeline=processes),
        stages=whole * processes,
        cluster=job.cluster,
        data=None,
    )


def profiled_batches(model: ModelConfig, options: ProfileOptions) -> Iterator[MicroBatch]:
    """Yield packs at shares of both caps, with the given mean sample length or few samples."""
    for shares, clip_share in zip(_PACK_SHARES, _CLIP_SHARES, strict=True):
        tile_share, token_share, loss_share, even, given = shares
        tokens = max(round(options.max_tokens * token_share), 1)
        room, tiles, clips = tokens, 0, 0
        if model.takes_audio:
            most = max(round(options.max_clips * clip_share), 1)
            room -= model.vision.tokens_per_item if model.takes_images else 0
            clips = min(most, room // model.audio.tokens_per_item)
            room = tokens - clips * model.audio.tokens_per_item
        samples = given or max(round(tokens / options.tokens_per_sample), 1)
        images: list[int] = []
        if model.takes_images:
            most = max(round(options.max_tiles * tile_share), 1)
            tiles = min(most, room // model.vision.tokens_per_item)
        elif model.images is not None:
            most = max(round(options.max_image_tokens * tile_share), 1)
            images = equal_images(min(most, room), samples)
        batch = random_batch(
            model,
            tiles,
            _segments(tokens, samples, even),
            max(round(tokens * loss_share), 1),
            clips=clips,
            images=images,
        )
        yield batch.to(current_device())


def _segments(tokens: int, samples: int, even: bool) -> tuple[int, ...]:
    """Lengths of `samples` samples that sum to `tokens`; if uneven, the first has over a third."""
    longest = tokens // samples if even else tokens * (samples + 2) // (3 * samples)
    rest = np.diff(np.linspace(longest, tokens, samples).round().astype(int))
    return tuple(int(length) for length in (longest, *rest) if length)


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
    """Make a micro-batch of these sizes with random content, on the host."""
    tokens = sum(segment_tokens)
    items = tiles + sum(images)
    generator = torch.Generator().manual_seed(clips * 104_729 + items * 7919 + tokens)
    fields = image_fields(model, images, segment_tokens, stage, generator)
    if model.takes_images and (stage is None or stage.holds("vision embed")):
        shape = (tiles, IMAGE_CHANNELS, model.vision.image_size, model.vision.image_size)
        fields["pixels_TCPP"] = torch.randn(shape, generator=generator)
    if model.takes_audio and (stage is None or stage.holds("audio embed")):
        frames = (clips, model.audio.mel_bins, model.audio.frames)
        fields["frames_CBF"] = torch.randn(frames, generator=generator)
    ids = torch.randint(model.language.vocab_size, (tokens,), generator=generator)
    if stage is None or stage.holds("language embed"):
        fields["token_ids_S"] = ids
        first = sum(images)
        if model.takes_images:
            first = tiles * model.vision.tokens_per_item
            fields["image_positions_M"] = torch.arange(first)
        if model.takes_audio:
            stop = first + clips * model.audio.tokens_per_item
            fields["audio_positions_N"] = torch.arange(first, stop)
    if stage is None or stage.holds("head"):
        positions = torch.randperm(tokens, generator=generator)[:loss_tokens].sort().values
        fields["loss_positions_L"] = positions
        fields["labels_L"] = ids[positions]
        fields["loss_weights_L"] = torch.ones(len(positions))
    return MicroBatch(
        tiles=tiles, clips=clips, tokens=tokens, segment_tokens=segment_tokens, **fields
    )


class Unit(NamedTuple):
    """One unit of a stage, run by itself."""

    name: str
    run: Callable[[Any], Any]
    """Forward, given the previous unit's output. A layer's may be recomputed."""
    hand_on: Callable[[Any], torch.Tensor] = lambda output: output
    """Convert the output to the next unit's input: store or add deepstack features."""


def _units(whole: VLMStage, batch: MicroBatch) -> list[Unit]:
    """Split the forward of a complete stage into units."""
    stage: Any = whole  # Any: no unit is None here

    encoded: dict[str, torch.Tensor] = {}

    def embed_tokens(last_features_KE: torch.Tensor | None) -> torch.Tensor:
        if last_features_KE is not None:  # may be a copy, detached from its encoder's graph
            encoded[list(stage.encoders)[-1]] = last_features_KE
        return stage.embed_tokens(batch, encoded)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return stage.head_output(batch, stage.language.final_layernorm(hidden))

    return [
        *chain.from_iterable(
            _encoder_units(stage, name, units, batch, encoded)
            for name, units in stage.encoders.items()
        ),
        Unit(LANGUAGE_EMBED, embed_tokens),
        *_layer_units(stage, batch, encoded),
        Unit(HEAD, head),
    ]


def _encoder_units(
    stage: VLMStage,
    name: str,
    units: EncoderUnits,
    batch: MicroBatch,
    encoded: dict[str, torch.Tensor],
) -> Iterator[Unit]:
    """Yield the units of an encoder; features go into `encoded`, by name."""
    every: Any = units  # Any: no unit is None here
    places = units.places(batch.image_grids)
    arguments = units.layer_arguments(places)
    made = iter(each.name for each in deepstack_of(stage.model_config) if each.tower == name)

    def project(hidden_VBH: torch.Tensor | None) -> torch.Tensor:
        encoded[name] = every.projector(hidden_VBH, *places)
        return encoded[name]

    def embed(_: None) -> torch.Tensor:
        return every.embedding(items_of(batch, units.tower), *places)

    yield Unit(f"{name}_embed", embed)
    kinds = layer_names(stage.model_config, name)
    # Core offsets layer numbers by stage, but every process holds the first layers.
    for place, (layer, kind) in enumerate(zip(every.layers.layers, kinds, strict=False)):
        run = partial(_run_layer, layer, arguments)
        projector = units.deepstack_projectors.get(place)
        if projector is None:
            yield Unit(kind, run)
        else:
            both = partial(_run_with_projector, run, projector, places)
            yield Unit(kind, both, partial(_put_aside, encoded, next(made)))
    yield Unit(projector_name(stage.model_config, name), project)


def _run_layer(layer: Any, arguments: dict[str, Any], hidden: torch.Tensor) -> torch.Tensor:
    return layer(hidden, None, **arguments)[0]


def _run_with_projector(
    run: Callable[[torch.Tensor], torch.Tensor],
    projector: torch.nn.Module,
    places: tuple[ImagePlaces, ...],
    hidden: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    output = run(hidden)
    return output, projector(output, *places)


def _put_aside(
    encoded: dict[str, torch.Tensor], name: str, both: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Store deepstack features; return a view of the hidden states, to time their backward."""
    hidden, encoded[name] = both
    return hidden.view_as(hidden)


def _is_layer(unit: str) -> bool:
    return "_layer" in unit


def _layer_units(
    whole: VLMStage, batch: MicroBatch, encoded: dict[str, torch.Tensor]
) -> Iterator[Unit]:
    """Yield the language units."""
    stage: Any = whole
    arguments = stage.packing(batch)
    names = layer_names(stage.model_config, LANGUAGE)
    taken = (*stage.deepstack_names, *[None] * len(names))

    def add_features(features: str, hidden: torch.Tensor) -> torch.Tensor:
        return stage.add_features(batch, encoded[features], hidden)

    for layer, name, features in zip(stage.language.layers, names, taken, strict=False):
        run = partial(_run_layer, layer, arguments)
        yield (
            Unit(name, run)
            if features is None
            else Unit(name, run, partial(add_features, features))
        )


def _times_ms(
    row: Iterable[Unit], first_input: torch.Tensor | None = None, *, recompute: bool = False
) -> Iterator[tuple[str, float, float]]:
    """Time units in one pass over a pack; backward starts when the output's gradient arrives."""
    dist.barrier()
    units: list[str] = []
    hidden: Any = first_input
    forward, backward = [moment()], []
    for unit in row:
        if recompute and _is_layer(unit.name):
            output = tensor_parallel.checkpoint(unit.run, False, hidden)
        else:
            output = unit.run(hidden)
        hidden = unit.hand_on(output)
        hidden.register_hook(lambda gradient: backward.append(moment()))
        units.append(unit.name)
        forward.append(moment())
    hidden.backward(torch.ones_like(hidden))
    backward.append(moment())
    if has_cuda():
        torch.cuda.synchronize()
    slowdown = _slowdown(elapsed_ms(forward[0], backward[-1]))
    backward_ms = reversed([slowdown * elapsed_ms(*ends) for ends in pairwise(backward)])
    forward_ms = [slowdown * elapsed_ms(*ends) for ends in pairwise(forward)]
    return zip(units, forward_ms, backward_ms, strict=True)


def _slowdown(own_ms: float) -> float:
    """Time until all processes finish, as a multiple of this process's `own_ms`.

    It exceeds 1 only if processes share cores: there the processes that run first are fast while
    others wait, and the mean would be less than any step takes.
    """
    if has_cuda() or dist.get_world_size() <= len(os.sched_getaffinity(0)):
        return 1.0
    slowest_ms = torch.tensor(own_ms)
    dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
    return slowest_ms.item() / own_ms


class KeptActivations:
    """Current and peak bytes saved by autograd, without weights; shared tensors count once."""

    def __init__(self, *stages: VLMStage) -> None:
        self._weights = {_address(weight) for one in stages for weight in one.parameters()}
        self._holders: dict[int, int] = defaultdict(int)
        self.now_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count tensors saved by forward operations inside."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        with hooks:
            yield

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the tensor too, until it is freed."""
        weakref.finalize(tensor, self._release, *self._acquire(tensor))

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        saved = _Saved(tensor)
        if _address(tensor) not in self._weights:
            weakref.finalize(saved, self._release, *self._acquire(tensor))
        return saved

    def _acquire(self, tensor: torch.Tensor) -> tuple[int, int]:
        address, size = _address(tensor), tensor.untyped_storage().nbytes()
        if not self._holders[address]:
            self.now_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        self._holders[address] += 1
        return address, size

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self.now_bytes -= size


class _Saved:
    """Handle of one saved tensor, freed with the graph's reference to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def peak_activation_bytes(trainer: Trainer, step: Callable[[], object]) -> int:
    """Peak bytes of `step` (a call of `train_step`) on this rank, without the model's state.

    On CUDA all allocated memory. On the CPU saved and received tensors, without working memory and
    without recomputed activations.
    """
    if has_cuda():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    kept = KeptActivations(*trainer.chunks)
    with ExitStack() as recorded:
        for stage in trainer.chunks:
            recorded.enter_context(_recorded(stage, kept))
        step()
    return kept.peak_bytes


@contextmanager
def _recorded(stage: Any, kept: KeptActivations) -> Iterator[None]:
    """Count saved and received tensors of a stage, and inputs kept for weight-gradient passes."""
    forward, set_input_tensor, deferred = stage.forward, stage.set_input_tensor, stage.deferred

    def recorded_forward(batch: MicroBatch) -> ByTower | torch.Tensor:
        with kept.recording():
            return forward(batch)

    def held_input(received: ByTower) -> None:
        for tensor in received.values():
            kept.hold(tensor)
        set_input_tensor(received)

    def held_products() -> list[LateProduct]:
        taken = type(deferred).take(deferred)
        for one in taken:
            kept.hold(one.rows)
            kept.hold(one.gradient)
        return taken

    stage.forward, stage.set_input_tensor = recorded_forward, held_input
    if deferred is not None:
        deferred.take = held_products
    try:
        yield
    finally:
        del stage.forward, stage.set_input_tensor
        if deferred is not None:
            del deferred.take


def kept_bytes_of_units(stage: VLMStage, batch: MicroBatch) -> dict[str, int]:
    """Bytes saved by autograd per unit, inputs included, mean over layers; sums to the stage."""
    kept, graphs = KeptActivations(stage), []
    by_unit: dict[str, list[int]] = defaultdict(list)
    hidden: torch.Tensor | None = None
    for unit in _units(stage, batch):
        before = kept.now_bytes
        with kept.recording():
            given = None if hidden is None else hidden.detach().requires_grad_()
            hidden = unit.hand_on(unit.run(given))
        graphs.append(hidden)
        by_unit[unit.name].append(kept.now_bytes - before)
    return {unit: round(float(np.mean(sizes))) for unit, sizes in by_unit.items()}


def _optimizer_measurement(trainer: Trainer, optimizer_ms: float) -> OptimizerMeasurement:
    parameters = sum(weight.numel() for weight in trainer.stage.parameters())
    return OptimizerMeasurement(parameters=parameters, optimizer_ms=optimizer_ms)


class RepeatedUpdate:
    """Zero, reduce and clip artificial gradients and update weights, then restore the weights."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept = [weight.detach().to("cpu", copy=True) for weight in self._weights()]

    def timed_ms(self) -> float:
        """Time one update; collective."""
        trainer = self._trainer

        def exchange_and_update() -> None:
            global_sums(trainer.links, [], SeenBatches())
            trainer.update_weights(1.0)

        dist.barrier()
        zeroing_ms = timed_ms(trainer.zero_gradients)
        for held in trainer.held:
            for gradients in held.gradients():
                gradients.fill_(1.0)
        updating_ms = timed_ms(exchange_and_update)
        trainer.wait_for_weights()
        # Restore the weights: a replay's single rank would gather its own shard for others.
        with torch.no_grad():
            for weight, kept in zip(self._weights(), self._kept, strict=True):
                weight.copy_(kept)
        return zeroing_ms + updating_ms

    def _weights(self) -> Iterator[torch.Tensor]:
        return (weight for held in self._trainer.held for weight in held.weights())


def _one_way_ms(links: PipelineLinks, size: int) -> list[float]:
    """Half of a round trip between the first two stages, in ms. Empty on other stages."""
    first, second = dist.get_process_group_ranks(links.activations)[:2]
    tensor = torch.zeros(size, dtype=torch.uint8, device=current_device())

    def round_trip() -> None:
        if links.rank == 0:
            dist.isend(tensor, second, group=links.activations).wait()
            dist.irecv(tensor, second, group=links.gradients).wait()
        elif links.rank == 1:
            dist.irecv(tensor, first, group=links.activations).wait()
            dist.isend(tensor, first, group=links.gradients).wait()

    dist.barrier()
    round_trip_ms = timed_ms(round_trip)
    return [round_trip_ms / 2] if links.rank <= 1 else []


def main() -> None:
    """Measure in every process; rank 0 writes profile.json."""
    parser = argparse.ArgumentParser(description="Measure every kind of unit on this device.")
    parser.add_argument("--model", required=True, help="preset name or TOML file")
    parser.add_argument("--precision", choices=get_args(PlainPrecision), default="bf16")
    parser.add_argument("--max-tiles", type=int, default=0, help="tile cap of a pack")
    parser.add_argument("--max-clips", type=int, default=0, help="clip cap of a pack")
    parser.add_argument("--max-image-tokens", type=int, default=0, help="image token cap of a pack")
    parser.add_argument("--max-tokens", type=int, required=True, help="token cap of a pack")
    parser.add_argument("--tokens-per-sample", type=int, required=True, help="a typical sample's")
    parser.add_argument("--layers", type=int, default=4, help="layers of each tower to build")
    parser.add_argument("--repetitions", type=int, default=15, help="timed runs of each pack")
    parser.add_argument("--provider", choices=get_args(Provider), default="local", help="of layers")
    parser.add_argument("--data", type=Path, help="samples that are read meanwhile")
    parser.add_argument("--tokenizer-model", type=Path, help="needed with --data")
    parser.add_argument("-o", "--output", type=Path, required=True, help="profile.json to write")
    arguments = parser.parse_args()
    launch = Launch.from_environment()
    try:
        check_provider(arguments.provider)
        job = JobSpec(
            model=named_model(arguments.model),
            cluster=load_cluster("laptop-cpu"),
            parallel=Parallel(pipeline=1),
            precision=arguments.precision,
        )
        reader = None
        if arguments.data is not None and arguments.tokenizer_model is not None:
            data, tokenizer = Annotations.open(arguments.data), arguments.tokenizer_model
            reader = SampleReader(data, open_tokenizer(tokenizer), job.model)
        # Only these models support context parallelism.
        is_shared = arguments.provider == "local" and job.model.images is None
        given = {field.name for field in fields(ProfileOptions)} & vars(arguments).keys()
        options = ProfileOptions(
            **{name: vars(arguments)[name] for name in given},
            contexts=context_sizes(launch.world_size) if is_shared else (),
        )
        result = profile(job, launch, options, Console(stderr=True), reader)
    except UserError as error:
        if launch.local_rank == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if launch.rank == 0:
        write_profile(result, arguments.output)


if __name__ == "__main__":
    main()
