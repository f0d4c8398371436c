"""This project's 1F1B and interleaved 1F1B compared with stock Megatron-core's, on the same stages.

    python benchmarks/schedule.py [--steps 40] [--layers 4] [--pipeline 2 4] [--chunks 1 2 4]

The same processes run forward and backward of every step by both schedules, in alternating order,
timed until the last stage ends. Losses and gradients of both are compared first. Prints times and
the ratio ours / stock: the median over steps, its bootstrapped interval, quartiles, the ratio of
the fastest steps (least disturbed by other programs), and the ratio of CPU time.

Models: the quickstart's (mostly computation), a thin one (many calls and messages), and relays
without layers (only schedule and messages). With more processes than cores (`--pipeline 4` on two),
ratios show saved work, not saved waiting.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from rich.console import Console
from rich.table import Table

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.measure.profiler import OPTIMIZATION
from megatron.vlm.measure.random_batches import random_batch
from megatron.vlm.model.configs import language_transformer_config, parameter_dtype
from megatron.vlm.model.stage import ByTower, boundary_shapes
from megatron.vlm.run.launch import RankLaunch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.clock import Phase, PhaseClock
from megatron.vlm.step.data_parallel import Replicated
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.schedule import run_forward_backward
from megatron.vlm.step.train import Trainer, build_trainer
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.steps import deal_steps, draw_steps, size_load
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.unit_runs import stages_from_cuts

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from tools.make_digits_dataset import make_dataset  # noqa: E402

MICRO_BATCHES = 8
CAPS = Caps.of(tiles=12, tokens=448)
WARMUP_STEPS = 3
DISTINCT_STEPS = 5  # of varying packs, repeated; odd, so that every step runs in both orders
Pack = tuple[int, tuple[int, ...], int]  # tiles, tokens of each sample, loss tokens
EQUAL_PACK: Pack = (10, (64,) * 6, 60)
TEXT_PACK: Pack = (0, *EQUAL_PACK[1:])
SAMPLES = 1600
TOLERANCE = 1e-5
RESAMPLINGS = 2000

ForwardBackward = Callable[[Sequence[MicroBatch]], list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Changes to the quickstart's model."""

    name: str
    vision: dict[str, int]
    language: dict[str, int]
    steps_factor: int  # more steps of small models: they vary more, and take less time
    relays: bool = False  # whether stages only forward tensors of this model's sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Times of both schedules for a model, a number of chunks and a kind of packs."""

    size: str
    chunks: int
    packs: str
    ours: np.ndarray  # ms of wall clock, and of CPU time of all processes, [steps, 2]
    stock: np.ndarray  # [steps, 2]
    distinct: int  # step k is a repetition of step k % distinct
    difference: float  # max over losses and gradients, relative to their tensor's max

    def fastest_ms(self, times_ms: np.ndarray) -> float:
        """Return the time of all distinct steps, each at its fastest."""
        return float(sum(times_ms[step :: self.distinct, 0].min() for step in range(self.distinct)))


def sizes(layers: int, parts: int) -> tuple[Size, ...]:
    """Return the models; every part has a layer."""
    layers, few = max(layers, parts // 2), {"layers": max(2, parts // 2)}
    thin = {"hidden_size": 32, "ffn_hidden_size": 32, "heads": 2, **few}
    full = {"layers": layers}
    full_name, thin_name = f"quickstart's, {layers} + {layers}", f"thin, {few['layers']} of each"
    return (
        Size(name=full_name, vision=full, language=full, steps_factor=1),
        Size(name=thin_name, vision=thin, language={**thin, "kv_heads": 2}, steps_factor=3),
        Size(name="messages alone", vision=few, language=few, steps_factor=5, relays=True),
    )


def model_of(size: Size) -> ModelConfig:
    digits = load_model("internvl-digits")
    changes = {
        "name": size.name,
        "encoders": {"vision": digits.vision.model_copy(update=size.vision)},
        "language": digits.language.model_copy(update=size.language),
    }
    return ModelConfig.model_validate(digits.model_copy(update=changes).model_dump())


def plan_of(model: ModelConfig, pipeline: int, schedule: PipelineSchedule) -> Plan:
    """Return a plan that divides towers evenly, or keeps them whole, without data."""
    return Plan(
        model=model,
        precision="fp32",
        parallel=Parallel(pipeline=pipeline),
        schedule=schedule,
        stages=stages_from_cuts(model, _cuts(model, pipeline * schedule.chunks)),
        cluster=load_cluster("laptop-cpu"),
        data=None,
    )


def _cuts(model: ModelConfig, parts: int) -> tuple[int, ...]:
    layers = model.language.layers
    if not model.encoders:
        return tuple(1 + layers * part // parts for part in range(1, parts))
    # No cut between projector and language embed: its tensor has two dimensions, and stock's
    # exchange of shapes is for three.
    text, half = model.vision.layers + 3, parts // 2
    inside = [(1 + model.vision.layers * k // half, text + layers * k // half) for k in range(half)]
    in_vision, in_language = zip(*inside[1:], strict=True) if half > 1 else ((), ())
    return (*in_vision, text, *in_language) if parts > 1 else ()


class Relay(torch.nn.Module):
    """Part without layers: sends tensors filled with the mean of the received ones."""

    deferred = None

    def __init__(self, plan: Plan, part: int) -> None:
        super().__init__()
        self.plan, self.part = plan, part
        self.weight = torch.nn.Parameter(torch.ones((), device=current_device()))
        self.received: ByTower = {}

    def set_input_tensor(self, received: ByTower) -> None:
        self.received = received

    def forward(self, batch: MicroBatch) -> ByTower | torch.Tensor:
        number = self.weight
        for tensor in self.received.values():
            number = number * tensor.mean()
        if self.part == len(self.plan.stages) - 1:
            return number
        shapes = boundary_shapes(self.plan, self.part, batch.shape)
        return {name: number.expand(shape).clone() for name, shape in shapes.items()}


def replace_by_relays(trainer: Trainer) -> Trainer:
    """Return the trainer with relays as its chunks."""
    models = [
        DistributedDataParallel(chunk.config, model.ddp_config, Relay(trainer.plan, part))
        for chunk, model, part in zip(
            trainer.chunks, trainer.models, trainer.links.parts, strict=True
        )
    ]
    assert isinstance(trainer.data_parallel, Replicated), "weights are not sharded"
    return replace(trainer, data_parallel=replace(trainer.data_parallel, models=models))


class StockStage(torch.nn.Module):
    """Part of the model with the interface of stock's schedule: a configuration, lists as input."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, model: Any, plan: Plan, part: int, *, varying: bool) -> None:
        super().__init__()
        self.wrapped, self.plan, self.part = model, plan, part
        config = language_transformer_config(
            plan.model, plan.stages[part], plan.parallel, plan.precision
        )
        # The fields that stock's schedule reads, as Megatron-LM sets them.
        self.config = replace(
            config,
            pipeline_dtype=parameter_dtype(plan.precision),
            deallocate_pipeline_outputs=True,
            variable_seq_lengths=varying,
            # Core requires it of dense models too.
            moe_token_dispatcher_type="alltoall",
        )
        if plan.schedule.chunks > 1:
            # Not by `replace`: core would divide the layers evenly.
            self.config.virtual_pipeline_model_parallel_size = plan.schedule.chunks
            self.config.microbatch_group_size_per_vp_stage = plan.parallel.pipeline
            self.config.overlap_p2p_comm, self.config.batch_p2p_comm = True, False
            # Gloo may still send an output when it would be freed; NCCL allows that.
            self.config.deallocate_pipeline_outputs = False

    def set_input_tensor(self, received: list[torch.Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Run the part. One tensor crosses every cut: stock sends no more."""
        if self.part:
            [name] = boundary_shapes(self.plan, self.part - 1, batch.shape)
            self.wrapped.module.set_input_tensor({name: self.received})
        output = self.wrapped(batch)
        if self.part == len(self.plan.stages) - 1:
            return output
        [sent] = output.values()
        return sent


def stock_stages(
    plan: Plan, models: Sequence[Any], links: PipelineLinks, *, varying: bool
) -> list[StockStage]:
    """Return a stage's chunks for stock's schedule."""
    pairs = zip(models, links.parts, strict=True)
    return [StockStage(model, plan, part, varying=varying) for model, part in pairs]


def run_stock(
    plan: Plan, stages: Sequence[StockStage], links: PipelineLinks, batches: Sequence[MicroBatch]
) -> list[torch.Tensor]:
    """Run forward and backward by stock's schedule, and return the losses of the last stage."""
    first = batches[0]

    def cut_shapes(cut: int) -> list[tuple[int, ...]]:
        return list(boundary_shapes(plan, cut, first.shape).values())

    def adjust_shapes(received: list, sent: list) -> tuple[list, list]:
        # For equal micro-batches; with `variable_seq_lengths` stock exchanges shapes.
        return (
            received if links.is_first else cut_shapes(links.rank - 1),
            sent if links.is_last else cut_shapes(links.rank),
        )

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return output, torch.tensor(0, dtype=torch.int), output.detach().clone()

    def step(batches, model):
        return model(next(batches)), loss

    common = {
        "forward_step_func": step,
        "num_microbatches": len(batches),
        "seq_length": first.tokens,
        "micro_batch_size": 1,
    }
    if len(stages) == 1:
        return forward_backward_pipelining_without_interleaving(
            **common,
            data_iterator=iter(batches),
            model=stages[0],
            adjust_tensor_shapes_fn=adjust_shapes,
        )
    return forward_backward_pipelining_with_interleaving(
        **common, data_iterator=[iter(batches) for _ in stages], model=list(stages)
    )


def run_ours(
    plan: Plan, models: Sequence[Any], links: PipelineLinks, batches: Sequence[MicroBatch]
) -> list[torch.Tensor]:
    """Run forward and backward as in training, and return the losses of the last stage."""
    clock = PhaseClock()
    clock.switch(Phase.WAIT)
    stream = MicroBatchStream.of(batches)
    losses = run_forward_backward(plan, models, links, stream, clock, lambda *_: None)
    clock.stop()
    return losses


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of the gradients of this stage's parameters."""
    return {
        f"{chunk}.{name}": parameter.main_grad.clone()
        for chunk, model in enumerate(trainer.models)
        for name, parameter in model.module.named_parameters()
    }


def largest_difference(
    trainer: Trainer, batches: Sequence[MicroBatch], ours: ForwardBackward, stock: ForwardBackward
) -> float:
    """Return the max relative difference of losses and gradients over all stages; collective."""
    results = []
    for run in (ours, stock):
        trainer.zero_gradients()
        losses = run(batches)
        result = {"losses": torch.stack(losses)} if losses else {}
        results.append(result | gradients(trainer))
    differences = [
        float((results[0][name] - value).abs().max() / value.abs().max().clamp_min(1e-30))
        for name, value in results[1].items()
    ]
    return max_over_ranks(max(differences))


def max_over_ranks(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=current_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def step_ms(
    trainer: Trainer, run: ForwardBackward, batches: Sequence[MicroBatch]
) -> tuple[float, float]:
    """Return ms until the last stage ends, and CPU ms of all stages; collective."""
    trainer.zero_gradients()
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    run(batches)
    if has_cuda():
        torch.cuda.synchronize()
    end, end_cpu = time.perf_counter(), time.process_time()
    cpu_ms = torch.tensor((end_cpu - start_cpu) * 1e3, device=current_device())
    dist.all_reduce(cpu_ms)
    return max_over_ranks((end - start) * 1e3), cpu_ms.item()


def measure(
    size: Size,
    model: ModelConfig,
    links: PipelineLinks,
    chunks: int,
    packs: str,
    steps: list[list[Pack]],
    repetitions: int,
) -> Outcome:
    """Time both schedules in alternation on the same steps; collective."""
    schedule = ONE_FORWARD_ONE_BACKWARD
    if chunks > 1:
        schedule = PipelineSchedule(name="interleaved", chunks=chunks)
    plan = plan_of(model, links.size, schedule)
    trainer = build_trainer(plan, links, OPTIMIZATION, steps=1, seed=0)
    if size.relays:
        trainer = replace_by_relays(trainer)
    chunks_of_rank = plan, trainer.models, trainer.links
    batches = [[random_batch(model, *pack) for pack in step] for step in steps]
    # Equal micro-batches are stock's best case: it knows their shape beforehand.
    stages = stock_stages(*chunks_of_rank, varying=packs != "equal")
    ours = partial(run_ours, *chunks_of_rank)
    stock = partial(run_stock, plan, stages, trainer.links)
    difference = max(largest_difference(trainer, step, ours, stock) for step in batches)
    times_ms: dict[ForwardBackward, list[tuple[float, float]]] = {ours: [], stock: []}
    for number in range(-WARMUP_STEPS, repetitions):
        step = batches[number % len(batches)]
        for run in (ours, stock) if number % 2 else (stock, ours):
            ms = step_ms(trainer, run, step)
            if number >= 0:
                times_ms[run].append(ms)
    return Outcome(
        size=size.name,
        chunks=chunks,
        packs=packs,
        ours=np.array(times_ms[ours]),
        stock=np.array(times_ms[stock]),
        distinct=min(len(batches), repetitions),
        difference=difference,
    )


def digits_lengths() -> Lengths:
    """Return lengths of samples like the quickstart's."""
    with tempfile.TemporaryDirectory() as folder:
        digits = Path(folder) / "digits"
        make_dataset(digits, SAMPLES, heldout_samples=10, seed=0)
        annotations = Annotations.open(digits / "train" / "meta.json")
        tokenizer = open_tokenizer(digits / "tokenizer.model")
        model = load_model("internvl-digits")
        return scan_lengths(annotations, model, tokenizer, lambda done: None).lengths


def varying_steps(lengths: Lengths) -> list[list[Pack]]:
    """Return steps of the planner's packs."""
    levels, load = [Level(caps=CAPS)], partial(size_load, lengths=lengths)
    steps = draw_steps(
        lengths, PackSettings(), levels, load, packs_per_step=MICRO_BATCHES, packs_per_row=1
    )
    scheduled = deal_steps(steps, lengths, load, 1, levels)
    loss_tokens = scheduled.packs.sums(lengths.loss_tokens)
    packs: list[list[Pack]] = [[] for _ in range(scheduled.steps)]
    for row, step in enumerate(scheduled.step):
        segments = tuple(lengths.tokens[scheduled.packs[row]].tolist())
        packs[step].append((int(scheduled.column("tiles")[row]), segments, int(loss_tokens[row])))
    return packs[:DISTINCT_STEPS]


def run_rank(job: Path, output: Path) -> None:
    """Measure all cases as a launched process; the first writes the outcomes."""
    layers, repetitions, chunk_counts, varying = pickle.loads(job.read_bytes())
    launch = RankLaunch.from_environment()
    links = initialize_distributed(launch, Parallel(pipeline=launch.world_size), seed=0)
    outcomes = [
        measure(size, model, links, chunks, name, steps, repetitions * size.steps_factor)
        for chunks in chunk_counts
        for size in sizes(layers, links.size * chunks)
        for model, name, steps in _pack_kinds(model_of(size), chunks, varying)
    ]
    shut_down_distributed()
    if launch.rank == 0:
        output.write_bytes(pickle.dumps(outcomes))


def _pack_kinds(
    model: ModelConfig, chunks: int, varying: list[list[Pack]]
) -> Iterator[tuple[ModelConfig, str, list[list[Pack]]]]:
    """Yield a model with equal packs, and with varying packs."""
    # Interleaved, stock has one shape for all cuts: equal packs need a model without encoders.
    if chunks > 1:
        yield model.without_encoders(), "equal", [[TEXT_PACK] * MICRO_BATCHES]
    else:
        yield model, "equal", [[EQUAL_PACK] * MICRO_BATCHES]
    yield model, "quickstart's", varying


def launch_ranks(pipeline: int, settings: tuple[Any, ...]) -> list[Outcome]:
    """Run all cases in a new process per stage, with one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder) / "job.pickle", Path(folder) / "outcomes.pickle"
        job.write_bytes(pickle.dumps(settings))
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={pipeline}", __file__, "--rank-of", job, output,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
        )  # fmt: skip
        return pickle.loads(output.read_bytes())


def cells(outcome: Outcome) -> list[str]:
    """Return a table row: median times, the median ratio, and its spread."""
    ratios, cpu_ratios = (outcome.ours / outcome.stock).T
    low, high = interval(ratios)
    first, median, third = np.quantile(ratios, (0.25, 0.5, 0.75))
    return [
        f"{np.median(outcome.ours[:, 0]):,.1f}",
        f"{np.median(outcome.stock[:, 0]):,.1f}",
        f"{median:.3f}",
        f"{low:.3f} - {high:.3f}",
        f"{first:.3f} - {third:.3f}",
        f"{outcome.fastest_ms(outcome.ours) / outcome.fastest_ms(outcome.stock):.3f}",
        f"{np.median(cpu_ratios):.3f}",
    ]


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """Return the bootstrapped 95 % interval of the median."""
    samples = np.random.default_rng(0).choice(ratios, (RESAMPLINGS, len(ratios)))
    low, high = np.quantile(np.median(samples, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="steps per schedule")
    parser.add_argument("--layers", type=int, default=4, help="layers per tower, an even number")
    parser.add_argument("--pipeline", type=int, nargs="+", choices=(2, 4), default=[2])
    parser.add_argument("--chunks", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--rank-of", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        run_rank(*arguments.rank_of)
        return
    table = Table(title=f"Forward and backward of a step of {MICRO_BATCHES} micro-batches")
    for column in ("stages", "chunks", "model", "micro-batches"):
        table.add_column(column, no_wrap=True)
    for column in ("ours ms", "stock ms", "ours / stock", "95 %", "quartiles", "best", "CPU"):
        table.add_column(column, justify="right", no_wrap=True)
    varying, worst = varying_steps(digits_lengths()), 0.0
    for pipeline in arguments.pipeline:
        settings = arguments.layers, arguments.steps, arguments.chunks, varying
        for outcome in launch_ranks(pipeline, settings):
            sizes_of_row = str(pipeline), str(outcome.chunks), outcome.size, outcome.packs
            table.add_row(*sizes_of_row, *cells(outcome))
            worst = max(worst, outcome.difference)
    console = Console(width=150)
    console.print(table)
    holds = "holds" if worst <= TOLERANCE else "fails"
    console.print(f"losses and gradients: within {worst:.0e}; the bar of {TOLERANCE:.0e} {holds}")


if __name__ == "__main__":
    main()
