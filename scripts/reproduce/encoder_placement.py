"""Encoders in the pipeline against data-parallel ones, on 32 H100s: which is faster, and by how
much.

    python scripts/reproduce/encoder_placement.py [--samples 6000] [--packs-per-step 128]

Simulated, with counted costs at the fitted rates of the cluster h100-80g. Models of a
small and a large encoder, on mixtures that differ in how much there is to encode. Each placement
has the tensor, pipeline and data-parallel sizes that are best for it; data-parallel encoders are
divided over as many ranks as is best; caps, packs per step and samples are the same. Samples are
drawn from a seed: texts of log-normal length (median 300 tokens), images of so many tiles, or
several images.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from paper import print_table

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.packing.packs import Packs
from omnibal.pipeline.bounds import least_step_ms
from omnibal.search.encoder_placement import relative_ms
from omnibal.steps.pack_settings import PackSettings

GPUS = 32
CLUSTER = "h100-80g"
CAPS = Caps.of(tiles=28, tokens=8192)
_LARGEST = 8
"""Largest tensor- and pipeline-parallel size that is tried."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Samples of one kind or two."""

    name: str
    text_share: float
    """Share of samples without images."""
    tiles: tuple[int, int]
    """Fewest and most tiles of the others."""


MIXTURES = (
    Mixture("9 of 10 are text", 0.9, (1, 13)),
    Mixture("half are text", 0.5, (1, 13)),
    Mixture("none is text", 0.0, (1, 13)),
    Mixture("half text, half 12-24 tiles", 0.5, (12, 24)),
)


def models() -> Iterator[tuple[str, ModelConfig]]:
    """The models, by what they are called in the table."""
    small = load_model("internvl3-8b")
    # Qwen3-8B's sizes, without its norms of queries and keys.
    sizes = {"layers": 36, "hidden_size": 4096, "heads": 32, "kv_heads": 8}
    sizes |= {"ffn_hidden_size": 12_288, "vocab_size": 151_936, "qkv_bias": False}
    yield "300M + 8B", small.with_tower("language", **sizes)
    yield "6B + 8B", load_model("internvit-6b-llama3-8b")
    yield "6B + 20B", load_model("internvl-chat-1.5-6b-20b")


def drawn(mixture: Mixture, model: ModelConfig, samples: int, seed: int) -> Lengths:
    """Samples of a mixture."""
    rng = np.random.default_rng(seed)
    tiles = rng.integers(mixture.tiles[0], mixture.tiles[1] + 1, samples)
    tiles[rng.random(samples) < mixture.text_share] = 0
    text = np.clip(np.exp(rng.normal(np.log(300), 0.8, samples)), 20, 1_800).astype(np.int32)
    return Lengths(
        items={"tiles": tiles.astype(np.int32)},
        tokens=(tiles * model.vision.tokens_per_item + text).astype(np.int32),
        loss_tokens=text // 2,
        source=np.zeros(samples, np.int32),
        source_names=(mixture.name,),
        origin=None,
    )


def possible_sizes() -> list[Parallel]:
    """Parallel sizes of all devices."""
    sizes = [1, 2, 4, 8]
    return [
        Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=GPUS // (tensor * pipeline),
            sequence_parallel=tensor > 1,
        )
        for tensor in sizes
        for pipeline in sizes
        if max(tensor, pipeline) <= _LARGEST and GPUS >= tensor * pipeline
    ]


def best_plan(job: JobSpec, data: SampleData, packed: Sequence[Packs]) -> Plan | None:
    """The plan of least time per sample over all parallel sizes; None where none fits."""
    best: Plan | None = None
    for parallel in possible_sizes():
        try:
            sized = job.sized(parallel)
            request = PlanRequest(job=sized, data=data.drawn(sized, packed))
            if best is not None:
                bound_ms = least_step_ms(
                    sized.cost, sized.pipeline_model, request.workload(), parallel.pipeline
                )
                if bound_ms >= _step_ms(best):
                    continue
            plan = make_plan(request).plan
        except UserError:
            continue
        if best is None or _step_ms(plan) < _step_ms(best):
            best = plan
    return best


def _step_ms(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_ms


def row(name: str, mixture: Mixture, model: ModelConfig, given: argparse.Namespace) -> list[str]:
    """Both placements of a model on a mixture."""
    lengths = drawn(mixture, model, given.samples, given.seed)
    data = SampleData(
        settings=PackSettings(seed=given.seed),
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=given.packs_per_step,
    )
    job = JobSpec(
        model=model,
        cluster=load_cluster(CLUSTER),
        parallel=Parallel(pipeline=1),
        precision="bf16",
        encoder_shardings=tuple(WeightSharding),
    )
    packed = data.packed(job)
    plans = {
        placement: best_plan(replace(job, placement=placement), data, packed)
        for placement in EncoderPlacement
    }
    share = encoder_share(job, packed[0], lengths)
    inside, beside = plans.values()
    return [
        name,
        mixture.name,
        f"{1e3 * lengths.items['tiles'].sum() / lengths.tokens.sum():.2f}",
        f"{share:.1%}",
        *(cell for plan in (inside, beside) for cell in _cells(plan)),
        "" if beside is None or beside.beside is None else f"{beside.beside.sharded}",
        _verdict(inside, beside),
    ]


def encoder_share(job: JobSpec, packs: Packs, lengths: Lengths) -> float:
    """Share of the encoder in the predicted time of all units, on one device."""
    alone = replace(job, placement=EncoderPlacement.DATA_PARALLEL)
    return 1 - float(alone.load_ms(packs, lengths).sum() / job.load_ms(packs, lengths).sum())


def _cells(plan: Plan | None) -> tuple[str, str, str]:
    if plan is None or plan.prediction is None:
        return "does not fit", "", ""
    sizes = "/".join(str(size) for size in plan.parallel.sizes.values())
    prediction = plan.prediction
    peak_gib = max(stage.memory.peak_gib for stage in prediction.stages)
    return f"{prediction.step_ms / 1e3:.2f} s", sizes, f"{peak_gib:.0f}"


def _verdict(inside: Plan | None, beside: Plan | None) -> str:
    if inside is None or beside is None or inside.prediction is None or beside.prediction is None:
        return "neither" if inside is beside else "in the pipeline" if inside else "data-parallel"
    gain = relative_ms(inside.prediction) / relative_ms(beside.prediction) - 1
    return f"{gain:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=6_000)
    parser.add_argument("--packs-per-step", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = [row(name, mixture, model, given) for name, model in models() for mixture in MIXTURES]
    columns = (
        "model",
        "samples",
        "tiles per 1000 tokens",
        "encoder's share",
        "in the pipeline",
        "TP/PP/DP",
        "GiB",
        "data-parallel",
        "TP/PP/DP",
        "GiB",
        "divided over",
        "data-parallel is faster by",
    )
    print_table(f"Encoders in the pipeline and data-parallel, {GPUS} {CLUSTER}", columns, rows)


if __name__ == "__main__":
    main()
