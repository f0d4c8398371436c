"""Exchanges of a stage's sharded weights do not depend on the packs' modalities.

A rank that begins an exchange after a message, if other ranks begin it before, deadlocks.
"""

from types import SimpleNamespace

import native_resolution_cases as native
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tensor_parallel_cases import compare_with_one_process
from toy import cut_plan, toy_batch, toy_omni_model

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.model.groups import ShardGroups
from megatron.vlm.model.initialize import first_values
from megatron.vlm.model.sharded_units import divide_weights
from megatron.vlm.model.sharded_weights import FlatWeights, without_matrices
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step import schedule
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.data_parallel import Sharded
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.sharded import FlatGradients, ShardedStage
from omnibal.data.native_resolution import Grid
from omnibal.model.parallel import Parallel

OMNI, QWEN = toy_omni_model(), native.qwen3_vl()
FROZEN = [(), ("vision", "vision_projector"), ("vision_projector", "audio", "language")]
RECOMPUTED = {"vision": (1, 2), "audio": (0,), "language": (1,)}


def packs_of(model):
    """Return a pack of all modalities, of single modalities, of text, and an empty pack."""
    empty = MicroBatch.empty(model, torch.device("cpu"), answers=False)
    if model is QWEN:
        return [*native.packs_of(model, 0, [[((Grid(1, 4, 4),), 9)], [((), 7)]]), empty]
    samples = [(1, 6, 1), (2, 7, 0), (0, 6, 2), (0, 9, 0)]
    return [*(toy_batch(model, [one], seed=3) for one in samples), empty]


def exchanges_by_pack(links, model, cuts):
    """Return each stage's exchanges and messages in order, a list per series of packs, keyed by
    (frozen parts, cuts, stage, number of packs)."""
    begun = []
    log_calls(FlatWeights, "begin_gather", begun)
    log_calls(FlatGradients, "begin_sum", begun)
    log_calls(schedule._Mail, "take", begun)
    log_calls(schedule._Mail, "send", begun)
    dist.irecv = lambda tensor, *_, **__: finished_work(tensor.fill_(1.0))
    dist.isend = lambda tensor, *_, **__: finished_work(tensor)
    packs = packs_of(model)
    series = [[pack] for pack in packs] + [packs, packs[::-1]]
    found = {}
    for frozen in FROZEN:
        for cut in cuts:
            plan = cut_plan(model, *cut, frozen=frozen, recompute=RECOMPUTED)
            for part in range(len(plan.stages)):
                held = sharded_stage(plan, part)
                for batches in series:
                    run_stage(plan, part, held, batches)
                    found.setdefault((frozen, cut, part, len(batches)), []).append([*begun])
                    begun.clear()
    return found


def log_calls(owner, name, begun):
    call = getattr(owner, name)

    def log_call(self, *arguments):
        what = arguments[:1] if owner is schedule._Mail else (id(self),)
        begun.append((name, *what))
        return call(self, *arguments)

    setattr(owner, name, log_call)


def finished_work(_):
    return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


def sharded_stage(plan, part):
    """Return a stage with weights gathered unit by unit, on one rank."""
    with without_matrices():
        stage = build_stage(plan, part)
    as_one_process = ShardGroups(shards=dist.group.WORLD, copies=dist.group.WORLD)
    fed = plan.trained_towers(part - 1) if part else ()
    divide_weights(stage, as_one_process, as_one_process, first_values(stage, 3), fed)
    return Sharded(models=[ShardedStage(stage, stage.sharded)], optimizer=None)


def run_stage(plan, part, held, batches):
    links = PipelineLinks(
        rank=part, ranks=range(len(plan.stages)), activations=None, gradients=None,
        schedule=plan.schedule, other_way=(),
    )  # fmt: skip
    stream = MicroBatchStream.of(batches)
    with held.running(stream, trains=True):
        schedule.run_forward_backward(
            plan, held.models, links, stream, PhaseClock(), begin_pass=held.begin_pass
        )


@pytest.mark.parametrize(
    ("model", "cuts"),
    [(OMNI, [(9,), (4, 8, 10, 14)]), (QWEN, [(3,), (4,), (1, 4, 8)])],
    ids=["two-encoders", "deepstack"],
)
def test_exchanges_are_the_plans_alone(model, cuts):
    """Prevents a rank from deadlocking because its pack lacks a modality and it joins an exchange
    only after a message."""
    [found] = run_ranks(Parallel(pipeline=1, data=1), exchanges_by_pack, model, cuts)
    for place, (first, *others) in found.items():
        assert any(name == "begin_gather" for name, _ in first), place
        assert all(one == first for one in others), place


def test_one_pack_a_rank_with_and_without_recordings():
    """Prevents four ranks from deadlocking if a cut divides the second encoder."""
    steps = [[[(2, 9, 1)], [(1, 7, 0)]], [[(0, 7, 0)], [(1, 9, 1)]]]
    compare_with_one_process(cut_plan(OMNI, 9, data=2, sharded=2), steps)
