"""Encoders in the pipeline compared with data-parallel encoders, on 32 H100s.

    python scripts/reproduce/encoder_placement.py

Simulated at the fitted rates of `h100-80g`. Each placement has its best parallel sizes and encoder
sharding; caps, packs per step and samples are equal. Texts are log-normal, median 300 tokens.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

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
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packs import Packs
from omnibal.pipeline.bounds import min_step_ms
from omnibal.search.encoder_placement import relative_ms

GPUS, CLUSTER = 32, "h100-80g"
CAPS = Caps.of(tiles=28, tokens=8192)
SAMPLES, PACKS_PER_STEP = 6_000, 128

MIXTURES = {  # share of text samples, and min and max tiles of the others
    "9 of 10 are text": (0.9, 1, 13),
    "half are text": (0.5, 1, 13),
    "none is text": (0.0, 1, 13),
    "half text, half 12-24 tiles": (0.5, 12, 24),
}


def models() -> Iterator[tuple[str, ModelConfig]]:
    """Yield models by name in the table."""
    small = load_model("internvl3-8b")
    # Qwen3-8B's sizes, without q and k norms.
    sizes = {"layers": 36, "hidden_size": 4096, "heads": 32, "kv_heads": 8}
    sizes |= {"ffn_hidden_size": 12_288, "vocab_size": 151_936, "qkv_bias": False}
    yield "300M + 8B", small.with_tower("language", **sizes)
    yield "6B + 8B", load_model("internvit-6b-llama3-8b")
    yield "6B + 20B", load_model("internvl-chat-1.5-6b-20b")


def draw_lengths(mixture: str, model: ModelConfig) -> Lengths:
    rng = np.random.default_rng(0)
    text_share, min_tiles, max_tiles = MIXTURES[mixture]
    tiles = rng.integers(min_tiles, max_tiles + 1, SAMPLES)
    tiles[rng.random(SAMPLES) < text_share] = 0
    text = np.clip(np.exp(rng.normal(np.log(300), 0.8, SAMPLES)), 20, 1_800).astype(np.int32)
    return Lengths(
        items={"tiles": tiles.astype(np.int32)},
        tokens=(tiles * model.vision.tokens_per_item + text).astype(np.int32),
        loss_tokens=text // 2,
        source=np.zeros(SAMPLES, np.int32),
        source_names=(mixture,),
    )


def best_plan(job: JobSpec, data: SampleData, packed: Sequence[Packs]) -> Plan:
    """Return the fastest plan over all parallel sizes."""
    best: Plan | None = None
    for tensor, pipeline in product((1, 2, 4, 8), repeat=2):
        data_ranks = GPUS // (tensor * pipeline)
        if not data_ranks:
            continue
        parallel = Parallel(
            tensor=tensor, pipeline=pipeline, data=data_ranks, sequence_parallel=tensor > 1
        )
        try:
            sized = job.with_sizes(parallel)
            request = PlanRequest(job=sized, data=data.with_steps(sized, packed))
            if best is not None:
                # Skip the search of stages if its lower bound is no better.
                task = sized.split_task(request.workload(), request.data.levels)
                if min_step_ms(task) >= best.known_prediction.step_ms:
                    continue
            plan = make_plan(request).plan
        except UserError:
            continue
        if best is None or plan.known_prediction.step_ms < best.known_prediction.step_ms:
            best = plan
    assert best is not None, "no sizes fit"
    return best


def placement_row(name: str, mixture: str, model: ModelConfig) -> tuple[object, ...]:
    """Return a row with both placements of a model on a mixture."""
    lengths = draw_lengths(mixture, model)
    data = SampleData(
        settings=PackSettings(seed=0),
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=PACKS_PER_STEP,
    )
    job = JobSpec(
        model=model,
        cluster=load_cluster(CLUSTER),
        parallel=Parallel(pipeline=1),
        precision="bf16",
        encoder_shardings=tuple(WeightSharding),
    )
    packed = data.pack(job)
    pipelined, data_parallel = (
        best_plan(replace(job, placement=placement), data, packed) for placement in EncoderPlacement
    )
    gain = relative_ms(pipelined.known_prediction) / relative_ms(data_parallel.known_prediction) - 1
    plans = (cell for plan in (pipelined, data_parallel) for cell in _time_and_sizes(plan))
    encoders = data_parallel.data_parallel_encoders
    sharded = None if encoders is None else encoders.sharded
    return (name, mixture, encoder_share(job, packed[0], lengths), *plans, sharded, gain)


def encoder_share(job: JobSpec, packs: Packs, lengths: Lengths) -> float:
    """Return the encoder's share of the predicted time of all units, on one device."""
    # With data-parallel encoders, a pack's load is of the language model.
    language = replace(job, placement=EncoderPlacement.DATA_PARALLEL)
    return 1 - float(language.load_ms(packs, lengths).sum() / job.load_ms(packs, lengths).sum())


def _time_and_sizes(plan: Plan) -> tuple[str, str]:
    sizes = "/".join(map(str, plan.parallel.sizes.values()))
    return f"{plan.known_prediction.step_ms / 1e3:.2f} s", sizes


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    columns = (
        "model", "samples", "encoder's share|.1%", "in the pipeline", "TP/PP/DP", "data-parallel",
        "TP/PP/DP", "sharded over", "data-parallel is faster by|+.1%",
    )  # fmt: skip
    rows = (placement_row(name, mixture, model) for name, model in models() for mixture in MIXTURES)
    print_table(f"Encoders in the pipeline and data-parallel, {GPUS} {CLUSTER}", columns, rows)


if __name__ == "__main__":
    main()
