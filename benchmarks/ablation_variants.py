"""Plans of the OmniBal paper's ablation (arXiv 2407.20761, Table 7): five for the same samples.

From common practice to full balance. All have about the same number of samples per step, the first
two in the same random order. Costs are measured if there is a profile.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

import numpy as np

from omnibal.cost.model import CostModel, UnitCost
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
from omnibal.packing.features import pack_features
from omnibal.packing.fit import check_samples_fit
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import shares_of
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule, SplitRule, baseline_stages
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.predict import predict
from omnibal.pipeline.split_task import SplitTask
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from tools.make_lengths import make_lengths  # noqa: E402

MODEL_FILE = REPOSITORY / "benchmarks" / "ablation_model.toml"
WIDE_MODEL_FILE = REPOSITORY / "benchmarks" / "ablation_wide_model.toml"
PUBLISHED = REPOSITORY.parent / "shared" / "data" / "lengths"
PUBLISHED_FILES = ("ai2d_train_12k_wh.json", "docvqa_train_10k_wh.json")
PUBLISHED_TOKENS_PER_TILE = 256
MIN_TEXT_TOKENS = 2
SYNTHETIC_SAMPLES = 22_624  # as in the published files
SAMPLES_PER_BATCH = 4  # samples of an unpacked micro-batch
LAYERS = ("vision_layer", "language_layer")


class Variant(StrEnum):
    """Rows of the table; each improves on the row before."""

    # Random micro-batches padded to the longest sample, equal parameters per stage, all recomputed.
    COMMON = "common practice"
    CAREFUL = "careful practice"  # global batches packed by tokens, equal layers per stage
    DATA = "+ data"  # this project's balanced packs
    MODEL = "+ model"  # the fastest split, with all layers recomputed
    MEMORY = "+ memory"  # split and recomputation searched together, under the memory cap


UNBALANCED = (Variant.COMMON, Variant.CAREFUL)  # steps have equally many samples, not packs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AblationJob:
    """Settings of all variants."""

    model: ModelConfig
    parallel: Parallel
    cluster: ClusterConfig
    caps: Caps  # of packs; careful practice limits only tokens, common practice nothing
    samples_per_step: int  # of all ranks; approximate with balanced packs
    lengths: Lengths
    seed: int
    cost_source: CostSource = ANALYTIC
    precision: Precision = "fp32"

    @property
    def spec(self) -> JobSpec:
        return JobSpec(
            model=self.model,
            cluster=self.cluster,
            parallel=self.parallel,
            precision=self.precision,
            cost_source=self.cost_source,
        )

    @property
    def cost(self) -> CostModel:
        return self.spec.cost

    @property
    def cap_bytes(self) -> float:
        return memory_cap_gib(self.cluster) * GIB


def make_variant(job: AblationJob, variant: Variant) -> PlanResult:
    """Return a variant's plan of one epoch, valid for `check_plan`.

    Raises:
        UserError: a sample exceeds the caps, the parallel sizes do not fit the model, or the
            variant does not fit the memory cap.
    """
    check_samples_fit(job.lengths, job.caps)
    match variant:
        case Variant.COMMON:
            steps = [split_in_fours(samples) for samples in random_steps(job)]
            packs = deal_in_turn(steps, job.lengths, job.parallel.data)
            # Costs, sums and caps are of computed tokens, including padding.
            lengths = padded_lengths(packs.packs, job.lengths)
            return _unbalanced_plan(job, packs, lengths, PartitionMethod.PARAMETER)
        case Variant.CAREFUL:
            steps = [first_fit(samples, job.lengths, job.caps) for samples in random_steps(job)]
            packs = deal_in_turn(steps, job.lengths, job.parallel.data)
            return _unbalanced_plan(job, packs, job.lengths, PartitionMethod.LAYER)
        case Variant.DATA:
            rule = SplitRule(method=PartitionMethod.LAYER, recompute=RecomputeRule.FULL)
            return make_plan(_balanced_request(job, rule))
        case Variant.MODEL:
            # Not from DATA: its split may exceed the cap although this one fits.
            return _search_split(job, make_variant(job, Variant.MEMORY))
        case Variant.MEMORY:
            return make_plan(_balanced_request(job, SplitRule()))


def random_steps(job: AblationJob) -> list[np.ndarray]:
    """Return the samples of every step in random order; the last step may be smaller."""
    order = np.random.default_rng(job.seed).permutation(len(job.lengths))
    return np.split(order, range(job.samples_per_step, len(order), job.samples_per_step))


def split_in_fours(samples: np.ndarray) -> list[np.ndarray]:
    """Return micro-batches in the given order; the last may be smaller."""
    return np.split(samples, range(SAMPLES_PER_BATCH, len(samples), SAMPLES_PER_BATCH))


def first_fit(samples: np.ndarray, lengths: Lengths, caps: Caps) -> list[np.ndarray]:
    """Return packs by first fit of tokens, in the given order."""
    packs: list[list[int]] = []
    free: list[int] = []  # tokens by pack
    for sample, tokens in zip(samples.tolist(), lengths.tokens[samples].tolist(), strict=True):
        place = next((pack for pack, left in enumerate(free) if left >= tokens), len(free))
        if place == len(free):
            packs.append([])
            free.append(caps["tokens"])
        packs[place].append(sample)
        free[place] -= tokens
    return [np.array(pack) for pack in packs]


def deal_in_turn(
    steps: Sequence[Sequence[np.ndarray]], lengths: Lengths, dp: int
) -> ScheduledPacks:
    """Deal the micro-batches of every step to ranks in turn."""
    counts = np.array([len(packs) for packs in steps])
    step = np.repeat(np.arange(len(steps)), counts)
    place = np.arange(len(step)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the step
    packs = Packs.from_lists([pack for packs in steps for pack in packs])
    return ScheduledPacks.from_packs(packs, lengths, step, place % dp, place // dp)


def padded_lengths(packs: Packs, lengths: Lengths) -> Lengths:
    """Return lengths with every sample padded to its pack's longest."""
    tokens = np.empty_like(lengths.tokens)
    longest = np.maximum.reduceat(lengths.tokens[packs.samples], packs.offsets[:-1])
    tokens[packs.samples] = np.repeat(longest, np.diff(packs.offsets))
    return replace(lengths, tokens=tokens)


def recomputing_cost(cost: CostModel) -> CostModel:
    """Return a cost model with every layer recomputed."""

    def recompute(unit: UnitCost) -> UnitCost:
        return replace(
            unit,
            backward_ms=unit.backward_ms + unit.recompute_ms,
            activation_bytes=unit.boundary_bytes,
            transient_bytes=unit.transient_bytes + unit.activation_bytes - unit.boundary_bytes,
        )

    return replace(cost, units=cost.units | {u: recompute(cost.units[u]) for u in LAYERS})


def _unbalanced_plan(
    job: AblationJob, packs: ScheduledPacks, lengths: Lengths, method: PartitionMethod
) -> PlanResult:
    """Return a plan of packs with a baseline's stages, every layer recomputed."""
    packs = replace(packs, tokens=packs.packs.sums(lengths.tokens).astype(np.int32))
    model = model_of_lengths(job.model, lengths)
    cost = job.cost
    features = pack_features(packs.packs, lengths, cost.features)
    workload = Workload.build(shares_of(packs, [Level(caps=job.caps)]), features, job.parallel.data)
    task = SplitTask(cost, model, workload, job.parallel.pipeline, job.cap_bytes)
    stages = baseline_stages(SplitRule(method=method, recompute=RecomputeRule.FULL), task)
    plan = Plan(
        model=model,
        precision=job.precision,
        parallel=job.parallel,
        stages=stages,
        cluster=job.cluster,
        data=_data_plan(job, packs, lengths),
        prediction=predict(cost, job.parallel, [stages], packs, workload),
    )
    return PlanResult(plan=plan, data=(packs, lengths), cost_source=job.cost_source, search=None)


def _data_plan(job: AblationJob, packs: ScheduledPacks, lengths: Lengths) -> DataPlan:
    # No caps limit these packs: give the max of all.
    tiles = max(int(packs.column("tiles").max()), 1)
    return describe_data(
        packs,
        lengths,
        caps=Caps.of(tiles=tiles, tokens=int(packs.tokens.max())),
        method="other",
        seed=job.seed,
        epochs=1,
        packs_per_step=int(np.bincount(packs.step).max()),
        micro_batches_per_step=int(packs.slot.max()) + 1,
    )


def _balanced_request(job: AblationJob, split: SplitRule) -> PlanRequest:
    """Return the request for a plan of about `samples_per_step` samples in equally many packs."""
    ranks = job.parallel.data
    spec = job.spec
    data = SampleData(
        settings=PackSettings(seed=job.seed),
        lengths=job.lengths,
        levels=(Level(caps=job.caps),),
        packs_per_step=ranks,
    )
    # The number of packs does not depend on packs per step, so one per rank will do.
    (packs,) = data.pack(spec)
    packs_per_rank = job.samples_per_step * len(packs) / len(job.lengths) / ranks
    sized = replace(data, packs_per_step=max(round(packs_per_rank), 1) * ranks)
    return PlanRequest(job=spec, data=sized, split=split)


def _search_split(job: AblationJob, balanced: PlanResult) -> PlanResult:
    """Return the plan of the same packs on the fastest split with every layer recomputed."""
    assert balanced.data is not None
    (packs, lengths), model, cost = balanced.data, balanced.plan.model, job.cost
    features = pack_features(packs.packs, lengths, cost.features)
    workload = Workload.build(shares_of(packs, [Level(caps=job.caps)]), features, job.parallel.data)
    pipeline, again = job.parallel.pipeline, recomputing_cost(cost)
    search = search_stages(SplitTask(again, model, workload, pipeline, job.cap_bytes))
    cuts = list(accumulate(sum(map(len, stage.units)) for stage in search.stages[:-1]))
    layers = [(len(s.layers("vision")), len(s.layers("language"))) for s in search.stages]
    stages = stages_from_cuts(model, cuts, layers)  # the found stages, all layers recomputed
    prediction = predict(cost, job.parallel, [stages], packs, workload)
    plan = balanced.plan.model_copy(update={"stages": stages, "prediction": prediction})
    return replace(balanced, plan=plan, search=replace(search, stages_at=(stages,)))


def full_steps(result: PlanResult, variant: Variant) -> np.ndarray:
    """Return the numbers of full steps. int64 [steps]"""
    assert result.data is not None and result.plan.data is not None
    packs, _ = result.data
    if variant in UNBALANCED:
        samples = np.bincount(packs.step, weights=np.diff(packs.packs.offsets))
        return np.flatnonzero(samples == samples[0])
    return np.flatnonzero(np.bincount(packs.step) == result.plan.data.packs_per_step)


def real_lengths(published: Path, model: ModelConfig) -> Lengths:
    """Return tiles and texts of the files in `published`, scaled to a model with smaller tiles.

    Synthetic lengths if the files are missing.
    """
    paths = [published / name for name in PUBLISHED_FILES]
    if all(path.is_file() for path in paths):
        lengths = read_lengths(paths)
    else:
        print(f"{published}: does not hold {' and '.join(PUBLISHED_FILES)}; synthetic lengths")
        lengths = make_lengths("internvl", SYNTHETIC_SAMPLES, seed=0)
    scale = PUBLISHED_TOKENS_PER_TILE // model.vision.tokens_per_item
    text = -(-(lengths.tokens - PUBLISHED_TOKENS_PER_TILE * lengths.column("tiles")) // scale)
    text = np.maximum(text, MIN_TEXT_TOKENS)
    # The files do not have loss tokens: take half of the text.
    return replace(
        lengths,
        tokens=(lengths.column("tiles") * model.vision.tokens_per_item + text).astype(np.int32),
        loss_tokens=np.maximum(text // 2, 1).astype(np.int32),
    )
