"""Weights that ranks divide beside whole ones: bytes of state on a rank, and the time of a step.

    python benchmarks/sharded.py [--rounds 16]

Four data-parallel processes train a small language model of wide layers, whose state is most of its
memory, in three ways: whole weights with the optimizer's state divided (replicated), all four
dividing everything (full), and two and two (hybrid). All start from the same weights and take
turns, step by step; the first rounds do not count. The state in float32 is 16 bytes a parameter
(weights, gradients, two moments): of them a replicated rank keeps 8 whole and its part of the
moments, a divided one its part of all.

The prediction is the product's: costs fitted to a profile that is measured in between by as many
processes at once, exchanges and what they hide behind computation at measured rates, and the very
packs that were run, simulated.

Four processes on fewer cores do not wait as devices do. Where Linux control groups (version 1) can
be made, each process has one with an equal part of the cores; the output says so. Other programs
slow all of them: the half of all turns counts in which processes got most of the cores, of the
profiler's and of the steps each. Of every way the mean step is printed, the median of its ratio to
the replicated step of the same turn, and the same of the time of cores that a process has used,
which other programs change less.
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from forked_ranks import outcomes_of, save_outcome
from levels import one_node
from own_cores import own_cores, own_cores_in_words
from profiled_beside import Turns, core_shares, profile_rank, quiet_rounds

from megatron.vlm.backend import prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.measure.profiler import ProfileOptions
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.train import OptimizationOptions, Trainer, build_trainer, train_step
from omnibal.cost.measured_sizes import MeasuredSizes
from omnibal.cost.profile import Measured, Profile
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, Shapes
from omnibal.job.planner import prediction_of
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.unit_runs import stages_from_cuts

RANKS, MICRO_BATCHES, TOKENS = 4, 2, 256
WARM_ROUNDS = 2
BAR = 0.1
"""Largest error of a prediction."""
SIZES = MeasuredSizes(
    rows=(64,), inner=(128,), outer=(128,), collective_bytes=(1 << 16, 1 << 20, 1 << 22)
)
WAYS = {"replicated": 1, "full": RANKS, "hybrid": 2}
MODEL = ModelConfig(
    name="wide",
    language=LanguageConfig(
        layers=6, hidden_size=256, heads=4, kv_heads=4, ffn_hidden_size=1024, vocab_size=2048
    ),
)
OPTIONS = OptimizationOptions(
    lr=1e-4, min_lr=1e-5, lr_decay_style="constant", lr_warmup_fraction=0.0, weight_decay=0.1,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank has measured, by way."""

    step_ms: dict[str, list[float]]
    core_ms: dict[str, list[float]]
    state_bytes: dict[str, int]
    losses: dict[str, list[float]]
    parameters: int
    is_device: bool
    """Whether the process had a part of the cores to itself."""


def plan_of(
    sharded: int,
    model: ModelConfig = MODEL,
    max_tokens: int = TOKENS,
    micro_batches: int = MICRO_BATCHES,
) -> Plan:
    """A plan of one stage on all ranks, of which so many divide weights."""
    return Plan(
        model=model,
        precision="fp32",
        parallel=Parallel(pipeline=1, data=RANKS, sharded=sharded),
        stages=stages_from_cuts(model, ()),
        cluster=one_node(),
        data=None,
        shapes=Shapes(caps=Caps.of(tokens=max_tokens), micro_batches_per_step=micro_batches),
    )


def random_pack(seed: int) -> MicroBatch:
    """A pack of one random text, all of which carries loss."""
    generator = torch.Generator().manual_seed(seed)
    words_S = torch.randint(0, MODEL.language.vocab_size, (TOKENS,), generator=generator)
    places_L = torch.arange(TOKENS - 1)
    return MicroBatch(
        tiles=0,
        tokens=TOKENS,
        segment_tokens=(TOKENS,),
        token_ids_S=words_S,
        labels_L=words_S[1:],
        loss_positions_L=places_L,
        loss_weights_L=torch.ones(TOKENS - 1),
        loss_weight=TOKENS - 1.0,
    )


def state_bytes_of(trainer: Trainer) -> int:
    """Bytes of weights, gradients and optimizer state between two steps, each storage once."""
    kept = trainer.data_parallel
    tensors = [*kept.weights(), *kept.gradients(), *kept.optimizer_state()]
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def one_step() -> tuple[ScheduledPacks, Lengths]:
    """A step as a plan has it: all are alike."""
    number = np.arange(RANKS * MICRO_BATCHES)
    nothing, each = np.zeros(len(number), np.int32), np.ones(len(number), np.int32)
    packs = ScheduledPacks(
        packs=Packs(samples=number, offsets=np.arange(len(number) + 1)),
        step=nothing.astype(np.int64),
        dp_rank=(number // MICRO_BATCHES).astype(np.int32),
        slot=(number % MICRO_BATCHES).astype(np.int32),
        epoch=nothing,
        items={},
        tokens=TOKENS * each,
        level=nothing,
    )
    lengths = Lengths(
        items={},
        tokens=TOKENS * each,
        loss_tokens=(TOKENS - 1) * each,
        source=nothing,
        source_names=("made up",),
        origin=None,
    )
    return packs, lengths


def predicted_ms(plan: Plan, profile: Profile) -> float:
    """Predict a step from measured costs and rates."""
    job, (packs, lengths) = JobSpec.of_plan(plan, Measured(profile)), one_step()
    workload = job.workload(packs, lengths, plan.pack_levels)
    return prediction_of(plan, job, packs, workload).step_ms


def run_process(process: int, rounds: int, folder: Path, turns: Turns) -> None:
    """Train or profile on one rank, on its part of the cores; the outcome goes into the folder."""
    rank = process % RANKS
    with own_cores(rank, RANKS) as is_device:
        if process >= RANKS:
            options = ProfileOptions(
                max_tiles=0,
                max_tokens=TOKENS,
                tokens_per_sample=TOKENS,
                layers=MODEL.language.layers,
                repetitions=1,
            )
            profile = profile_rank(rank, turns, rounds, MODEL, options, SIZES, folder)
            save_outcome(profile, process, folder)
        else:
            save_outcome(train(rank, rounds, folder, turns, is_device), process, folder)


def train(rank: int, rounds: int, folder: Path, turns: Turns, is_device: bool) -> Outcome:
    """Take turns of all ways on one rank."""
    launch = Launch(rank=rank, world_size=RANKS, local_rank=rank)
    plans = {name: plan_of(sharded) for name, sharded in WAYS.items()}
    links = initialize_distributed(
        launch, plans["replicated"].parallel, seed=1, init_method=f"file://{folder / 'store'}"
    )
    trainers = {
        name: build_trainer(plan, links, OPTIONS, steps=WARM_ROUNDS + rounds, seed=1)
        for name, plan in plans.items()
    }
    turns.profile(rank)  # to warm up
    step_ms: dict[str, list[float]] = {name: [] for name in plans}
    core_ms: dict[str, list[float]] = {name: [] for name in plans}
    losses: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(WARM_ROUNDS + rounds):
        first = (number * RANKS + rank) * MICRO_BATCHES
        packs = [random_pack(first + place) for place in range(MICRO_BATCHES)]
        if number >= WARM_ROUNDS:
            turns.profile(rank)
        for name, trainer in trainers.items():
            dist.barrier()
            begun, core_begun = time.perf_counter(), time.process_time()
            result = train_step(trainer, MicroBatchStream.of(packs))
            trainer.wait_for_weights()
            core_ms[name].append((time.process_time() - core_begun) * 1e3)
            dist.barrier()
            step_ms[name].append((time.perf_counter() - begun) * 1e3)
            losses[name].append(result.loss)
    outcome = Outcome(
        step_ms=step_ms,
        core_ms=core_ms,
        state_bytes={name: state_bytes_of(trainer) for name, trainer in trainers.items()},
        losses=losses,
        parameters=sum(p.numel() for p in trainers["replicated"].stage.parameters()),
        is_device=is_device,
    )
    shut_down_distributed()
    return outcome


def main() -> None:
    """Print bytes, measured time and predicted time of all ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=16, help="steps of each way")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    prepare_megatron_core()
    run = partial(run_process, turns=Turns.of(RANKS))
    found = outcomes_of(run, 2 * RANKS, rounds)
    outcomes: list[Outcome] = found[:RANKS]
    first, profile = outcomes[0], found[RANKS]
    print(f"{RANKS} processes, {own_cores_in_words(RANKS, are_devices=first.is_device)}; ", end="")
    print(f"{first.parameters / 1e6:.1f} M parameters; {TOKENS} tokens a pack")
    print(f"a collective hides {profile.rates.hidden:.0%} of its time behind computation")
    shares = core_shares([one.core_ms for one in outcomes], [one.step_ms for one in outcomes])
    quiet = [WARM_ROUNDS + number for number in quiet_rounds(shares[WARM_ROUNDS:])]
    step_ms, core_ms = (
        {name: np.array(times)[quiet] for name, times in each.items()}
        for each in (first.step_ms, first.core_ms)
    )
    predicted = {name: predicted_ms(plan_of(sharded), profile) for name, sharded in WAYS.items()}
    errors = {name: predicted[name] / step_ms[name].mean() - 1 for name in WAYS}
    for name in WAYS:
        most = max(outcome.state_bytes[name] for outcome in outcomes)
        slower, busier = (np.median(each[name] / each["replicated"]) for each in (step_ms, core_ms))
        print(
            f"{name:>10}: {most / 1e6:5.1f} MB of state a rank "
            f"({most / first.parameters:5.2f} bytes a parameter); step "
            f"{step_ms[name].mean():6.0f} ms, predicted {predicted[name]:6.0f} "
            f"({errors[name]:+.1%}); of replicated {slower:.2f}, predicted "
            f"{predicted[name] / predicted['replicated']:.2f}; of cores "
            f"{core_ms[name].mean():6.0f} ms ({busier:.2f}); last loss "
            f"{first.losses[name][-1]:.6f}"
        )
    worst = max(map(abs, errors.values()))
    print(f"worst error {worst:.1%}; the bar of {BAR:.0%} {'holds' if worst <= BAR else 'fails'}")


if __name__ == "__main__":
    main()
