"""Measure every kind of unit on this device: the program behind `omnibal profile`.

    torchrun --nproc-per-node 2 -m megatron.vlm.profiler --model internvl-digits -o profile.json

Each process builds one stage that holds every kind of unit and runs micro-batches through it, unit
by unit: forward in order, then backward in reverse, as training does, so that caches are as cold
and the machine as busy as they will be then. All processes measure at the same moment and the
slowest counts.

Shapes are those of `megatron.vlm.stage`.
"""

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from rich.console import Console
from rich.progress import track
from scipy.stats import trim_mean

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.batch import MicroBatch
from megatron.vlm.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.schedule import PipelineLinks
from megatron.vlm.stage import IMAGE_CHANNELS, VLMStage
from megatron.vlm.train import OptimizationOptions, Trainer, build_trainer
from omnibal.config import ClusterConfig, ModelConfig, Precision, load_cluster, load_model
from omnibal.cost.model import Unit
from omnibal.cost.profile import (
    LinkMeasurement,
    OptimizerMeasurement,
    Profile,
    UnitMeasurement,
    model_sha256,
    write_profile,
)
from omnibal.errors import EXIT_USER_ERROR, UserError
from omnibal.plan import Parallel, Plan, Stage

_LINK_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
_SHARES_OF_CAPS = (0.25, 0.5, 0.75, 1.0)
_OPTIMIZATION = OptimizationOptions(
    lr=1e-4, min_lr=1e-4, lr_decay_style="constant", lr_warmup_fraction=0.0, weight_decay=0.01,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Which micro-batches to measure, and how often."""

    max_tiles: int
    max_tokens: int
    tokens_per_sample: int
    """Packs are made of samples of about this length; attention's cost depends on it."""
    layers: int
    """Layers of each tower in the measured stage; at most the model's own."""
    repetitions: int
    """Timed runs of each micro-batch, after one warm-up; their trimmed mean counts."""


def profile(
    model: ModelConfig, precision: Precision, cluster: ClusterConfig, launch: Launch,
    options: ProfileOptions, progress: Console,
) -> Profile:  # fmt: skip
    """Measure units, optimizer and links; collective over all processes.

    Raises:
        UserError: the smallest pack to be measured has no room for a tile.
    """
    smallest = math.ceil(model.tokens_per_tile / _SHARES_OF_CAPS[0])
    if options.max_tokens < smallest:
        raise UserError(
            f"--max-tokens {options.max_tokens}: packs of a quarter of the cap are measured too, "
            f"and must hold one tile of {model.name} ({model.tokens_per_tile} tokens); "
            f"give at least {smallest}"
        )
    parallel = Parallel(pipeline=launch.world_size)
    links = initialize_distributed(launch, parallel, seed=0)
    depths = sorted({1, min(options.layers, model.vision.layers, model.language.layers)})
    optimizer = []
    for depth in depths:
        plan = _plan_of_whole_stages(model, precision, cluster, parallel, depth)
        trainer = build_trainer(plan, links, _OPTIMIZATION, steps=1, seed=0)
        optimizer.append(_measure_optimizer(trainer, options.repetitions))
    measurements = _measure_units(
        trainer, list(_batches(model, options)), options.repetitions, progress
    )
    link_measurements = _measure_links(links, options.repetitions) if links.size > 1 else []
    result = Profile(
        device=torch.cuda.get_device_name() if has_cuda() else _cpu_name(),
        precision=precision,
        model=model.name,
        model_sha256=model_sha256(model),
        tensor=1,
        processes=launch.world_size,
        measurements=tuple(measurements),
        optimizer=tuple(optimizer),
        links=tuple(link_measurements),
    )
    shut_down_distributed()
    return result


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _plan_of_whole_stages(
    model: ModelConfig, precision: Precision, cluster: ClusterConfig, parallel: Parallel, depth: int
) -> Plan:
    """Every process holds all kinds of unit and `depth` layers of each tower.

    No pipeline could run this plan; it only gives each process a complete stage of its own.
    """
    whole = Stage(
        vision_embed=True,
        vision_layers=depth,
        projector=True,
        language_embed=True,
        language_layers=depth,
        head=True,
    )
    layers = {"layers": depth * parallel.pipeline}
    return Plan(
        model=model.model_copy(
            update={
                "vision": model.vision.model_copy(update=layers),
                "language": model.language.model_copy(update=layers),
            }
        ),
        precision=precision,
        parallel=parallel,
        stages=(whole,) * parallel.pipeline,
        cluster=cluster,
        data=None,
    )


def _batches(model: ModelConfig, options: ProfileOptions) -> Iterator[MicroBatch]:
    """Packs at shares of both caps, with samples of the given length and of half of it."""
    for share in _SHARES_OF_CAPS:
        for length in (options.tokens_per_sample, max(options.tokens_per_sample // 2, 1)):
            tokens = max(round(options.max_tokens * share), 1)
            tiles = min(max(round(options.max_tiles * share), 1), tokens // model.tokens_per_tile)
            yield _batch(model, tiles, tokens, min(length, tokens))


def _batch(model: ModelConfig, tiles: int, tokens: int, length: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(tiles * 7919 + tokens)
    segments = [length] * (tokens // length)
    segments[-1] += tokens - sum(segments)
    size, image_tokens = model.vision.image_size, tiles * model.tokens_per_tile
    ids = torch.randint(model.language.vocab_size, (tokens,), generator=generator)
    positions = torch.arange(0, tokens, max(tokens // 10, 1))
    return MicroBatch(
        tiles=tiles,
        tokens=tokens,
        segment_tokens=tuple(segments),
        pixels_TCPP=torch.randn(tiles, IMAGE_CHANNELS, size, size, generator=generator),
        token_ids_S=ids,
        image_positions_M=torch.arange(image_tokens),
        loss_positions_L=positions,
        labels_L=ids[positions],
    ).to(current_device())


@dataclass(slots=True)
class _UnitRun:
    """One unit's part of one pass."""

    unit: Unit
    received: torch.Tensor | None
    output: torch.Tensor
    forward_ms: float
    backward_ms: float = 0.0


def _unit_functions(
    stage: VLMStage, batch: MicroBatch
) -> list[tuple[Unit, Callable[[torch.Tensor | None], torch.Tensor]]]:
    """The stage's forward, cut into its units."""
    packed = batch.packed_seq_params(current_device())
    rotary = stage.rotary(max(batch.segment_tokens))

    def vision_layer(layer):
        return lambda hidden: layer(hidden, None)[0]

    def language_layer(layer):
        return lambda hidden: layer(hidden, None, rotary_pos_emb=rotary, packed_seq_params=packed)[
            0
        ]

    def head(hidden):
        return stage.head_output(batch, stage.language.final_layernorm(hidden))

    return [
        (Unit.VISION_EMBED, lambda _: stage.vision_embedding(batch.pixels_TCPP)),
        *((Unit.VISION_LAYER, vision_layer(layer)) for layer in stage.vision.layers),
        (Unit.PROJECTOR, stage.projector),
        (Unit.LANGUAGE_EMBED, lambda features: stage.embed_tokens(batch, features)),
        *((Unit.LANGUAGE_LAYER, language_layer(layer)) for layer in stage.language.layers),
        (Unit.HEAD, head),
    ]


def _measure_units(
    trainer: Trainer, batches: list[MicroBatch], repetitions: int, progress: Console
) -> list[UnitMeasurement]:
    """All units on all packs.

    The packs take turns, so that a machine that is slow for some seconds slows a few runs of every
    pack, and not every run of one.
    """
    forward: dict[tuple[int, Unit], list[float]] = defaultdict(list)
    backward: dict[tuple[int, Unit], list[float]] = defaultdict(list)
    rounds = track(
        range(repetitions + 1), "measuring units", console=progress, disable=dist.get_rank() != 0
    )
    for repetition in rounds:
        for index, batch in enumerate(batches):
            for run in _run_units(trainer.stage, batch):
                if repetition:  # the first is warm-up
                    forward[index, run.unit].append(run.forward_ms)
                    backward[index, run.unit].append(run.backward_ms)
    kept = [_activation_bytes(trainer.stage, batch) for batch in batches]
    return [
        UnitMeasurement(
            unit=unit,
            tiles=batch.tiles,
            tokens=batch.tokens,
            squared_tokens=sum(length**2 for length in batch.segment_tokens),
            loss_tokens=len(batch.loss_positions_L),
            forward_ms=_typical_ms(forward[index, unit]),
            backward_ms=_typical_ms(backward[index, unit]),
            activation_bytes=kept[index][unit],
        )
        for index, batch in enumerate(batches)
        for unit in Unit
    ]


def _run_units(stage: VLMStage, batch: MicroBatch) -> list[_UnitRun]:
    """One pass over a pack: all units forward, then all backward."""
    dist.barrier()
    runs: list[_UnitRun] = []
    hidden = None
    for unit, function in _unit_functions(stage, batch):
        received = hidden.detach().requires_grad_() if hidden is not None else None
        hidden, forward_ms = _timed(partial(function, received))
        runs.append(_UnitRun(unit, received, hidden, forward_ms))
    gradient = torch.ones_like(hidden)
    for run in reversed(runs):
        _, run.backward_ms = _timed(partial(run.output.backward, gradient))
        gradient = run.received.grad if run.received is not None else None
    return runs


def _timed(function: Callable[[], torch.Tensor | None]) -> tuple[torch.Tensor | None, float]:
    if not has_cuda():
        start = time.perf_counter()
        result = function()
        return result, (time.perf_counter() - start) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = function()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end)


def _typical_ms(samples_ms: list[float]) -> float:
    """Mean without the extreme tenths on each process, then the maximum over processes.

    Not the median: a shared machine may have two speeds, for seconds each, and a long run meets
    both in about the shares that the rounds do.
    """
    mean = torch.tensor(float(trim_mean(samples_ms, 0.1)), device=current_device())
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return mean.item()


def _activation_bytes(stage: VLMStage, batch: MicroBatch) -> dict[Unit, int]:
    """Bytes that autograd keeps of each unit, with its input, without weights; mean of layers."""
    weights = {weight.untyped_storage().data_ptr() for weight in stage.parameters()}
    kept: dict[Unit, list[int]] = defaultdict(list)
    hidden = None
    for unit, function in _unit_functions(stage, batch):
        storages: dict[int, int] = {}

        def remember(tensor: torch.Tensor, storages=storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        received = hidden.detach().requires_grad_() if hidden is not None else None
        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            hidden = function(received)
        if received is not None:
            remember(received)
        kept[unit].append(sum(storages.values()))
    return {unit: round(float(np.mean(sizes))) for unit, sizes in kept.items()}


def _measure_optimizer(trainer: Trainer, repetitions: int) -> OptimizerMeasurement:
    samples_ms = []
    for repetition in range(repetitions + 1):
        trainer.model.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        dist.barrier()

        def update() -> None:
            finalize_model_grads([trainer.model])
            trainer.model.scale_gradients(1.0)
            trainer.optimizer.step()

        _, elapsed_ms = _timed(update)
        if repetition:
            samples_ms.append(elapsed_ms)
    return OptimizerMeasurement(
        parameters=sum(weight.numel() for weight in trainer.stage.parameters()),
        optimizer_ms=_typical_ms(samples_ms),
    )


def _measure_links(links: PipelineLinks, repetitions: int) -> list[LinkMeasurement]:
    """One-way time between the first two stages: half a round trip; the others look on."""
    first, second = dist.get_process_group_ranks(links.activations)[:2]
    measurements = []
    for size in _LINK_BYTES:
        tensor = torch.zeros(size, dtype=torch.uint8, device=current_device())
        samples_ms = []
        for repetition in range(repetitions + 1):
            dist.barrier()

            def round_trip(tensor=tensor) -> None:
                if links.rank == 0:
                    dist.isend(tensor, second, group=links.activations).wait()
                    dist.irecv(tensor, second, group=links.gradients).wait()
                elif links.rank == 1:
                    dist.irecv(tensor, first, group=links.activations).wait()
                    dist.isend(tensor, first, group=links.gradients).wait()

            _, elapsed_ms = _timed(round_trip)
            if repetition and links.rank <= 1:
                samples_ms.append(elapsed_ms / 2)
        one_way_ms = _typical_ms(samples_ms or [0.0])
        measurements.append(LinkMeasurement(bytes=size, ms=one_way_ms))
    return measurements


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every kind of unit on this device.")
    parser.add_argument("--model", required=True, help="preset name or TOML file")
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16")
    parser.add_argument("--max-tiles", type=int, required=True, help="tile cap of a pack")
    parser.add_argument("--max-tokens", type=int, required=True, help="token cap of a pack")
    parser.add_argument("--tokens-per-sample", type=int, required=True, help="a typical sample's")
    parser.add_argument("--layers", type=int, default=4, help="layers of each tower to build")
    parser.add_argument("--repetitions", type=int, default=15, help="timed runs of each pack")
    parser.add_argument("-o", "--output", type=Path, required=True, help="profile.json to write")
    arguments = parser.parse_args()
    launch = Launch.from_environment()
    try:
        result = profile(
            load_model(arguments.model),
            arguments.precision,
            load_cluster("laptop-cpu"),
            launch,
            ProfileOptions(
                max_tiles=arguments.max_tiles,
                max_tokens=arguments.max_tokens,
                tokens_per_sample=arguments.tokens_per_sample,
                layers=arguments.layers,
                repetitions=arguments.repetitions,
            ),
            Console(stderr=True),
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if launch.rank == 0:
        write_profile(result, arguments.output)


if __name__ == "__main__":
    main()
