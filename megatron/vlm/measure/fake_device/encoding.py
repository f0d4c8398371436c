"""Data-parallel encoders on a fake device: a worst case of a plan's steps.

It has the encoding of the rank and step with most, the features of the pipeline that receives most,
and the stage's own micro-batches.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.encoder_share import (
    EncoderPass,
    EncodingRanks,
    FeatureRoute,
    StepShares,
    rows_of_item,
)
from megatron.vlm.inputs.pack_share import samples_of_items
from megatron.vlm.measure.random_batches import image_sizes, random_batch
from megatron.vlm.measure.stage_replay import EncodingWork
from megatron.vlm.run.loop import encoder_shares
from omnibal.cost.encoder_phase_costs import ITEM
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.encoders import ImagesEncoder
from omnibal.model.units import feature_names_at
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.encoder_waits import ItemShares
from omnibal.pipeline.unit_runs import encoders_stage
from omnibal.pipeline.workload import Workload


@dataclass(frozen=True, kw_only=True)
class HeaviestShares(StepShares):
    """Shares of one step and rank, with the features that another step and rank receive."""

    receiving: StepShares
    window: Mapping[str, np.ndarray]  # items of each micro-batch, by encoder

    @property
    def embeds_tokens(self) -> bool:
        return self.receiving.embeds_tokens

    @cached_property
    def route(self) -> FeatureRoute:
        arriving = self.receiving.route
        return replace(
            super().route,
            received_slices=arriving.received_slices,
            received=arriving.received,
            parts=arriving.parts,
        )

    def select_encoders(self, names: Collection[str]) -> Self:
        window = {name: items for name, items in self.window.items() if name in names}
        changed = replace(self, receiving=self.receiving.select_encoders(names), window=window)
        return StepShares.select_encoders(changed, names)

    def slices(self, micro_batches: int = 0) -> list[dict[str, slice]]:
        """Return slices of received rows by encoder: every micro-batch's, then the remainder."""
        start, slices = 0, []
        for place in range(micro_batches):
            pack_slices = {}
            for name, items in self.window.items():
                end = start + int(items[place]) * rows_of_item(self.encoders[name])
                pack_slices[name] = slice(start, end)
                start = end
            slices.append(pack_slices)
        for name in list(self.window)[:1]:
            slices.append({name: slice(start, sum(self.receiving.route.parts))})
        return slices


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeaviestEncoding:
    """Steps and ranks of a plan with most encoding and with most received features."""

    plan: Plan
    packs: ScheduledPacks
    lengths: Lengths
    encodes: tuple[int, int]  # step and global rank with most encoding
    receives: tuple[int, int]  # step and data-parallel rank with most received features

    @classmethod
    def find(
        cls, plan: Plan, job: JobSpec, packs: ScheduledPacks, lengths: Lengths, workload: Workload
    ) -> "HeaviestEncoding | None":
        """Return the maxima in bytes kept and received, or None without data-parallel encoders."""
        dp_encoders = plan.data_parallel_encoders
        if dp_encoders is None:
            return None
        cost = job.encoders_costs[dp_encoders.sharded]
        names = feature_names_at(job.cost.features, plan.pack_levels)
        shares = ItemShares.build(workload, names, cost, dp_encoders)
        blocks = plan.parallel.data // shares.pipelines
        # Bytes kept by ranks and received by pipelines, [steps * blocks, ranks or pipelines].
        encoded, received = np.zeros(1), np.zeros(1)
        for name, encoder in cost.encoders.items():
            encoded = encoded + encoder.feature_bytes * shares.encoded[name]
            if name in shares.samples:
                passes = shares.passes(name, dp_encoders)
                # Passes that run again in backward keep their inputs only.
                repeated = passes.work(is_kept=False)[..., ITEM]
                encoded = encoded + passes.kept_bytes(encoder) + encoder.input_bytes * repeated
            else:
                item_bytes = encoder.kept_bytes[ITEM] + encoder.input_bytes
                encoded = encoded + item_bytes * shares.encoded[name]
            received = received + encoder.feature_bytes * shares.held[name]
        cell, number = np.unravel_index(encoded.argmax(), encoded.shape)
        own, pipeline = np.unravel_index(received.argmax(), received.shape)
        ranks = EncodingRanks(pipelines=shares.pipelines, parallel=plan.parallel, rank=0)
        return cls(
            plan=plan,
            packs=packs,
            lengths=lengths,
            encodes=(
                int(shares.steps[cell // blocks]),
                ranks.global_ranks(int(cell % blocks))[int(number)],
            ),
            receives=(
                int(shares.steps[own // blocks]),
                int(own % blocks * shares.pipelines + pipeline),
            ),
        )

    def work_of_stage(self, stage: int, rows: np.ndarray) -> EncodingWork:
        """Return the encoding of a stage's rank with these rows of the packs, on the host."""
        sizes = self.plan.parallel
        step, data_rank = self.receives
        encoding = self._shares(*self.encodes)
        shares = HeaviestShares(
            **{field.name: getattr(encoding, field.name) for field in fields(encoding)},
            receiving=self._shares(step, (stage * sizes.data + data_rank) * sizes.tensor),
            window={
                name: self.packs.column(encoder.feature)[rows]
                for name, encoder in self.plan.model.encoders.items()
            },
        )
        return shares, [self._make_pass(planned) for planned in shares.passes]

    def _shares(self, step: int, rank: int) -> StepShares:
        every_step = encoder_shares(self.plan, self.packs, self.lengths, rank)
        assert every_step is not None
        return every_step.step(step)

    def _make_pass(self, planned: EncoderPass) -> MicroBatch:
        model = self.plan.model
        items = {"tiles": 0, "clips": 0, planned.feature: planned.items}
        cells, parts = self.lengths.column(planned.feature), [np.zeros(0, np.int64)]
        for run in planned.runs:
            samples = self.packs.packs[run.row]
            parts.append(samples[samples_of_items(run.items, cells[samples])])
        images = image_sizes(self.lengths, np.concatenate(parts))
        return random_batch(
            model,
            items["tiles"],
            (),
            0,
            encoders_stage(model),
            clips=items["clips"],
            images=images if planned.feature == ImagesEncoder.feature else (),
        )
