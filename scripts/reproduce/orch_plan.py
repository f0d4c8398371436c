"""OrchMLLM's job in this project's trainer: encoders in the pipeline or data-parallel, simulated.

    python scripts/reproduce/orch_plan.py

The model and the mixture are those of `orch.py`. Of 2,560 GPUs, 8 are tensor-parallel, 4 stages and
80 data-parallel; clips have 10 s, to which the last one of a recording is padded. Data-parallel
encoders are whole on every rank, which 80 GB do not hold.
"""

import argparse

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
from omnibal.model.parallel import Parallel
from omnibal.model.units import feature_names

PARALLEL = Parallel(tensor=8, pipeline=4, data=80, sequence_parallel=True)
CLUSTERS = ("h100-80g", "h200-141g")
CLIP_S = 10
CAPS = Caps.of(tiles=64, clips=64, tokens=18_432)
MICRO_BATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000, help="of the mixture")
    lengths = lengths_of(mixture(parser.parse_args().samples, seed=0))
    rows, refusals = [], []
    for cluster in CLUSTERS:
        for placement in EncoderPlacement:
            try:
                found = planned(lengths, cluster, placement)
            except DoesNotFit as error:
                refusals.append(f"{cluster}: {error.need}")
                found = ("", "", "does not fit", "")
            rows.append([cluster, placement.value, *found])
    columns = ("devices", "encoders", "step s", "MFU", "peak GiB", "lost most")
    print_table("Placements of the encoders, simulated", columns, rows)
    for refusal in refusals:
        print(refusal)


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


def planned(lengths: Lengths, cluster: str, placement: EncoderPlacement) -> tuple[str, ...]:
    """A plan's time, share of the peak, memory, and where its time goes.

    Raises:
        DoesNotFit: no stages fit beside the encoders, or with them.
    """
    job = JobSpec(
        model=the_model(CLIP_S * FRAMES_PER_SECOND),
        cluster=load_cluster(cluster),
        parallel=PARALLEL,
        precision="bf16",
        placement=placement,
    )
    data = SampleData(
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=PARALLEL.data * MICRO_BATCHES,
    )
    result = make_plan(PlanRequest(job=job, data=data))
    prediction = result.plan.prediction
    assert prediction is not None and result.data is not None
    packs, _ = result.data
    flops = pack_features(packs.packs, lengths, feature_names(job.model)) @ model_flops(
        job.model, job.cluster, ()
    )
    run_ms = prediction.step_ms * packs.steps
    peak = 1e9 * job.cluster.tflops("bf16") * PARALLEL.world_size
    lost = prediction.lost.named()
    largest = sorted(((ms, name) for name, ms in lost.items() if name != "ideal"), reverse=True)[:3]
    return (
        f"{1e-3 * prediction.step_ms:.2f}",
        f"{flops.sum() / (run_ms * peak):.1%}",
        f"{max(stage.memory.peak_gib for stage in prediction.stages):.1f}",
        ", ".join(f"{name} {1e-3 * ms:.2f} s" for ms, name in largest),
    )


if __name__ == "__main__":
    main()
