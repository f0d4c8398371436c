"""Data-parallel encoders against every rank encoding its own, on an incoherent mixture.

    python benchmarks/data_parallel_encoders.py [--rounds 24]

Four data-parallel processes train a small model with a vision and an audio encoder, each on one
pack a step, as where nothing is accumulated. Packs have equally many tokens, half of them of text
alone, the others of many tiles or of long recordings, dealt at random. In one way the encoders are
units of each process's one stage; in the other they are data-parallel, and the four share all items
of a step. Both start from the same weights and take turns, step by step; the first rounds do not
count.

The prediction is the product's: costs fitted to a profile that is measured in between by as many
processes at once, exchanges at measured rates, and the very steps that were run, simulated.

Four processes on fewer cores do not wait as devices do: who waits leaves its core to the others.
Where Linux control groups (version 1) can be made, each process has one with an equal part of the
cores, so that it is a device of its own; the output says so. Other programs must leave the machine
alone; the busiest process's core time, which they change less, is printed beside the clock's.
Memory is no limit here: all items are kept.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from forked_ranks import outcomes_of, save_outcome
from levels import COLLECTIVE_SIZES, RANKS, mean_rates, one_node
from own_cores import own_cores, own_cores_in_words
from rich.console import Console

from megatron.vlm.backend import prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream, joined_items
from megatron.vlm.inputs.encoder_share import EncoderShares, EncodingRanks, ItemRun
from megatron.vlm.measure.profiler import ProfileOptions, Profiler
from megatron.vlm.measure.rates import measure_rates
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.train import OptimizationOptions, Trainer, build_trainer, train_step
from omnibal.cost.profile import Measured, Profile
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, Shapes
from omnibal.job.planner import prediction_of
from omnibal.model.config import LanguageConfig, ModelConfig
from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.model.encoders import ClipsEncoder, TilesEncoder
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.unit_runs import stages_from_cuts

SLOTS, SAMPLES_OF_PACK = 1, 16
TOKENS = 2_048
ITEMS = {"text": (0, 0), "tiles": (96, 0), "clips": (0, 64)}
"""Tiles and clips of a pack of each kind."""
SHARES = {"text": 0.5, "tiles": 0.25, "clips": 0.25}
"""How often a pack is of each kind."""
WARM_ROUNDS = 2
ROUNDS_PER_PROFILE = 3
"""Steps of each way between two rounds of the profiler."""
BAR = 0.1
"""Largest error of a prediction."""

_LAYERS = {"hidden_size": 128, "heads": 4, "ffn_hidden_size": 512, "qkv_bias": True}
MODEL = ModelConfig(
    name="incoherent",
    encoders={
        "vision": TilesEncoder(
            layers=6, **_LAYERS, normalization="LayerNorm", qk_norm=False, layer_scale_init=0.1,
            image_size=64, patch_size=8,
        ),
        "audio": ClipsEncoder(
            layers=4, **_LAYERS, normalization="LayerNorm", qk_norm=False, frames=200,
            mel_bins=80, positions_per_token=4,
        ),
    },
    language=LanguageConfig(
        layers=4, hidden_size=192, heads=4, kv_heads=4, ffn_hidden_size=512, vocab_size=512
    ),
)  # fmt: skip
OPTIONS = OptimizationOptions(
    lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_fraction=0.1, weight_decay=0.1,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a rank measures of every round's step, by way."""

    step_ms: dict[str, list[float]]
    core_ms: dict[str, list[float]]
    """Time of the process on a core."""
    losses: dict[str, list[float]]
    is_device: bool
    """Whether the process had a part of the cores to itself."""
    profile: Profile
    """Costs as all ranks together measured them in between."""


def plan_of(*, beside: bool) -> Plan:
    """One stage on each of the ranks, with or without the encoders."""
    groups = DataParallelEncoders(
        pipelines=RANKS,
        items_per_pass={"vision": 48, "audio": 32},
        kept_items=dict.fromkeys(MODEL.encoders, 2**20),
        item_ms={"vision": 1.0, "audio": 1.2},
    )
    return Plan(
        model=MODEL,
        precision="fp32",
        parallel=Parallel(pipeline=1, data=RANKS),
        stages=stages_from_cuts(MODEL.without_encoders() if beside else MODEL, ()),
        beside=groups if beside else None,
        cluster=one_node(),
        data=None,
        shapes=Shapes(
            caps=Caps.of(tiles=ITEMS["tiles"][0], clips=ITEMS["clips"][1], tokens=TOKENS),
            micro_batches_per_step=SLOTS,
        ),
    )


def random_pack(kind: str, random: np.random.Generator) -> MicroBatch:
    """A pack of samples of equal length, whose items come first."""
    tiles, clips = ITEMS[kind]
    vision, audio = MODEL.vision, MODEL.audio
    of_tiles, of_clips = tiles * vision.tokens_per_item, clips * audio.tokens_per_item
    items = of_tiles + of_clips
    learned = torch.arange(items, TOKENS - 1)
    pixels = random.standard_normal((tiles, 3, vision.image_size, vision.image_size))
    frames = random.standard_normal((clips, audio.mel_bins, audio.frames))
    ids = torch.from_numpy(random.integers(0, MODEL.language.vocab_size, TOKENS))
    return MicroBatch(
        tiles=tiles,
        clips=clips,
        tokens=TOKENS,
        segment_tokens=(TOKENS // SAMPLES_OF_PACK,) * SAMPLES_OF_PACK,
        pixels_TCPP=torch.from_numpy(pixels.astype(np.float32)),
        frames_CBF=torch.from_numpy(frames.astype(np.float32)),
        token_ids_S=ids,
        image_positions_M=torch.arange(of_tiles),
        audio_positions_N=torch.arange(of_tiles, items),
        labels_L=ids[learned + 1],
        loss_positions_L=learned,
        loss_weights_L=torch.ones(len(learned)),
    )


def random_step(seed: int) -> list[MicroBatch]:
    """Packs of all ranks and slots, rank by rank."""
    random = np.random.default_rng(seed)
    kinds = random.choice(list(SHARES), RANKS * SLOTS, p=list(SHARES.values()))
    return [random_pack(str(kind), random) for kind in kinds]


def scheduled(steps: Sequence[Sequence[MicroBatch]]) -> ScheduledPacks:
    """Packs of steps as a plan has them."""
    packs = [pack for step in steps for pack in step]
    number = np.arange(len(packs))
    place = number % (RANKS * SLOTS)
    return ScheduledPacks(
        packs=Packs(
            samples=np.arange(len(packs) * SAMPLES_OF_PACK),
            offsets=np.arange(len(packs) + 1) * SAMPLES_OF_PACK,
        ),
        step=number // (RANKS * SLOTS),
        dp_rank=(place // SLOTS).astype(np.int32),
        slot=(place % SLOTS).astype(np.int32),
        epoch=np.zeros(len(packs), np.int32),
        items={name: np.array([vars(pack)[name] for pack in packs], np.int32)
               for name in ("tiles", "clips")},
        tokens=np.array([pack.tokens for pack in packs], np.int32),
        level=np.zeros(len(packs), np.int32),
    )  # fmt: skip


def lengths_of(packs: ScheduledPacks, loss_tokens: np.ndarray) -> Lengths:
    """Lengths of all samples, each of which has an equal part of its pack.

    Args:
        loss_tokens: of every pack, [packs].
    """

    def each(counts: np.ndarray) -> np.ndarray:
        return np.repeat(counts // SAMPLES_OF_PACK, SAMPLES_OF_PACK).astype(np.int32)

    return Lengths(
        items={name: each(counts) for name, counts in packs.items.items()},
        tokens=each(packs.tokens),
        loss_tokens=each(loss_tokens),
        source=np.zeros(len(packs.packs.samples), np.int32),
        source_names=("made up",),
        origin=None,
    )


def predicted_ms(plan: Plan, profile: Profile, steps: Sequence[Sequence[MicroBatch]]) -> float:
    """Predict the mean step from measured costs and rates."""
    assert profile.rates is not None
    plan = plan.model_copy(
        update={"cluster": one_node().model_copy(update={"rates": {"fp32": profile.rates}})}
    )
    packs, job = scheduled(steps), JobSpec.of_plan(plan, Measured(profile))
    learned = [len(pack.loss_positions_L) for step in steps for pack in step]  # type: ignore[arg-type]
    workload = job.workload(packs, lengths_of(packs, np.array(learned)), plan.pack_levels)
    return prediction_of(plan, job, packs, workload).step_ms


def own_stream(plan: Plan, packs: Sequence[MicroBatch], rank: int) -> MicroBatchStream:
    """What a rank reads of a step."""
    own = packs[rank * SLOTS : (rank + 1) * SLOTS]
    if plan.beside is None:
        return MicroBatchStream.of(own)
    ranks = EncodingRanks(pipelines=RANKS, parallel=plan.parallel, rank=rank)
    levels = [Level(caps=Caps.of(tokens=TOKENS))]
    every = EncoderShares(
        model=MODEL,
        beside=plan.beside,
        schedule=plan.schedule,
        ranks=ranks,
        gpus_per_node=plan.cluster.gpus_per_node,
        packs=scheduled([packs]),
        levels=levels,
    )
    shares = every.step(0)
    passes = [
        joined_items([_items(packs[run.row], run, one.feature) for run in one.runs])
        for one in shares.passes
    ]
    texts = [replace(pack, pixels_TCPP=None, frames_CBF=None) for pack in own]
    return replace(MicroBatchStream.of(own), batches=iter([*passes, *texts]), encoding=shares)


def _items(pack: MicroBatch, run: ItemRun, feature: str) -> MicroBatch:
    taken = slice(run.items.start, run.items.stop)
    tiles, clips = (taken if feature == name else slice(0) for name in ("tiles", "clips"))
    assert pack.pixels_TCPP is not None and pack.frames_CBF is not None
    return MicroBatch(
        tiles=len(pack.pixels_TCPP[tiles]),
        clips=len(pack.frames_CBF[clips]),
        tokens=0,
        segment_tokens=(),
        pixels_TCPP=pack.pixels_TCPP[tiles],
        frames_CBF=pack.frames_CBF[clips],
    )


def run_rank(rank: int, rounds: int, folder: Path) -> None:
    """Take turns of both ways on one rank; its outcome goes into the folder."""
    launch = Launch(rank=rank, world_size=RANKS, local_rank=rank)
    plans = {"own": plan_of(beside=False), "beside": plan_of(beside=True)}
    with own_cores(rank, RANKS) as is_device:
        links = initialize_distributed(
            launch, plans["own"].parallel, seed=1, init_method=f"file://{folder / 'store'}"
        )
        trainers: dict[str, Trainer] = {
            name: build_trainer(plan, links, OPTIONS, steps=rounds, seed=1)
            for name, plan in plans.items()
        }
        step_ms: dict[str, list[float]] = {name: [] for name in plans}
        core_ms: dict[str, list[float]] = {name: [] for name in plans}
        losses: dict[str, list[float]] = {name: [] for name in plans}
        profiler = Profiler(
            JobSpec.of_plan(plans["own"]),
            links,
            ProfileOptions(
                max_tiles=ITEMS["tiles"][0],
                max_clips=ITEMS["clips"][1],
                max_tokens=TOKENS,
                tokens_per_sample=TOKENS // SAMPLES_OF_PACK,
                layers=4,
                repetitions=1,
            ),
        )
        profiled, rates = [], []
        for number in range(rounds):
            if number >= WARM_ROUNDS and number % ROUNDS_PER_PROFILE == 0:
                profiled.append(profiler.round())
                rates.append(
                    measure_rates("this machine", "fp32", COLLECTIVE_SIZES, Console(quiet=True))
                )
            packs = random_step(number)
            for name, trainer in trainers.items():
                stream = own_stream(plans[name], packs, rank)
                dist.barrier()
                begun, core_begun = time.perf_counter(), time.process_time()
                result = train_step(trainer, stream)
                trainer.wait_for_weights()
                core_ms[name].append((time.process_time() - core_begun) * 1e3)
                dist.barrier()
                step_ms[name].append((time.perf_counter() - begun) * 1e3)
                losses[name].append(result.loss)
        profile = profiler.result(profiled)
        outcome = Outcome(
            step_ms=step_ms,
            core_ms=core_ms,
            losses=losses,
            is_device=is_device,
            profile=profile.model_copy(update={"rates": mean_rates(rates)}),
        )
        save_outcome(outcome, rank, folder)
        shut_down_distributed()


def main() -> None:
    """Print samples a second of both ways, and by how much they differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24, help="steps of each way")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    prepare_megatron_core()
    outcomes: list[Outcome] = outcomes_of(run_rank, RANKS, WARM_ROUNDS + rounds)
    print(f"{RANKS} processes, {own_cores_in_words(RANKS, are_devices=outcomes[0].is_device)}")
    step_ms, core_ms = {}, {}
    steps, errors = [random_step(number) for number in range(WARM_ROUNDS, WARM_ROUNDS + rounds)], []
    for name in outcomes[0].step_ms:
        step_ms[name] = np.mean(outcomes[0].step_ms[name][WARM_ROUNDS:])
        busiest = np.max([one.core_ms[name] for one in outcomes], axis=0)
        core_ms[name] = np.mean(busiest[WARM_ROUNDS:])
        expected_ms = predicted_ms(plan_of(beside=name == "beside"), outcomes[0].profile, steps)
        errors.append(expected_ms / step_ms[name] - 1)
        rate = RANKS * SLOTS * SAMPLES_OF_PACK * 1e3 / step_ms[name]
        print(
            f"{name:>8}: {step_ms[name]:7.1f} ms a step, {rate:6.1f} samples/s; busiest process "
            f"{core_ms[name]:7.1f} core ms; predicted {expected_ms:7.1f} ({errors[-1]:+.1%})"
        )
    faster, lighter = (each["own"] / each["beside"] for each in (step_ms, core_ms))
    worst = max(map(abs, errors))
    print(f"worst error {worst:.1%}; the bar of {BAR:.0%} {'holds' if worst <= BAR else 'fails'}")
    apart = np.ptp(list(outcomes[0].losses.values()), axis=0).max()
    print(f"beside: {faster:.2f} times the samples a second, {lighter:.2f} by core time")
    print(f"losses are at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
