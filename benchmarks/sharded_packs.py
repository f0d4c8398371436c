"""Balanced packs against packs as they come, where ranks that divide weights wait for each other.

    python benchmarks/sharded_packs.py [--rounds 8] [--tokens 640]

In fully sharded training every micro-batch waits for the slowest rank. Four processes that divide
all weights of a small language model train on the same samples, packed and dealt in three ways:

- planned: the product's packs and its dealing, rows of packs of like predicted time;
- packed as they come: samples in random order, a pack closed where the next sample does not fit
  (next fit, as the trainers do that pack while they read), packs dealt round robin;
- batches as they come: random order, as many samples in every micro-batch, without padding; the
  most of which none is over the limit, so that memory is the same.

Lengths are drawn from three lognormals of the shape of AI2D and DocVQA as InternVL tiles them (a
tile, three, and five), at a quarter of their tokens; the limit is the longest sample, unless
another is given. The ways take turns, epoch by epoch. Steps have about as many samples in all ways.
The half of all rounds counts in which processes got most of the cores, of the profiler's and of the
epochs each.

The prediction is the product's: costs fitted to a profile that is measured in between by as many
processes at once, exchanges and what they hide at measured rates, and the very packs that were run,
simulated. Packs are planned before, by counted costs.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from forked_ranks import outcomes_of, save_outcome
from own_cores import own_cores, own_cores_in_words
from profiled_beside import Turns, core_shares, profile_rank, quiet_rounds
from sharded import OPTIONS, RANKS, SIZES, plan_of

from megatron.vlm.backend import prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.measure.profiler import ProfileOptions
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.train import Trainer, build_trainer, train_step
from omnibal.cost.profile import Measured, Profile
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import prediction_of
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.prediction import Prediction
from omnibal.steps.next_fit import next_fit_packs

PARTS = {310: (0.26, 0.034), 823: (0.18, 0.020), 1415: (0.56, 0.189)}
"""Lognormals of lengths: of each median its share and the spread of the logarithm."""
SHORTEST, LONGEST = 288, 2_560
SCALE = 4
"""Tokens of the real lengths in one here."""
SLOTS = 2
"""Micro-batches of a rank in a step of packs."""
SAMPLES = 160
"""Samples of an epoch."""
BAR = 1.25
"""Least gain of planned packs over packs as they come."""
MODEL = ModelConfig(
    name="small",
    language=LanguageConfig(
        layers=4, hidden_size=192, heads=4, kv_heads=4, ffn_hidden_size=768, vocab_size=512
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a rank measures of every epoch, by way."""

    epoch_ms: dict[str, list[float]]
    core_ms: dict[str, list[float]]


def drawn_lengths(seed: int = 0) -> Lengths:
    """Lengths of samples in random order, all of whose tokens carry loss."""
    random = np.random.default_rng(seed)
    shares, spreads = np.array(list(PARTS.values())).T
    part = random.choice(len(PARTS), SAMPLES, p=shares)
    logarithm = random.normal(np.log(list(PARTS))[part], spreads[part])
    tokens = np.clip(np.exp(logarithm), SHORTEST, LONGEST).astype(np.int32) // SCALE
    return Lengths(
        items={},
        tokens=tokens,
        loss_tokens=tokens,
        source=np.zeros(SAMPLES, np.int32),
        source_names=("made up",),
        origin=None,
    )


def schedules(lengths: Lengths, max_tokens: int) -> dict[str, ScheduledPacks]:
    """The packs of an epoch in every way."""
    plan = plan_of(RANKS, MODEL, max_tokens, SLOTS)
    data = SampleData(lengths=lengths, levels=plan.pack_levels, packs_per_step=RANKS * SLOTS)
    planned, _ = data.schedule(JobSpec.of_plan(plan))
    as_they_come = next_fit_packs(lengths.tokens, max_tokens)
    size = samples_of_batch(lengths.tokens, max_tokens)
    bounds = np.append(np.arange(0, len(lengths), size), len(lengths))
    slots = round(SLOTS * len(lengths) / len(planned) / size)
    return {
        "planned": planned,
        "packed as they come": in_turn(as_they_come, lengths, SLOTS),
        "batches as they come": in_turn(bounds, lengths, slots),
    }


def samples_of_batch(tokens: np.ndarray, max_tokens: int) -> int:
    """Most samples of a batch, where all have as many, with which none is over the limit."""
    size = 1
    while np.add.reduceat(tokens, np.arange(0, len(tokens), size + 1)).max() <= max_tokens:
        size += 1
    return size


def in_turn(bounds: np.ndarray, lengths: Lengths, slots: int) -> ScheduledPacks:
    """Runs of samples dealt round robin, so many to a rank in every step."""
    number = np.arange(len(bounds) - 1)
    step, place = np.divmod(number, RANKS * slots)
    slot, rank = np.divmod(place, RANKS)
    order = np.lexsort((slot, rank, step))
    packs = Packs(samples=np.arange(len(lengths)), offsets=bounds.astype(np.int64)).take(order)
    return ScheduledPacks(
        packs=packs,
        step=step[order],
        dp_rank=rank[order].astype(np.int32),
        slot=slot[order].astype(np.int32),
        epoch=np.zeros(len(order), np.int32),
        items={},
        tokens=packs.sums(lengths.tokens).astype(np.int32),
        level=np.zeros(len(order), np.int32),
    )


def random_batch(segment_tokens: Sequence[int]) -> MicroBatch:
    """A pack of random texts of these lengths."""
    tokens = sum(segment_tokens)
    generator = torch.Generator().manual_seed(tokens)
    words_S = torch.randint(0, MODEL.language.vocab_size, (tokens,), generator=generator)
    places_L = torch.arange(tokens - 1)
    return MicroBatch(
        tiles=0,
        tokens=tokens,
        segment_tokens=tuple(segment_tokens),
        token_ids_S=words_S,
        labels_L=words_S[1:],
        loss_positions_L=places_L,
        loss_weights_L=torch.ones(tokens - 1),
        loss_weight=tokens - 1.0,
    )


def stream_of(
    trainer: Trainer, packs: ScheduledPacks, lengths: Lengths, step: int, rank: int
) -> MicroBatchStream:
    """A rank's micro-batches of a step, with empty ones where others have more."""
    of_step = np.flatnonzero(packs.step == step)
    own = of_step[packs.dp_rank[of_step] == rank]
    batches = [random_batch(lengths.tokens[packs.packs[row]].tolist()) for row in own]
    return trainer.joining(MicroBatchStream.of(batches), int(packs.slot[of_step].max()) + 1)


def train(rank: int, turns: Turns, rounds: int, max_tokens: int, folder: Path) -> Outcome:
    """Take turns of all ways on one rank."""
    launch = Launch(rank=rank, world_size=RANKS, local_rank=rank)
    plan, lengths = plan_of(RANKS, MODEL, max_tokens, SLOTS), drawn_lengths()
    ways = schedules(lengths, max_tokens)
    store = f"file://{folder / 'store'}"
    links = initialize_distributed(launch, plan.parallel, seed=1, init_method=store)
    trainer = build_trainer(plan, links, OPTIONS, steps=rounds * SAMPLES, seed=1)

    def epoch_ms(packs: ScheduledPacks) -> tuple[float, float]:
        streams = [stream_of(trainer, packs, lengths, step, rank) for step in range(packs.steps)]
        dist.barrier()
        begun, core_begun = time.perf_counter(), time.process_time()
        for stream in streams:
            train_step(trainer, stream)
        core_ms = (time.process_time() - core_begun) * 1e3
        dist.barrier()
        return (time.perf_counter() - begun) * 1e3, core_ms

    turns.profile(rank)  # to warm up
    epoch_ms(ways["planned"])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        turns.profile(rank)
        for name, packs in ways.items():
            found[name].append(epoch_ms(packs))
    shut_down_distributed()
    return Outcome(
        epoch_ms={name: [clock for clock, _ in times] for name, times in found.items()},
        core_ms={name: [core for _, core in times] for name, times in found.items()},
    )


def run_process(process: int, rounds: int, folder: Path, turns: Turns, max_tokens: int) -> None:
    """Train or profile on one rank, on its part of the cores; the outcome goes into the folder."""
    rank = process % RANKS
    with own_cores(rank, RANKS) as is_device:
        if process < RANKS:
            outcome = train(rank, turns, rounds, max_tokens, folder)
            save_outcome((outcome, is_device), process, folder)
            return
        options = ProfileOptions(
            max_tiles=0,
            max_tokens=max_tokens,
            tokens_per_sample=round(float(drawn_lengths().tokens.mean())),
            layers=MODEL.language.layers,
            repetitions=1,
        )
        profile = profile_rank(rank, turns, rounds, MODEL, options, SIZES, folder)
        save_outcome(profile, process, folder)


def predicted(
    profile: Profile, packs: ScheduledPacks, lengths: Lengths, max_tokens: int
) -> Prediction:
    """Predict the packs of an epoch from measured costs and rates."""
    plan = plan_of(RANKS, MODEL, max_tokens, SLOTS)
    job = JobSpec.of_plan(plan, Measured(profile))
    workload = job.workload(packs, lengths, plan.pack_levels)
    return prediction_of(plan, job, packs, workload)


def main() -> None:
    """Print samples a second of all ways, measured and predicted, and the gain of planned packs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="epochs of each way")
    parser.add_argument(
        "--tokens", type=int, default=LONGEST // SCALE, help="limit of a pack, in tokens"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    prepare_megatron_core()
    run = partial(run_process, turns=Turns.of(RANKS), max_tokens=given.tokens)
    found = outcomes_of(run, 2 * RANKS, given.rounds)
    outcomes: list[Outcome] = [outcome for outcome, _ in found[:RANKS]]
    profile: Profile = found[RANKS]
    shares = core_shares([one.core_ms for one in outcomes], [one.epoch_ms for one in outcomes])
    lengths, quiet = drawn_lengths(), quiet_rounds(shares)
    cores = own_cores_in_words(RANKS, are_devices=found[0][1])
    print(f"{RANKS} processes, {cores}; {SAMPLES} samples, packs of {given.tokens} tokens")
    rates, expected = {}, {}
    for name, packs in schedules(lengths, given.tokens).items():
        rates[name] = SAMPLES * 1e3 / np.array(outcomes[0].epoch_ms[name])[quiet].mean()
        prediction = predicted(profile, packs, lengths, given.tokens)
        expected[name] = SAMPLES * 1e3 / (prediction.step_ms * packs.steps)
        waits = prediction.lost.expert_wait_ms / prediction.step_ms
        busiest = max(np.array(one.core_ms[name])[quiet].mean() for one in outcomes) / SAMPLES
        full = packs.tokens.sum() / len(packs) / given.tokens
        error = rates[name] / expected[name] - 1
        print(
            f"{name:>20}: {len(packs):4} packs, {full:.0%} full; {rates[name]:5.2f} samples/s, "
            f"predicted {expected[name]:5.2f} ({error:+.1%} in time), {waits:.0%} of it waiting in "
            f"lockstep; busiest process {busiest:.0f} core ms a sample"
        )
    for name in list(rates)[1:]:
        gain, gain_expected = (each["planned"] / each[name] for each in (rates, expected))
        print(f"planned over {name}: {gain:.2f} times, predicted {gain_expected:.2f}")
    gain = rates["planned"] / rates["packed as they come"]
    print(f"the bar of {BAR} times {'holds' if gain >= BAR else 'fails'}")


if __name__ == "__main__":
    main()
