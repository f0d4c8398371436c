"""Job specification, validated and costed: model, devices, parallel sizes, and unit costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from omnibal.base.errors import UserError
from omnibal.cost.analytic import kept_lines, layer_products
from omnibal.cost.context import costs_at
from omnibal.cost.encoder_phase_costs import EncodersCost, encoders_cost, pipeline_cost
from omnibal.cost.feed_forward import ROUTED
from omnibal.cost.host_waits import host_waits, with_host_waits
from omnibal.cost.model import CostModel, side_by_side
from omnibal.cost.profile import read_profile
from omnibal.cost.setting import CostSetting
from omnibal.cost.sharding_costs import ShardedExchange, exposed_columns, sharded_cost
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig, adapter_mistake
from omnibal.model.config import ClusterConfig, ModelConfig, Precision
from omnibal.model.data_parallel_encoders import (
    DataParallelEncoders,
    EncoderPlacement,
    encoder_shards,
)
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import memory_cap_gib
from omnibal.model.parallel import Parallel, WeightSharding, check_parallel
from omnibal.model.runtime import OWN_RUNTIME
from omnibal.model.targets import FREE, OWN, TrainerConstraints, trainer_of
from omnibal.model.units import LANGUAGE, feature_names_at, frozen_mistake, is_time, unit_names
from omnibal.packing.by_level import levels_of_packs
from omnibal.packing.features import pack_features, part_features, share_features, trained_features
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.shares import shares_of
from omnibal.packing.whole_samples import samples_of_shares
from omnibal.pipeline.encoder_waits import with_encoders
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.split_task import SplitTask, check_stage_rules
from omnibal.pipeline.stage_cost import model_ms
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.workload import Workload

_PLAN_FIELDS = (
    *("model", "precision", "parallel", "frozen", "adapters", "cluster"),
    "data_parallel_encoders",
)
"""Fields that a job and its plan share."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JobSpec:
    """A training job without its data: model, devices, parallel sizes and costs of all units."""

    model: ModelConfig
    cluster: ClusterConfig
    parallel: Parallel
    precision: Precision
    frozen: tuple[str, ...] = ()  # names of model parts, as in `model_parts`
    adapters: AdapterConfig | None = None  # trained with frozen base matrices
    cost_source: CostSource = ANALYTIC
    placement: EncoderPlacement = EncoderPlacement.PIPELINE
    data_parallel_encoders: DataParallelEncoders | None = None  # None if absent or not chosen yet
    encoder_shardings: tuple[WeightSharding, ...] = (WeightSharding.REPLICATED,)  # to search
    trainer: TrainerConstraints = OWN
    cost: CostModel = field(init=False, repr=False)  # costs of the stages' units
    encoders_costs: Mapping[int, EncodersCost] = field(init=False, repr=False)
    """Data-parallel encoders' costs by allowed sharding size, or empty if absent."""
    exchange: ShardedExchange | None = field(init=False, repr=False)
    """Collectives of sharded weights and gradients per pass, or None if replicated."""

    def __post_init__(self) -> None:
        mistake = frozen_mistake(self.model, self.frozen)
        mistake = mistake or adapter_mistake(self.model, self.frozen, self.adapters)
        if mistake is not None:
            raise UserError(mistake)
        if self.has_data_parallel_encoders and not self.model.encoders:
            raise UserError(
                f"{self.model.name} has no encoder to be data-parallel; give --encoder pipeline, "
                "or a model with encoders"
            )
        # Cheap checks first: counting costs takes seconds.
        trainer = self.trainer
        if self.has_data_parallel_encoders and trainer.stages != FREE:
            raise UserError(
                f"{trainer.title} has no data-parallel encoders: give --encoder pipeline, or "
                "leave --for out"
            )
        self.check_sizes(self.parallel)
        cost, exchange = with_host_waits(self._unit_costs()), None
        if self.parallel.sharded > 1:
            setting = self.cost_source.with_rates(self.cost_setting)
            names = unit_names(self.pipeline_model)
            has_one_loss = not self.model.language.prediction_layers
            cost, exchange = sharded_cost(cost, names, setting, has_one_loss=has_one_loss)
        encoders: dict[int, EncodersCost] = {}
        if self.has_data_parallel_encoders:
            encoders = {
                n: encoders_cost(self.cost_setting, self.cost_source, sharded=n)
                for n in self._encoder_shards()
            }
            # The search may still choose any sharding, so the bound is the fastest update.
            cost = pipeline_cost(cost, min(encoder.update_ms for encoder in encoders.values()))
        # The dataclass is frozen, so fields with init=False are set this way.
        object.__setattr__(self, "cost", cost)
        object.__setattr__(self, "encoders_costs", encoders)
        object.__setattr__(self, "exchange", exchange)

    def _encoder_shards(self) -> list[int]:
        """Return allowed sharding sizes of data-parallel encoders, in ranks. Raises UserError."""
        if self.data_parallel_encoders is not None:
            shards = [self.data_parallel_encoders.sharded]
        else:
            ways = self.encoder_shardings
            sizes = [encoder_shards(way, self.parallel, self.cluster) for way in ways]
            shards = list(dict.fromkeys(ranks for ranks in sizes if ranks is not None))
        if not shards:
            raise UserError(
                "data-parallel encoders are sharded within nodes, and the job's "
                f"{self.parallel.world_size} devices do not fill nodes of {self.cluster.name}: "
                "give --sharding full, or full nodes"
            )
        if self.precision == "fp8" and 1 not in shards:
            raise UserError(
                f"--precision fp8 excludes data-parallel encoders sharded over {shards[0]} ranks: "
                "leave it out, or give --sharding replicated"
            )
        return [1] if self.precision == "fp8" else shards

    def _unit_costs(self) -> CostModel:
        """Return unsharded costs of all units, with encoders as the trainer splits them."""
        setting = self.cost_setting
        cost = self.cost_source.costs(setting)
        is_divided = self.model.encoders and self.parallel.tensor > 1
        if not (is_divided and self.trainer.stages.encoders_whole):
            return cost
        # This trainer replicates encoders: all tensor-parallel ranks compute them from equal
        # inputs, so gradients need no all-reduce.
        alone = replace(setting, parallel=Parallel(pipeline=1), runtime=OWN_RUNTIME)
        undivided = self.cost_source.costs(alone).units
        encoders = {
            kind.name: undivided[kind.name] for kind in cost.kinds if kind.tower != LANGUAGE
        }
        return replace(cost, units=cost.units | encoders)

    def check_sizes(self, parallel: Parallel) -> None:
        """Raise UserError if model, cluster, precision or trainer do not support these sizes."""
        self.trainer.check_sizes(parallel)
        across, is_own = self.trainer.tensor_across_nodes, self.trainer.name is None
        options = {"tensor_across_nodes": across, "copies_gates": is_own}
        check_parallel(self.pipeline_model, parallel, self.cluster, **options)
        adapted = () if self.adapters is None else self.adapters.parts
        key_heads = self.model.language.kv_heads
        if is_own and LANGUAGE in adapted and parallel.tensor > key_heads:
            raise UserError(
                f"tensor size {parallel.tensor} exceeds the {key_heads} key-value heads, and "
                f"adapters of the language model need at least one per rank: choose a --tp of at "
                f"most {key_heads}"
            )
        check_stage_rules(self.pipeline_model, parallel.pipeline, self.trainer.stages)
        if self.precision != "fp8":
            return
        if not (is_own or self.trainer.runtime.transformer_engine):
            raise UserError(
                f"--precision fp8 needs Transformer Engine, which {self.trainer.title} does not "
                "use: plan in bf16"
            )
        if parallel.sharded > 1:
            raise UserError(
                "--precision fp8 excludes sharded weights: leave it out, or give --sharding "
                "replicated"
            )
        # Raises for products with sizes that FP8 does not support.
        layer_products(self.model, parallel, self.precision)

    def split_obstacle(self, schedule: PipelineSchedule) -> str | None:
        """Return why this project's trainer cannot split the schedule's backwards, or None."""
        if self.trainer.name is not None or not schedule.in_two:
            return None
        if self.parallel.sharded > 1:
            return "sharded weights reduce their gradients after every complete backward"
        if self.precision == "fp8":
            return "FP8 products compute weight gradients together with input gradients"
        return None

    @property
    def cost_setting(self) -> CostSetting:
        sizes = self.model, self.cluster, self.parallel, self.precision
        return CostSetting(*sizes, self.frozen, self.adapters, self.trainer.runtime)

    @property
    def has_data_parallel_encoders(self) -> bool:
        return self.placement is EncoderPlacement.DATA_PARALLEL

    @property
    def pipeline_model(self) -> ModelConfig:
        return self.model.without_encoders() if self.has_data_parallel_encoders else self.model

    @property
    def rank_slowness(self) -> np.ndarray | None:
        """Relative time of ranks' slowest devices, [data], or None if equal or all wait."""
        # Ranks in lockstep or with shared encoders wait for the slowest: fewer packs gain nothing.
        slow = np.array(self.cost.slow_ranks)
        waits = self.parallel.lockstep_ranks > 1 or self.has_data_parallel_encoders
        return None if len(slow) != self.parallel.data or waits else slow.max(axis=1)

    def with_exposed(self, features: np.ndarray) -> np.ndarray:
        """Return features [..., F] with host waits and exposed collectives of shards, in ms."""
        features = host_waits(self.cost, features)  # a copy
        if self.exchange is None:
            return features
        columns = exposed_columns(self.cost.features)
        exposed_ms = self.exchange.exposed_ms(features[..., : columns[0]].reshape(-1, columns[0]))
        features[..., columns] = exposed_ms.reshape(*features.shape[:-1], len(columns))
        return features

    def costs_at(self, levels: Sequence[Level]) -> tuple[CostModel, ...]:
        """Return unit costs per level with context exchanges, at measured rates if any."""
        return costs_at(self.cost, self.cost_setting, levels, self.cost_source)

    def cost_of_all(self, levels: Sequence[Level]) -> CostModel:
        """Return unit costs of all levels side by side, for predictions and checks."""
        return side_by_side(self.costs_at(levels))

    def split_task(
        self,
        workload: Workload,
        levels: Sequence[Level],
        schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD,
    ) -> SplitTask:
        """Return the search for stages of the job's pipeline."""
        limits = self.parallel.pipeline, self.memory_cap_gib * GIB, self.trainer.stages
        cost, model = self.cost_of_all(levels), self.pipeline_model
        return SplitTask(cost, model, workload, *limits, schedule)

    def workload(
        self, packs: ScheduledPacks, lengths: Lengths, levels: Sequence[Level]
    ) -> Workload:
        """Return features of every micro-batch of the packs, with waits for host and encoders."""
        shares = shares_of(packs, levels)
        names = feature_names_at(self.cost.features, levels)
        features = share_features(packs, lengths, levels, names, shares)
        whole_loss = self.trainer.stages.head_on_all_tokens
        unpadded = trained_features(features, names, padded=False, whole_loss=whole_loss)
        if self.trainer.packs.padded.applies(self.parallel.pipeline):
            padded = trained_features(features, names, padded=True, whole_loss=whole_loss)
            workload = Workload.build(shares, padded, self.parallel.data, unpadded)
        else:
            workload = Workload.build(shares, unpadded, self.parallel.data)
        if self.has_data_parallel_encoders:
            samples = samples_of_shares(self.model, packs, lengths, levels, shares)
            workload = replace(workload, samples=samples)
        workload = workload.in_groups_of(self.parallel.lockstep_ranks)
        features, without_padding = self.with_exposed(workload.features), workload.unpadded
        if without_padding is not None:  # waits are the same without padding
            columns = np.flatnonzero(list(map(is_time, self.cost.features)))
            without_padding = without_padding.copy()
            without_padding[:, columns] = features[:, columns]
        workload = replace(workload, features=features, unpadded=without_padding)
        encoders = self.data_parallel_encoders
        if encoders is None:
            return workload
        return with_encoders(workload, names, self.encoders_costs[encoders.sharded], encoders)

    @classmethod
    def of_plan(cls, plan: Plan, cost_source: CostSource = ANALYTIC) -> Self:
        """Return the job that a plan is for, with costs from `cost_source`."""
        encoders = plan.data_parallel_encoders
        return cls(
            **{name: getattr(plan, name) for name in _PLAN_FIELDS},
            cost_source=cost_source,
            placement=EncoderPlacement.DATA_PARALLEL if encoders else EncoderPlacement.PIPELINE,
            trainer=trainer_of(plan.made_for),
        )

    def plan(self, **fields: Any) -> Plan:
        """Return a plan of this job with `fields` as its other fields."""
        settings = {name: getattr(self, name) for name in _PLAN_FIELDS}
        return Plan(**settings | {"made_for": self.trainer.name} | fields)

    def allows(self, parallel: Parallel) -> bool:
        """Whether the job and its costs support these parallel sizes."""
        if self.cost_source.tensor not in (None, parallel.tensor):
            return False
        try:
            self.check_sizes(parallel)
        except UserError:
            return False
        return True

    def with_sizes(self, parallel: Parallel, placement: EncoderPlacement | None = None) -> Self:
        """Return the job with other parallel sizes, and if given another encoder placement."""
        placement = self.placement if placement is None else placement
        if (parallel, placement) == (self.parallel, self.placement):
            return self  # keeps its costs, which take seconds to count
        return replace(self, parallel=parallel, placement=placement)

    @property
    def memory_cap_gib(self) -> float:
        """Usable memory per device, in GiB."""
        return memory_cap_gib(self.cluster)

    def load_ms(self, packs: Packs, lengths: Lengths) -> np.ndarray:
        """Return predicted ms of every pack, on one rank, summed over stages, [packs]."""
        features = pack_features(packs, lengths, self.cost.features)
        return model_ms(self.cost, self.pipeline_model, features)

    def load_at_ms(self, packs: Packs, lengths: Lengths, levels: Sequence[Level]) -> np.ndarray:
        """Return predicted ms of packs, summed over stages, max over context ranks, [packs]."""
        if are_plain(levels):
            return self.load_ms(packs, lengths)
        level_of_pack, load = levels_of_packs(packs, lengths, levels), np.empty(len(packs))
        costs = self.costs_at(levels)
        for index, (level, cost) in enumerate(zip(levels, costs, strict=True)):
            rows = np.flatnonzero(level_of_pack == index)
            if len(rows):
                # [packs, context, features]
                parts = part_features(packs.take(rows), lengths, level, cost.features)
                load[rows] = model_ms(cost, self.pipeline_model, parts).max(axis=1)
        return load

    def routed_bytes(self, features: np.ndarray) -> dict[str, float]:
        """Return bytes of routed rows kept of a micro-batch by unit name. Empty without EP."""
        if self.parallel.expert == 1:
            return {}
        kept = kept_lines(self.pipeline_model, self.parallel, self.precision)
        return {
            name: float(tensor.bytes @ features[: len(tensor.bytes)])
            for name, tensors in kept.items()
            for tensor in tensors
            if tensor.what == ROUTED
        }


def costs_and_sizes(
    profile: Path | None, parallel: Parallel | None, trainer: TrainerConstraints
) -> tuple[CostSource, Parallel]:
    """Return costs, counted or of a profile, and sizes: default PP 1 and TP as profiled, or 1."""
    source = CostSource(None if profile is None else read_profile(profile))
    sizes = parallel or Parallel(tensor=source.tensor or 1, pipeline=1)
    return source, trainer.with_default_sharding(sizes)
