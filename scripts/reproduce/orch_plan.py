"""OrchMLLM's job in this project's trainer: pipelines, or weights divided over ranks; simulated.

    python scripts/reproduce/orch_plan.py

The model and the mixture are those of `orch.py`. Of 2,560 GPUs, 8 are tensor-parallel, 4 stages and
80 data-parallel; clips have 10 s, to which the last one of a recording is padded. Encoders are
units of the stages, or data-parallel: whole on every rank, which 80 GB do not hold, or divided over
as many ranks as is best. Then, in steps of a pack a GPU, that pipeline beside one stage whose
data-parallel ranks divide all weights of the language model, as OrchMLLM does.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from orch_system import FRAMES_PER_SECOND, Samples, mixture, the_model
from paper import print_table

from omnibal.base.errors import DoesNotFit
from omnibal.cost.analytic import model_flops
from omnibal.cost.model import pack_features
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import load_cluster
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.encoders import ClipsEncoder
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.units import feature_names

PARALLEL = Parallel(tensor=8, pipeline=4, data=80, sequence_parallel=True)
CLUSTERS = ("h100-80g", "h200-141g")
CLIP_S = 10
CAPS = Caps.of(tiles=64, clips=64, tokens=18_432)
MICRO_BATCHES = 8
PACKS_PER_STEP = 2_560
STEPS = 2.02
"""Steps whose tokens are drawn; packs are 99 % full, so that both are full."""
WAYS = {
    "in the stages": None,
    "data-parallel, whole": (WeightSharding.REPLICATED,),
    "data-parallel": tuple(WeightSharding),
}
"""Placements of encoders, by the ways to hold weights of data-parallel ones."""
SIZES = (
    PARALLEL,
    Parallel(pipeline=1, data=2_560, sharded=2_560),
    Parallel(tensor=2, pipeline=1, data=1_280, sharded=1_280, sequence_parallel=True),
)
"""Sizes in steps of a pack a GPU."""
PLAN_COLUMNS = ("divided over", "step s", "MFU", "peak GiB", "lost most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000, help="of the mixture")
    lengths = lengths_of(mixture(parser.parse_args().samples, seed=0))
    rows, refusals = [], []
    for cluster in CLUSTERS:
        for name, ways in WAYS.items():
            try:
                found = planned(lengths, cluster, ways)
            except DoesNotFit as error:
                refusals.append(f"{cluster}: {error.need}")
                found = ("", "", "", "does not fit", "")
            rows.append([cluster, name, *found])
    print_table(
        "Placements of the encoders, simulated", ("devices", "encoders", *PLAN_COLUMNS), rows
    )
    for refusal in refusals:
        print(refusal)
    print_table(
        f"Steps of {PACKS_PER_STEP:,} packs, {CLUSTERS[0]}, simulated",
        ("sizes", "packs of a rank", "encoders", *PLAN_COLUMNS),
        list(rows_of_sizes()),
    )


def rows_of_sizes() -> Iterator[list[str]]:
    """Every way to divide the model, in steps of equally many packs."""
    mean = float(lengths_of(mixture(PACKS_PER_STEP, seed=0)).tokens.mean())
    samples = int(STEPS * PACKS_PER_STEP * CAPS["tokens"] / mean)
    lengths = lengths_of(mixture(samples, seed=0))
    for parallel in SIZES:
        micro_batches = PACKS_PER_STEP // parallel.data
        for name in ("in the stages", "data-parallel"):
            found = planned(lengths, CLUSTERS[0], WAYS[name], parallel, micro_batches)
            yield [parallel.text, f"{micro_batches}", name, *found]


def lengths_of(samples: Samples) -> Lengths:
    """The mixture as this project counts samples."""
    audio = the_model(CLIP_S * FRAMES_PER_SECOND).encoders["audio"]
    assert isinstance(audio, ClipsEncoder)
    clips = np.ceil(samples.seconds / CLIP_S).astype(np.int32)
    tokens = samples.tokens - samples.audio_tokens + clips * audio.tokens_per_item
    return Lengths(
        items={"tiles": samples.tiles.astype(np.int32), "clips": clips},
        tokens=tokens.astype(np.int32),
        loss_tokens=samples.text.astype(np.int32),
        source=np.zeros(len(tokens), np.int32),
        source_names=("mixture",),
        origin=None,
    )


def planned(
    lengths: Lengths,
    cluster: str,
    ways: tuple[WeightSharding, ...] | None,
    parallel: Parallel = PARALLEL,
    micro_batches: int = MICRO_BATCHES,
) -> tuple[str, ...]:
    """A plan's time, share of the peak, memory, and where its time goes, for `PLAN_COLUMNS`.

    Args:
        ways: to hold weights of data-parallel encoders; None for encoders in the stages.

    Raises:
        DoesNotFit: no stages fit beside the encoders, or with them.
    """
    job = JobSpec(
        model=the_model(CLIP_S * FRAMES_PER_SECOND),
        cluster=load_cluster(cluster),
        parallel=parallel,
        precision="bf16",
        placement=EncoderPlacement.DATA_PARALLEL if ways else EncoderPlacement.PIPELINE,
        encoder_shardings=ways or (WeightSharding.REPLICATED,),
    )
    data = SampleData(
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=parallel.data * micro_batches,
    )
    result = make_plan(PlanRequest(job=job, data=data))
    prediction = result.plan.prediction
    assert prediction is not None and result.data is not None
    packs, _ = result.data
    flops = pack_features(packs.packs, lengths, feature_names(job.model)) @ model_flops(
        job.model, job.cluster, ()
    )
    run_ms = prediction.step_ms * packs.steps
    peak = 1e9 * job.cluster.tflops("bf16") * parallel.world_size
    lost = prediction.lost.named()
    largest = sorted(((ms, name) for name, ms in lost.items() if name != "ideal"), reverse=True)[:3]
    beside = result.plan.beside
    return (
        "" if beside is None else f"{beside.sharded:,}",
        f"{1e-3 * prediction.step_ms:.2f}",
        f"{flops.sum() / (run_ms * peak):.1%}",
        f"{max(stage.memory.peak_gib for stage in prediction.stages):.1f}",
        ", ".join(f"{name} {1e-3 * ms:.2f} s" for ms, name in largest),
    )


if __name__ == "__main__":
    main()
