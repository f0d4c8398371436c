"""Plans of OrchMLLM's job (arXiv 2503.23830) for this trainer: pipelines, or sharded weights.

    python scripts/reproduce/orch_plan.py

Simulated, without fitted constants. The paper has 84B parameters, a ViT, a Whisper-like encoder and
a Qwen2 language model, 2,560 H100 and an MFU of 41.6 %. Assumed are:

- language model: Qwen2-72B (80 layers of 8,192); vision: 48 layers of 4,096; audio: Whisper large's
  32 layers, widened from 1,280 to 1,920; two-layer projectors
- 30 % speech recognition, 25 % spoken question answering, 30 % images, 15 % text, with lengths of
  `draw_mixture`; text and audio correlate only in speech recognition
- 256 tokens per tile, 25 per second of sound; clips of 10 s, with padding of the last clip

First table: TP 8, PP 4, DP 80; encoders in the stages, or data-parallel: replicated, which exceeds
80 GB, or sharded over the best number of ranks. Second table, with a pack per GPU and step: that
pipeline, and one stage with fully sharded weights as in OrchMLLM.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from paper import print_table

from omnibal.base.errors import DoesNotFit
from omnibal.cost.analytic import model_flops
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.encoders import ClipsEncoder
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.units import feature_names
from omnibal.packing.features import pack_features

PARALLEL = Parallel(tensor=8, pipeline=4, data=80, sequence_parallel=True)
CLUSTERS = ("h100-80g", "h200-141g")
CLIP_S = 10
FRAMES_PER_SECOND = 100
LONGEST_RECORDING_S = 30.0
TOKENS_PER_TILE = 256
CAPS = Caps.of(tiles=64, clips=64, tokens=18_432)
MICRO_BATCHES = 8
PACKS_PER_STEP = 2_560
STEPS = 2.02  # sampled steps; packs are 99 % full, so this fills two
PLACEMENTS = {  # weight shardings of data-parallel encoders
    "in the stages": None,
    "data-parallel, whole": (WeightSharding.REPLICATED,),
    "data-parallel": tuple(WeightSharding),
}
SIZES = (  # in steps of a pack per GPU
    PARALLEL,
    Parallel(pipeline=1, data=2_560, sharded=2_560),
    Parallel(tensor=2, pipeline=1, data=1_280, sharded=1_280, sequence_parallel=True),
)
PLAN_COLUMNS = ("encoders", "divided over", "step s", "MFU", "peak GiB", "lost most")


def assumed_model(frames: int) -> ModelConfig:
    """Return the assumed model, with clips of `frames` frames."""
    base = load_model("internvl2.5-78b").with_tower(
        "vision", layers=48, hidden_size=4_096, heads=32, ffn_hidden_size=16_384
    )
    audio = ClipsEncoder(
        layers=32,
        hidden_size=1_920,
        heads=30,
        ffn_hidden_size=7_680,
        normalization="LayerNorm",
        qkv_bias=True,
        qk_norm=False,
        frames=frames,
        positions_per_token=2,
    )
    return base.model_copy(
        update={"name": "orch-84b", "encoders": {"vision": base.vision, "audio": audio}}
    )


def draw_mixture(samples: int) -> Lengths:
    """Return lengths of the assumed mixture, in random order."""
    rng = np.random.default_rng(0)
    kind = rng.choice(4, samples, p=[0.30, 0.25, 0.30, 0.15])
    recognition, spoken_question, image, text_only = (kind == number for number in range(4))

    def lognormal(median: float, sigma: float, low: float, high: float) -> np.ndarray:
        return np.clip(median * rng.lognormal(0, sigma, samples), low, high)

    seconds = np.where(recognition, lognormal(9, 0.6, 1, LONGEST_RECORDING_S), 0.0)
    seconds = np.where(spoken_question, lognormal(5, 0.5, 1, LONGEST_RECORDING_S), seconds)
    images = np.where(rng.random(samples) < 0.8, 1, rng.integers(2, 5, samples))
    tiles_of_image = rng.choice([1, 3, 5, 7, 10, 13], samples, p=[0.2, 0.1, 0.2, 0.25, 0.15, 0.1])
    text = np.select(
        [recognition, spoken_question, image, text_only],
        [
            20 + 3.3 * seconds * lognormal(1, 0.15, 0.5, 2),  # the transcript
            lognormal(250, 0.9, 16, 4_096),
            lognormal(200, 1.0, 16, 4_096),
            lognormal(700, 1.1, 16, 8_192),
        ],
    )
    audio = assumed_model(CLIP_S * FRAMES_PER_SECOND).encoders["audio"]
    tiles = np.where(image, images * tiles_of_image, 0)
    clips = np.ceil(seconds / CLIP_S).astype(np.int32)
    texts = np.round(text).astype(np.int32)
    tokens = texts + TOKENS_PER_TILE * tiles + clips * audio.tokens_per_item
    return Lengths(
        items={"tiles": tiles.astype(np.int32), "clips": clips},
        tokens=tokens.astype(np.int32),
        loss_tokens=texts,
        source=np.zeros(samples, np.int32),
        source_names=("mixture",),
    )


def rows_of_sizes() -> Iterator[list[str]]:
    """Yield rows of all parallel sizes, in steps of equally many packs."""
    mean = float(draw_mixture(PACKS_PER_STEP).tokens.mean())
    samples = int(STEPS * PACKS_PER_STEP * CAPS["tokens"] / mean)
    lengths = draw_mixture(samples)
    for parallel in SIZES:
        micro_batches = PACKS_PER_STEP // parallel.data
        for name in ("in the stages", "data-parallel"):
            shardings = PLACEMENTS[name]
            cells = plan_cells(lengths, CLUSTERS[0], shardings, parallel, micro_batches)
            yield [f"{parallel}", f"{micro_batches}", name, *cells]


def plan_cells(
    lengths: Lengths,
    cluster: str,
    shardings: tuple[WeightSharding, ...] | None,
    parallel: Parallel = PARALLEL,
    micro_batches: int = MICRO_BATCHES,
) -> tuple[str, ...]:
    """Return a plan's cells for `PLAN_COLUMNS`.

    Args:
        shardings: of data-parallel encoders, or None for encoders in the stages.

    Raises:
        DoesNotFit: no stages fit with the encoders.
    """
    job = JobSpec(
        model=assumed_model(CLIP_S * FRAMES_PER_SECOND),
        cluster=load_cluster(cluster),
        parallel=parallel,
        precision="bf16",
        placement=EncoderPlacement.DATA_PARALLEL if shardings else EncoderPlacement.PIPELINE,
        encoder_shardings=shardings or (WeightSharding.REPLICATED,),
    )
    data = SampleData(
        lengths=lengths,
        levels=(Level(caps=CAPS),),
        packs_per_step=parallel.data * micro_batches,
    )
    result = make_plan(PlanRequest(job=job, data=data))
    prediction = result.plan.known_prediction
    assert result.data is not None
    packs, _ = result.data
    features = pack_features(packs.packs, lengths, feature_names(job.model))
    flops = features @ model_flops(job.model, ())
    run_ms = prediction.step_ms * packs.steps
    peak = 1e9 * job.cluster.tflops("bf16") * parallel.world_size  # FLOPs per ms
    lost = prediction.lost.causes()
    largest = sorted(((ms, name) for name, ms in lost.items() if name != "ideal"), reverse=True)[:3]
    dp_encoders = result.plan.data_parallel_encoders
    return (
        "" if dp_encoders is None else f"{dp_encoders.sharded:,}",
        f"{1e-3 * prediction.step_ms:.2f}",
        f"{flops.sum() / (run_ms * peak):.1%}",
        f"{max(stage.memory.peak_gib for stage in prediction.stages):.1f}",
        ", ".join(f"{name} {1e-3 * ms:.2f} s" for ms, name in largest),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000, help="samples of the mixture")
    lengths = draw_mixture(parser.parse_args().samples)
    rows, refusals = [], []
    for cluster in CLUSTERS:
        for name, shardings in PLACEMENTS.items():
            try:
                cells = plan_cells(lengths, cluster, shardings)
            except DoesNotFit as error:
                refusals.append(f"{cluster}: {error.need}")
                cells = ("", "", "", "does not fit", "")
            rows.append([cluster, name, *cells])
    title = "Placements of the encoders, simulated"
    print_table(title, ("devices", *PLAN_COLUMNS), rows)
    for refusal in refusals:
        print(refusal)
    print_table(
        f"Steps of {PACKS_PER_STEP:,} packs, {CLUSTERS[0]}, simulated",
        ("sizes", "packs of a rank", *PLAN_COLUMNS),
        rows_of_sizes(),
    )


if __name__ == "__main__":
    main()
