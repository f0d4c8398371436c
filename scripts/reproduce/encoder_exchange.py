"""How much of a step data-parallel encoders' exchange of features takes, on 64 H100s.

    python scripts/reproduce/encoder_exchange.py

Simulated, with counted costs at the fitted rates of the cluster h100-80g, and networks of other
rates. Eight packs of at most 8,192 tokens a pipeline and step; seven samples of ten have 1 to 13
tiles, or images of 650 tokens in the median. The last column is the share of the step that would be
hidden at most if all passes but the last had their exchange beside the next pass.
"""

from dataclasses import dataclass

import numpy as np
from paper import print_table

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.steps.pack_settings import PackSettings

GPUS, STEPS, PACKS = 64, 4, 8
NETWORKS = (50.0, 25.0, 12.5)
"""GB/s of a GPU: an adapter of 400, 200 and 100 Gb/s."""
SAMPLES_OF_PACK = 3.2
"""Samples that fill a pack, of those that are drawn."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the sizes of its pipelines."""

    model: str
    tensor: int
    pipeline: int


CASES = (
    Case("internvl3-38b", 4, 4),
    Case("qwen3-vl-32b", 4, 4),
    Case("internvl3-8b", 1, 2),
    Case("internvl3-8b", 2, 1),
)


def drawn(model: ModelConfig, samples: int) -> Lengths:
    """Samples of text, and of text with images."""
    rng, tower = np.random.default_rng(0), model.encoders["vision"]
    text = np.clip(rng.lognormal(np.log(300), 0.8, samples), 20, 1_800).astype(np.int32)
    images, squares = rng.integers(1, 14, samples), dict[str, np.ndarray]()
    if tower.squares is not None:
        images = np.clip(rng.lognormal(6.5, 0.7, samples), 16, 4_096).astype(np.int64)
    images[rng.random(samples) < 0.3] = 0
    if tower.squares is not None:
        squares[tower.squares] = images**2
    return Lengths(
        items={tower.feature: images.astype(np.int32)},
        squares=squares,
        tokens=(images * tower.tokens_per_item + text).astype(np.int32),
        loss_tokens=text // 2,
        source=np.zeros(samples, np.int32),
        source_names=("made up",),
        origin=None,
    )


def row(case: Case, gb_per_s: float) -> list[str]:
    """The predicted exchange of a plan with such a network."""
    model = load_model(case.model)
    cluster = load_cluster("h100-80g").model_copy(update={"inter_node_gb_per_s": gb_per_s})
    data_ranks = GPUS // case.tensor // case.pipeline
    packs, feature = PACKS * data_ranks, model.encoders["vision"].feature
    caps = Caps.of(**{feature: 28 if feature == "tiles" else 7_000, "tokens": 8_192})
    job = JobSpec(
        model=model,
        cluster=cluster,
        parallel=Parallel(
            tensor=case.tensor,
            pipeline=case.pipeline,
            data=data_ranks,
            sequence_parallel=case.tensor > 1,
        ),
        precision="bf16",
        encoder_shardings=tuple(WeightSharding),
        placement=EncoderPlacement.DATA_PARALLEL,
    )
    data = SampleData(
        settings=PackSettings(seed=0),
        lengths=drawn(model, int(packs * STEPS * SAMPLES_OF_PACK)),
        levels=(Level(caps=caps),),
        packs_per_step=packs,
    )
    result = make_plan(PlanRequest(job=job, data=data))
    prediction, beside = result.plan.prediction, result.plan.beside
    assert prediction is not None and prediction.beside is not None and beside is not None
    share = prediction.beside.exchange_ms / prediction.step_ms
    items = data.lengths.items[feature].sum() / STEPS / GPUS
    passes = max(1, -int(-items // beside.items_per_pass["vision"]))
    return [
        case.model,
        f"{case.tensor}/{case.pipeline}/{data_ranks}",
        f"{gb_per_s:g}",
        f"{prediction.step_ms:,.0f}",
        f"{prediction.beside.exchange_ms:.1f}",
        f"{share:.2%}",
        f"{passes}",
        f"{share * (1 - 1 / passes):.2%}",
    ]


def main() -> None:
    columns = (
        "model",
        "TP/PP/DP",
        "network GB/s",
        "step ms",
        "exchange ms",
        "of the step",
        "passes",
        "could be hidden",
    )
    rows = [row(case, network) for case in CASES for network in NETWORKS]
    print_table(f"Exchange of features, {GPUS} H100 with networks of three rates", columns, rows)


if __name__ == "__main__":
    main()
