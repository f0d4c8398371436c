"""Measure every kind of unit on this device: the program behind `omnibal profile`.

    torchrun --nproc-per-node 2 -m megatron.vlm.measure.profiler --model MODEL -o PROFILE

Each process builds a stage with every kind of unit and times units during full forward and backward
passes, so that caches are as cold as in training. A second pass recomputes every layer, which adds
less than a forward, as caches are warm. Processes measure concurrently, and times are their means.
Shapes as in `megatron.vlm.model.stage`: K tokens of encoders, E language hidden size.
"""

import argparse
import gc
import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.measure.random_batches import (
    ProfileOptions,
    context_sizes,
    make_profiled_batches,
    shares_of_process,
    squared_tokens,
    with_every_kind,
)
from megatron.vlm.measure.rates import mean_ms, measure_rates, sum_over_ranks, timed_ms
from megatron.vlm.measure.reading import Reading, read_in_background
from megatron.vlm.model.deferred_weights import LateProduct
from megatron.vlm.model.groups import create_context_groups
from megatron.vlm.model.providers import check_provider
from megatron.vlm.model.stage import ByTower, VLMStage
from megatron.vlm.run.launch import RankLaunch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.clock import elapsed_ms, record_moment
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import (
    OptimizationOptions,
    SeenBatches,
    Trainer,
    build_trainer,
    global_sums,
)
from omnibal.base.errors import EXIT_USER_ERROR, UserError
from omnibal.base.files import write_json_model
from omnibal.cost.measured_sizes import measured_sizes
from omnibal.cost.profile import (
    LinkMeasurement,
    OptimizerMeasurement,
    Profile,
    ShareMeasurement,
    UnitMeasurement,
    model_sha256,
)
from omnibal.data.annotations import Annotations
from omnibal.data.tokenizer import open_tokenizer
from omnibal.families.named import named_model
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, PlainPrecision, Provider, load_cluster
from omnibal.model.parallel import Parallel
from omnibal.model.rate_tables import CollectiveTime
from omnibal.model.units import unit_kinds, unit_names
from omnibal.pipeline.unit_runs import stages_from_cuts

_LINK_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # from latency to bandwidth
OPTIMIZATION = OptimizationOptions(
    lr=1e-4, min_lr=1e-4, lr_decay_style="constant", lr_warmup_fraction=0.0, weight_decay=0.01,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip
build_for_times = partial(build_trainer, options=OPTIMIZATION, steps=1, seed=0, origin="measured")


def profile(
    job: JobSpec,
    launch: RankLaunch,
    options: ProfileOptions,
    progress: Console,
    reader: SampleReader | None = None,
) -> Profile:
    """Return measured units, optimizer, links and rates; collective, and sets up the processes."""
    options.check(job.model)
    parallel = Parallel(pipeline=launch.world_size)
    links = initialize_distributed(launch, parallel, seed=0)
    # First, as the model's layers will fill the device's memory.
    sizes = measured_sizes(job.model, job.cluster, options.caps(job.model), job.precision)
    rates = measure_rates(find_device_name(), job.precision, sizes, progress)
    samples = max(round(options.max_tokens / options.tokens_per_sample), 1)
    with nullcontext() if reader is None else read_in_background(reader, samples) as reading:
        profiler = Profiler(job, links, options, reading)
        repetitions = track(
            range(options.repetitions),
            "measuring units",
            console=progress,
            disable=dist.get_rank() != 0,
        )
        result = profiler.result([profiler.round() for _ in repetitions])
    shut_down_distributed()
    sends = [
        CollectiveTime(kind="send", ranks=2, bytes=link.bytes, ms=link.ms) for link in result.links
    ]
    rates = rates.model_copy(update={"collectives": (*rates.collectives, *sends)})
    return result.model_copy(update={"rates": rates})


Round = dict[Hashable, list[float]]  # this process's times of a round in ms, by what was timed


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
        self._batches = list(make_profiled_batches(job.model, options))
        towers = (*job.model.encoders.values(), job.model.language)
        deep = min(options.layers, *(tower.layers for tower in towers))
        # At least one layer of each kind.
        layers = {(one.tower, one.measured_name) for one in unit_kinds(job.model) if one.is_layer}
        deep = max(deep, *Counter(tower for tower, _ in layers).values(), 1)

        def build(depth: int) -> Trainer:
            # Every process holds a whole model: no valid pipeline, but the trainer builds it.
            towers, model = job.model.towers, with_every_kind(job.model, depth)
            whole = stages_from_cuts(model.with_layers(**dict.fromkeys(towers, depth)), ())
            plan = Plan(
                model=model.with_layers(**dict.fromkeys(towers, depth * links.size)),
                precision=job.precision,
                parallel=Parallel(pipeline=links.size),
                stages=whole * links.size,
                cluster=job.cluster,
                data=None,
            )
            return build_for_times(plan, links, provider=options.provider)

        self._provider = options.provider
        self._shallow_optimizer: list[OptimizerMeasurement] = []
        if deep > 1:
            shallow = build(depth=1)
            update = RepeatedUpdate(shallow)
            samples_ms = [update.timed_ms() for _ in range(options.repetitions + 1)]
            # Without the first, which creates the optimizer's state.
            self._shallow_optimizer = [_optimizer_measurement(shallow, mean_ms(samples_ms[1:]))]
            del shallow, update
            gc.collect()  # free the shallow stage before building the deep one
        self._trainer = build(depth=deep)
        for block in self._trainer.stage.blocks.values():
            # Core counts layers from the pipeline's first, but every process holds a whole model.
            for number, layer in enumerate(block.layers, 1):
                layer.layer_number = number
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
        """Return this process's times: units on packs and shares, an update, transfers by size."""
        samples_ms: Round = defaultdict(list)
        stage: Any = self._trainer.stage  # Any: no unit is None here
        for index, batch in enumerate(self._batches):
            for unit, forward_ms, backward_ms in _times_ms(stage, partial(stage, batch)):
                samples_ms[index, unit, "forward"].append(forward_ms)
                samples_ms[index, unit, "backward"].append(backward_ms)
            self._set_recomputation(every_layer=True)
            for unit, *both_ms in _times_ms(stage, partial(stage, batch)):
                if _is_layer_unit(unit):
                    samples_ms[index, unit, "recomputing"].append(sum(both_ms))
            self._set_recomputation(every_layer=False)
            if self._reading is not None:
                self._reading.take(2 * batch.tokens)  # the pack ran twice
        for index, share in enumerate(self._shares):
            hidden_S1E = torch.randn(
                (share.batch.tokens, 1, stage.config.hidden_size),
                dtype=stage.config.params_dtype,
                device=current_device(),
            )
            run = partial(stage.language, hidden_S1E.requires_grad_(), None)
            arguments = stage.layer_arguments(share.batch)
            for unit, forward_ms, backward_ms in _times_ms(stage, partial(run, **arguments)):
                samples_ms["share", index, unit, "forward"].append(forward_ms)
                samples_ms["share", index, unit, "backward"].append(backward_ms)
        samples_ms["optimizer"].append(self._update.timed_ms())
        for size in _LINK_BYTES if self._links.size > 1 else ():
            samples_ms["link", size] += _one_way_ms(self._links, size)
        return samples_ms

    def _set_recomputation(self, *, every_layer: bool) -> None:
        for block in self._trainer.stage.blocks.values():
            block.set_levels([range(len(block.layers)) if every_layer else ()])

    def result(self, rounds: Sequence[Round]) -> Profile:
        """Return means over processes and rounds, less the fastest and slowest tenth of rounds."""
        # Entire rounds are dropped, so that units still sum to a step: trimming by unit would drop
        # the short stalls that nearly every step has. Means, not medians: a shared machine may
        # alternate between two speeds, and a long run sees both.
        own_ms = [sum(map(sum, ms.values())) for ms in rounds]
        totals_ms = sum_over_ranks(own_ms)  # all processes must drop the same rounds
        extremes = len(rounds) // 10
        chosen = np.argsort(totals_ms)[extremes : len(rounds) - extremes]
        typical = [rounds[index] for index in chosen.tolist()]
        layer = self._job.model.language.kinds[0].name
        taken_ms = {
            key: mean_ms([sample_ms for ms in typical for sample_ms in ms[key]])
            for key in rounds[0]
        }
        deep_optimizer = _optimizer_measurement(self._trainer, taken_ms["optimizer"])

        def recompute_ms(batch: int, unit: str) -> float:
            # Time that recomputation adds to forward and backward.
            parts = ("forward", "backward")
            without_ms = sum(taken_ms[batch, unit, part] for part in parts)
            return max(taken_ms[batch, unit, "recomputing"] - without_ms, 0.0)

        return Profile(
            device=find_device_name(),
            precision=self._job.precision,
            model=self._job.model.name,
            model_sha256=model_sha256(self._job.model),
            tensor=1,
            processes=dist.get_world_size(),
            provider=self._provider,
            measurements=tuple(
                UnitMeasurement(
                    unit=unit,
                    **_count_features(self._job.model, batch),
                    forward_ms=taken_ms[index, unit, "forward"],
                    backward_ms=taken_ms[index, unit, "backward"],
                    recompute_ms=recompute_ms(index, unit) if _is_layer_unit(unit) else None,
                    activation_bytes=self._kept_bytes[index][unit],
                )
                for index, batch in enumerate(self._batches)
                for unit in self._kept_bytes[index]
            ),
            shares=tuple(
                ShareMeasurement(
                    unit=layer,
                    context=share.context,
                    exchange=share.exchange,
                    **share.features,
                    forward_ms=taken_ms["share", index, layer, "forward"],
                    backward_ms=taken_ms["share", index, layer, "backward"],
                )
                for index, share in enumerate(self._shares)
            ),
            optimizer=(*self._shallow_optimizer, deep_optimizer),
            links=tuple(
                LinkMeasurement(bytes=size, ms=taken_ms["link", size])
                for size in _LINK_BYTES
                if self._links.size > 1
            ),
            reading=None if self._reading is None else self._reading.result(),
        )


def _count_features(model: ModelConfig, batch: MicroBatch) -> dict[str, int]:
    squares = {}
    if model.images is not None:
        squares[model.images.squares] = squared_tokens(batch.image_grids, model.images)
    return (
        {name: getattr(batch, name) for name in model.item_features}
        | squares
        | {
            "tokens": batch.tokens,
            "squared_tokens": sum(length**2 for length in batch.segment_tokens),
            "loss_tokens": len(cast(torch.Tensor, batch.loss_positions_L)),
        }
    )


def find_device_name() -> str:
    if has_cuda():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def _list_unit_names(stage: VLMStage) -> list[str]:
    """Return the measured name of every unit of a complete stage, in order."""
    layers = {tower: len(block.layers) for tower, block in stage.blocks.items()}
    model = stage.model_config.with_layers(**layers)
    measured = {kind.name: kind.measured_name for kind in unit_kinds(model)}
    return [measured[name] for name in unit_names(model)]


@contextmanager
def _following_units(whole: VLMStage, begin: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `begin` as each unit of a complete stage but the first begins, with its input."""
    stage: Any = whole  # Any: no unit is None here
    towers = [(*units.layers.layers, units.projector) for units in stage.encoders.values()]
    modules = [module for tower in towers for module in tower]
    modules += (*stage.language.layers, stage.language.final_layernorm)
    with ExitStack() as hooks:
        for module in modules:
            hook = module.register_forward_pre_hook(lambda _, inputs: begin(inputs[0]))
            hooks.callback(hook.remove)
        # The next unit embeds items or tokens: its first module may have no input with a gradient.
        for units in stage.encoders.values():
            hook = units.projector.register_forward_hook(lambda _, __, output: begin(output))
            hooks.callback(hook.remove)
        yield


def _is_layer_unit(unit: str) -> bool:
    return "_layer" in unit


def _times_ms(
    stage: VLMStage, run: Callable[[], torch.Tensor]
) -> Iterator[tuple[str, float, float]]:
    """Yield name, forward and backward time of every unit, from one pass over a pack.

    Args:
        run: forward of the stage, or of its language layers and norm.
    """
    dist.barrier()
    forward, backward = [record_moment()], list[Any]()

    def record(hidden: torch.Tensor) -> None:
        if not backward:  # else a layer is recomputed
            # Backward passes this point when the previous unit's own backward is about to begin.
            hidden.register_hook(lambda gradient: backward.append(record_moment()))
            forward.append(record_moment())

    with _following_units(stage, record):
        output = run()
        record(output)
        output.backward(torch.ones_like(output))
    backward.append(record_moment())
    if has_cuda():
        torch.cuda.synchronize()
    slowdown = _slowdown(elapsed_ms(forward[0], backward[-1]))
    backward_ms = reversed([slowdown * elapsed_ms(*ends) for ends in pairwise(backward)])
    forward_ms = [slowdown * elapsed_ms(*ends) for ends in pairwise(forward)]
    names = _list_unit_names(stage)[-len(forward_ms) :]
    return zip(names, forward_ms, backward_ms, strict=True)


def _slowdown(own_ms: float) -> float:
    """Return the time until all processes finish, as a multiple of this process's `own_ms`."""
    # Above 1 only if processes share cores: the first to run are fast while others wait, and the
    # mean would be less than any step takes.
    if has_cuda() or dist.get_world_size() <= len(os.sched_getaffinity(0)):
        return 1.0
    slowest_ms = torch.tensor(own_ms)
    dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
    return slowest_ms.item() / own_ms


class KeptActivations:
    """Counter of current and peak bytes saved by autograd, without weights."""

    def __init__(self, *stages: VLMStage) -> None:
        self._weights = {_address(weight) for stage in stages for weight in stage.parameters()}
        # References by storage: views of one storage count once.
        self._holders: dict[int, int] = defaultdict(int)
        self.now_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count tensors saved by forward operations inside."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor, too, until it is freed."""
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


@dataclass(frozen=True, eq=False)
class _Saved:
    tensor: torch.Tensor  # autograd holds this handle only, so its end is the tensor's release


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def peak_activation_bytes(trainer: Trainer, step: Callable[[], object]) -> int:
    """Return the peak bytes that `step` adds to this rank's memory, so without model state.

    On CUDA all allocated memory. On the CPU saved and received tensors, without working memory and
    recomputed activations.
    """
    if has_cuda():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    kept = KeptActivations(*trainer.chunks)
    with ExitStack() as stack:
        for stage in trainer.chunks:
            stack.enter_context(_record_stage(stage, kept))
        step()
    return kept.peak_bytes


@contextmanager
def _record_stage(stage: Any, kept: KeptActivations) -> Iterator[None]:
    """Count saved and received tensors of a stage, and inputs kept for weight-gradient passes."""
    forward, set_input_tensor, deferred = stage.forward, stage.set_input_tensor, stage.deferred

    def record_forward(batch: MicroBatch) -> ByTower | torch.Tensor:
        with kept.recording():
            return forward(batch)

    def hold_input(received: ByTower) -> None:
        for tensor in received.values():
            kept.hold(tensor)
        set_input_tensor(received)

    def hold_products() -> list[LateProduct]:
        products = type(deferred).take(deferred)
        for product in products:
            kept.hold(product.rows)
            kept.hold(product.gradient)
        return products

    stage.forward, stage.set_input_tensor = record_forward, hold_input
    if deferred is not None:
        deferred.take = hold_products
    try:
        yield
    finally:
        # The instance's attributes hide the class's methods.
        del stage.forward, stage.set_input_tensor
        if deferred is not None:
            del deferred.take


def kept_bytes_of_units(stage: VLMStage, batch: MicroBatch) -> dict[str, int]:
    """Return bytes saved by autograd by unit name, input included; layers of one name as a mean."""
    kept, ends = KeptActivations(stage), [0]
    following = _following_units(stage, lambda _: ends.append(kept.now_bytes))
    with kept.recording(), following:
        graph = stage(batch)  # keeps all units' tensors until the end
    ends.append(kept.now_bytes)
    del graph
    by_unit: dict[str, list[int]] = defaultdict(list)
    for unit, (begin, end) in zip(_list_unit_names(stage), pairwise(ends), strict=True):
        by_unit[unit].append(end - begin)
    return {unit: round(float(np.mean(sizes))) for unit, sizes in by_unit.items()}


def _optimizer_measurement(trainer: Trainer, optimizer_ms: float) -> OptimizerMeasurement:
    parameters = sum(weight.numel() for weight in trainer.stage.parameters())
    return OptimizerMeasurement(parameters=parameters, optimizer_ms=optimizer_ms)


class RepeatedUpdate:
    """Weight update with all gradients 1, after which the weights are restored."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # On the host: a second copy on the device would change the measured memory.
        self._kept = [weight.detach().to("cpu", copy=True) for weight in self._weights()]

    def timed_ms(self) -> float:
        """Return the ms to zero, reduce and clip gradients and update weights; collective."""
        trainer = self._trainer

        def exchange_and_update() -> None:
            global_sums(trainer.links, [], SeenBatches())
            trainer.update_weights(1.0)

        dist.barrier()
        zeroing_ms = timed_ms(trainer.zero_gradients)
        for wrapper in trainer.wrappers:
            for gradients in wrapper.gradients():
                gradients.fill_(1.0)
        updating_ms = timed_ms(exchange_and_update)
        trainer.wait_for_weights()
        # A replay's single rank gathered its own shard in place of other ranks' shards.
        with torch.no_grad():
            for weight, kept in zip(self._weights(), self._kept, strict=True):
                weight.copy_(kept)
        return zeroing_ms + updating_ms

    def _weights(self) -> Iterator[torch.Tensor]:
        return (weight for wrapper in self._trainer.wrappers for weight in wrapper.weights())


def _one_way_ms(links: PipelineLinks, size: int) -> list[float]:
    """Return half of a round trip of `size` bytes between the first two stages; else empty."""
    first, second = dist.get_process_group_ranks(links.activations)[:2]
    tensor = torch.zeros(size, dtype=torch.uint8, device=current_device())

    # Not one way: clocks of two processes differ, and a send may end before its data arrives.
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
    add = parser.add_argument
    add("--model", required=True, help="preset name or TOML file")
    add("--precision", choices=get_args(PlainPrecision), default="bf16")
    add("--max-tiles", type=int, default=0, help="tile cap of a pack")
    add("--max-clips", type=int, default=0, help="clip cap of a pack")
    add("--max-image-tokens", type=int, default=0, help="image token cap of a pack")
    add("--max-tokens", type=int, required=True, help="token cap of a pack")
    add("--tokens-per-sample", type=int, required=True, help="mean tokens of a sample")
    add("--layers", type=int, default=4, help="layers of each tower to build")
    add("--repetitions", type=int, default=15, help="timed runs of each pack")
    add("--provider", choices=get_args(Provider), default="local", help="provider of layers")
    add("--data", type=Path, help="samples to read meanwhile")
    add("--tokenizer-model", type=Path, help="needed with --data")
    add("-o", "--output", type=Path, required=True, help="profile.json to write")
    arguments = parser.parse_args()
    launch = RankLaunch.from_environment()
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
        write_json_model(result, arguments.output)


if __name__ == "__main__":
    main()
