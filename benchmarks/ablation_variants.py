"""The OmniBal paper's ablation (arXiv 2407.20761, Table 7): five plans of the same samples.

From what is usual to everything balanced, one step at a time. All train the same samples, about as
many in a step; the first two in the same random order. A plan is made from measured costs where
there is a profile, and can be trained where its lengths are a scan of data.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

import numpy as np

from omnibal.cost.model import CostModel, UnitCost, pack_features
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import DataPlan, Plan
from omnibal.job.plan_data import SampleData, describe_data, model_of_lengths
from omnibal.job.planner import PlanRequest, PlanResult, make_plan
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.levels import Level
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel
from omnibal.packing.fit import check_samples_fit
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule, SplitRule, baseline_stages
from omnibal.pipeline.partition import SearchResult, search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload
from omnibal.steps.pack_settings import PackSettings
from omnibal.steps.shares import shares_of

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from tools.make_lengths import make_lengths  # noqa: E402

MODEL_FILE = REPOSITORY / "benchmarks" / "ablation_model.toml"
WIDE_MODEL_FILE = REPOSITORY / "benchmarks" / "ablation_wide_model.toml"
PUBLISHED = REPOSITORY.parent / "shared" / "data" / "lengths"
PUBLISHED_FILES = ("ai2d_train_12k_wh.json", "docvqa_train_10k_wh.json")
PUBLISHED_TOKENS_PER_TILE = 256
LEAST_TEXT_TOKENS = 2
SYNTHETIC_SAMPLES = 22_624
"""As many as the published files have."""
SAMPLES_PER_BATCH = 4
"""Of a micro-batch that is not packed."""
LAYERS = ("vision_layer", "language_layer")


class Variant(StrEnum):
    """Rows of the table; from one to the next something is done better."""

    COMMON = "common practice"
    """Random micro-batches padded to the longest sample, stages of equal parameters, every layer
    recomputed."""
    CAREFUL = "careful practice"
    """Each global batch packed by tokens alone, stages of equally many layers."""
    DATA = "+ data"
    """This project's balanced packs."""
    MODEL = "+ model"
    """The split of least step time, every layer recomputed as before."""
    MEMORY = "+ memory"
    """Split and recomputed layers searched together, under the memory cap."""


PLAIN = (Variant.COMMON, Variant.CAREFUL)
"""Those whose steps are equally many samples, and not equally many packs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AblationJob:
    """What all variants have in common."""

    model: ModelConfig
    parallel: Parallel
    cluster: ClusterConfig
    """Its memory holds every variant."""
    caps: Caps
    """Of packs; the careful practice keeps to max_tokens alone, the common one to neither."""
    samples_per_step: int
    """Of all ranks together; balanced packs come as near to it as whole packs can."""
    lengths: Lengths
    seed: int
    cost_source: CostSource = ANALYTIC
    precision: Precision = "fp32"

    @property
    def spec(self) -> JobSpec:
        """The job as the planner takes it."""
        return JobSpec(
            model=self.model,
            cluster=self.cluster,
            parallel=self.parallel,
            precision=self.precision,
            cost_source=self.cost_source,
        )

    @property
    def cost(self) -> CostModel:
        """Of every unit of the model."""
        return self.spec.cost

    @property
    def cap_bytes(self) -> float:
        return memory_cap_gib(self.cluster) * GIB


def make_variant(job: AblationJob, variant: Variant) -> PlanResult:
    """One epoch of the job as the variant trains it; `check_plan` passes on what is saved of it.

    The common practice's lengths are padded ones: each sample has the tokens of the longest of its
    micro-batch, so that costs, sums and caps are those of what is computed.

    Raises:
        UserError: a sample exceeds the caps, the parallel sizes do not fit the model, or the
            variant does not fit the memory cap.
    """
    check_samples_fit(job.lengths, job.caps)
    match variant:
        case Variant.COMMON:
            steps = [fours(samples) for samples in random_steps(job)]
            packs = deal_in_turn(steps, job.lengths, job.parallel.data)
            lengths = padded_lengths(packs.packs, job.lengths)
            return _plain_plan(job, packs, lengths, PartitionMethod.PARAMETER)
        case Variant.CAREFUL:
            steps = [first_fit(samples, job.lengths, job.caps) for samples in random_steps(job)]
            packs = deal_in_turn(steps, job.lengths, job.parallel.data)
            return _plain_plan(job, packs, job.lengths, PartitionMethod.LAYER)
        case Variant.DATA:
            rule = SplitRule(method=PartitionMethod.LAYER, recompute=RecomputeRule.FULL)
            return make_plan(_balanced(job, rule))
        case Variant.MODEL:
            # Not from DATA, whose split may not fit where this one does.
            return _searched_split(job, make_variant(job, Variant.MEMORY))
        case Variant.MEMORY:
            return make_plan(_balanced(job, SplitRule()))


def random_steps(job: AblationJob) -> list[np.ndarray]:
    """Samples of every step in random order; the last step takes what is left."""
    order = np.random.default_rng(job.seed).permutation(len(job.lengths))
    return np.split(order, range(job.samples_per_step, len(order), job.samples_per_step))


def fours(samples: np.ndarray) -> list[np.ndarray]:
    """Micro-batches in the order given; the last one may be smaller."""
    return np.split(samples, range(SAMPLES_PER_BATCH, len(samples), SAMPLES_PER_BATCH))


def first_fit(samples: np.ndarray, lengths: Lengths, caps: Caps) -> list[np.ndarray]:
    """Each sample in turn goes into the first pack that has room for its tokens."""
    packs: list[list[int]] = []
    room: list[int] = []
    for sample, tokens in zip(samples.tolist(), lengths.tokens[samples].tolist(), strict=True):
        place = next((pack for pack, free in enumerate(room) if free >= tokens), len(room))
        if place == len(room):
            packs.append([])
            room.append(caps["tokens"])
        packs[place].append(sample)
        room[place] -= tokens
    return [np.array(pack) for pack in packs]


def deal_in_turn(
    steps: Sequence[Sequence[np.ndarray]], lengths: Lengths, dp: int
) -> ScheduledPacks:
    """One epoch: the micro-batches of every step go round the ranks in the order drawn."""
    in_step = np.array([len(drawn) for drawn in steps])
    step = np.repeat(np.arange(len(steps)), in_step)
    place = np.arange(len(step)) - np.repeat(np.cumsum(in_step) - in_step, in_step)
    packs = Packs.from_lists([pack for drawn in steps for pack in drawn])
    return ScheduledPacks.of(packs, lengths, step, place % dp, place // dp)


def padded_lengths(packs: Packs, lengths: Lengths) -> Lengths:
    """The lengths with each sample as long as the longest of its pack; each is in one pack."""
    tokens = np.empty_like(lengths.tokens)
    longest = np.maximum.reduceat(lengths.tokens[packs.samples], packs.offsets[:-1])
    tokens[packs.samples] = np.repeat(longest, np.diff(packs.offsets))
    return replace(lengths, tokens=tokens)


def recomputing_cost(cost: CostModel) -> CostModel:
    """The cost of a model that recomputes every layer, whatever a plan says."""
    again = {unit: _recomputed(cost.units[unit]) for unit in LAYERS}
    return replace(cost, units=cost.units | again)


def _recomputed(unit: UnitCost) -> UnitCost:
    return replace(
        unit,
        backward_ms=unit.backward_ms + unit.recompute_ms,
        activation_bytes=unit.boundary_bytes,
        transient_bytes=unit.transient_bytes + unit.activation_bytes - unit.boundary_bytes,
    )


def _plain_plan(
    job: AblationJob,
    packs: ScheduledPacks,
    lengths: Lengths,
    method: PartitionMethod,
) -> PlanResult:
    """The plan of given packs, with the stages of another method and every layer recomputed."""
    packs = replace(packs, tokens=packs.packs.sums(lengths.tokens).astype(np.int32))
    model = model_of_lengths(job.model, lengths)
    cost = job.cost
    features = pack_features(packs.packs, lengths, cost.features)
    workload = Workload.build(shares_of(packs, [Level(caps=job.caps)]), features, job.parallel.data)
    stages = baseline_stages(
        method,
        RecomputeRule.FULL,
        cost,
        model,
        workload,
        job.parallel.pipeline,
        job.cap_bytes,
    )
    plan = Plan(
        model=model,
        precision=job.precision,
        parallel=job.parallel,
        stages=stages,
        cluster=job.cluster,
        data=_data_plan(job, packs, lengths),
        prediction=predict(cost, model, job.parallel, [stages], packs, workload),
    )
    return PlanResult(plan=plan, data=(packs, lengths), cost_source=job.cost_source, search=None)


def _data_plan(job: AblationJob, packs: ScheduledPacks, lengths: Lengths) -> DataPlan:
    """Caps are the largest that occur: nothing else bounds these packs."""
    return describe_data(
        packs,
        lengths,
        caps=Caps.of(
            tiles=max(int(packs.column("tiles").max()), 1), tokens=int(packs.tokens.max())
        ),
        method="other",
        seed=job.seed,
        epochs=1,
        packs_per_step=int(np.bincount(packs.step).max()),
        micro_batches_per_step=int(packs.slot.max()) + 1,
    )


def _balanced(job: AblationJob, split: SplitRule) -> PlanRequest:
    """The product's plan, its steps as near to `samples_per_step` as equally many packs can be."""
    ranks = job.parallel.data
    spec = job.spec
    data = SampleData(
        settings=PackSettings(seed=job.seed),
        lengths=job.lengths,
        levels=(Level(caps=job.caps),),
        packs_per_step=ranks,
    )
    # How many there are does not depend on the packs of a step.
    (packs,) = data.pack(spec)
    of_a_rank = job.samples_per_step * len(packs) / len(job.lengths) / ranks
    sized = replace(data, packs_per_step=max(round(of_a_rank), 1) * ranks)
    return PlanRequest(job=spec, data=sized, split=split)


def _searched_split(job: AblationJob, balanced: PlanResult) -> PlanResult:
    """The same packs on the split that the search finds where every layer is recomputed."""
    assert balanced.data is not None
    (packs, lengths), model, cost = balanced.data, balanced.plan.model, job.cost
    features = pack_features(packs.packs, lengths, cost.features)
    workload = Workload.build(shares_of(packs, [Level(caps=job.caps)]), features, job.parallel.data)
    found = search_stages(
        recomputing_cost(cost), model, workload, job.parallel.pipeline, job.cap_bytes
    )
    stages = _all_recomputed(model, found)
    prediction = predict(cost, model, job.parallel, [stages], packs, workload)
    plan = balanced.plan.model_copy(update={"stages": stages, "prediction": prediction})
    return replace(balanced, plan=plan, search=replace(found, stages_at=(stages,)))


def _all_recomputed(model: ModelConfig, found: SearchResult) -> tuple[Stage, ...]:
    cuts = list(accumulate(stage.size for stage in found.stages[:-1]))
    layers = [
        (len(stage.layers("vision")), len(stage.layers("language"))) for stage in found.stages
    ]
    return stages_from_cuts(model, cuts, layers)


def full_steps(result: PlanResult, variant: Variant) -> np.ndarray:
    """Numbers of the steps that have what every step of the epoch but one has. int64 [steps]"""
    assert result.data is not None and result.plan.data is not None
    packs, _ = result.data
    if variant in PLAIN:
        samples = np.bincount(packs.step, weights=np.diff(packs.packs.offsets))
        return np.flatnonzero(samples == samples[0])
    return np.flatnonzero(np.bincount(packs.step) == result.plan.data.packs_per_step)


def real_lengths(published: Path, model: ModelConfig) -> Lengths:
    """Tiles and texts of the two published files, in tokens of a model with smaller tiles.

    Half of a text carries loss: the files do not say. Without them, and saying so, a synthetic
    mixture is scaled alike.

    Args:
        published: folder of the files.
    """
    paths = [published / name for name in PUBLISHED_FILES]
    if all(path.is_file() for path in paths):
        lengths = read_lengths(paths)
    else:
        print(f"{published}: does not hold {' and '.join(PUBLISHED_FILES)}; synthetic lengths")
        lengths = make_lengths("internvl", SYNTHETIC_SAMPLES, seed=0)
    scale = PUBLISHED_TOKENS_PER_TILE // model.vision.tokens_per_item
    text = -(-(lengths.tokens - PUBLISHED_TOKENS_PER_TILE * lengths.column("tiles")) // scale)
    text = np.maximum(text, LEAST_TEXT_TOKENS)
    return replace(
        lengths,
        tokens=(lengths.column("tiles") * model.vision.tokens_per_item + text).astype(np.int32),
        loss_tokens=np.maximum(text // 2, 1).astype(np.int32),
    )
