"""Weights that ranks divide beside whole ones: bytes of state on a rank, and the time of a step.

    python benchmarks/sharded.py [--rounds 8]

Four data-parallel processes train a small language model of wide layers, whose state is most of its
memory, in three ways: whole weights with the optimizer's state divided (replicated), all four
dividing everything (full), and two and two (hybrid). All start from the same weights and take
turns, step by step; the first rounds do not count. The state in float32 is 16 bytes a parameter
(weights, gradients, two moments): of them a replicated rank keeps 8 whole and its part of the
moments, a divided one its part of all.

Four processes on fewer cores do not wait as devices do, and other programs slow them: of every way
the median step is printed, and the median of its ratio to the replicated step of the same turn, by
the clock and by the time of cores that a process has used, which other programs change less.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from forked_ranks import outcomes_of, save_outcome

from megatron.vlm.backend import prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.run.launch import Launch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.train import OptimizationOptions, Trainer, build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.model.config import LanguageConfig, ModelConfig, load_cluster
from omnibal.model.parallel import Parallel
from omnibal.pipeline.unit_runs import stages_from_cuts

RANKS, MICRO_BATCHES, TOKENS = 4, 2, 512
WARM_ROUNDS = 2
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


def plan_of(sharded: int) -> Plan:
    """A plan of one stage on all ranks."""
    return Plan(
        model=MODEL,
        precision="fp32",
        parallel=Parallel(pipeline=1, data=RANKS, sharded=sharded),
        stages=stages_from_cuts(MODEL, ()),
        cluster=load_cluster("laptop-cpu"),
        data=None,
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


def run_rank(rank: int, rounds: int, folder: Path) -> None:
    """Take turns of all ways on one rank; its outcome goes into the folder."""
    launch = Launch(rank=rank, world_size=RANKS, local_rank=rank)
    plans = {name: plan_of(sharded) for name, sharded in WAYS.items()}
    links = initialize_distributed(
        launch, plans["replicated"].parallel, seed=1, init_method=f"file://{folder / 'store'}"
    )
    trainers = {
        name: build_trainer(plan, links, OPTIONS, steps=rounds, seed=1)
        for name, plan in plans.items()
    }
    step_ms: dict[str, list[float]] = {name: [] for name in plans}
    core_ms: dict[str, list[float]] = {name: [] for name in plans}
    losses: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        first = (number * RANKS + rank) * MICRO_BATCHES
        packs = [random_pack(first + place) for place in range(MICRO_BATCHES)]
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
    )
    save_outcome(outcome, rank, folder)
    shut_down_distributed()


def main() -> None:
    """Print bytes and time of all ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="steps of each way")
    rounds = WARM_ROUNDS + parser.parse_args().rounds
    torch.set_num_threads(1)
    prepare_megatron_core()
    outcomes: list[Outcome] = outcomes_of(run_rank, RANKS, rounds)
    first = outcomes[0]
    print(f"{RANKS} processes, {first.parameters / 1e6:.1f} M parameters")
    for name in WAYS:
        most = max(outcome.state_bytes[name] for outcome in outcomes)
        print(
            f"{name:>10}: {most / 1e6:5.1f} MB of state a rank "
            f"({most / first.parameters:5.2f} bytes a parameter); step "
            f"{median(first.step_ms[name]):6.0f} ms ({ratio(first.step_ms, name):.2f} of "
            f"replicated), of cores {median(first.core_ms[name]):6.0f} ms "
            f"({ratio(first.core_ms, name):.2f}); last loss {first.losses[name][-1]:.6f}"
        )


def median(times_ms: Sequence[float]) -> float:
    """Median over the rounds that count."""
    return float(np.median(times_ms[WARM_ROUNDS:]))


def ratio(times_ms: Mapping[str, Sequence[float]], name: str) -> float:
    """Median ratio to the replicated step of the same turn."""
    return median(np.array(times_ms[name]) / np.array(times_ms["replicated"]))


if __name__ == "__main__":
    main()
