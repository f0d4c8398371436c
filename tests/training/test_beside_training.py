"""Encoders beside the pipeline, on four processes, against one process with everything in its
pipeline: same loss, every gradient, same weights after."""

import functools
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from beside import beside_plan, own_stream
from megatron.core import parallel_state
from ranks import run_ranks
from test_tensor_parallel import OPTIONS, assert_equal_whole, by_name, model_of
from toy import stages_of, toy_batch, toy_plan

from megatron.vlm.step.train import build_trainer, train_step

# Packs of (tiles, text tokens) of each step, dealt to data-parallel ranks in turn: fewer packs than
# slots, all images in one pack, none at all, one pack for all ranks.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)], [(1, 4)], [(0, 9)]],
    [[(0, 20)], [(6, 10), (5, 8)], [(0, 8)], [(0, 5)], [(0, 11)]],
    [[(0, 7)], [(0, 12), (0, 4)], [(0, 5)]],
    [[(2, 6)]],
]


@dataclass(frozen=True)
class Case:
    """A plan with encoders beside the pipeline, and everything that goes with it."""

    sizes: dict
    pipelines: int = 1
    cuts: tuple[int, ...] = ()
    per_pass: int = 2
    kept: int = 2
    frozen: tuple[str, ...] = ()
    recompute: dict = field(default_factory=dict)
    drop_path: float = 0.0
    tied: bool = False


# Units of the language model: 0 embed, 1-2 layers, 3 head.
CASES = {
    "pp2-dp2": Case({"data": 2}, pipelines=1, cuts=(2,), kept=1, drop_path=0.3),
    "pp2-dp2-one-group": Case(
        {"data": 2}, pipelines=2, cuts=(1,), kept=0, tied=True, frozen=("language",)
    ),
    "tp2-sp-dp2": Case(
        {"tensor": 2, "sequence_parallel": True, "data": 2}, pipelines=2, kept=99,
        recompute={"language": (1,)}, frozen=("vision",),
    ),
    "tp2-dp2": Case({"tensor": 2, "data": 2}, pipelines=1, kept=2),
    "dp4": Case({"data": 4}, pipelines=2, kept=1, frozen=("projector",)),
    "dp4-frozen": Case({"data": 4}, pipelines=4, frozen=("vision", "projector")),
    "pp4": Case({}, cuts=(1, 2, 3), per_pass=1, kept=1, drop_path=0.3),
}  # fmt: skip


def model_of_case(case):
    model = model_of(vocabulary=49, kv_heads=2)
    language = model.language.model_copy(update={"tied_head": case.tied})
    return model.model_copy(update={"language": language})


def plan_of(case):
    return beside_plan(
        model_of_case(case), case.cuts, pipelines=case.pipelines, per_pass=case.per_pass,
        kept=case.kept, frozen=case.frozen, recompute=case.recompute, **case.sizes,
    )  # fmt: skip


def packs_of(model, number, drop_path):
    """The packs of a step, with weights that differ between positions."""
    for index, samples in enumerate(STEPS[number]):
        batch = toy_batch(model, samples, seed=100 * number + index)
        weights = torch.linspace(0.5, 1.5, len(batch.labels_L))
        keys = torch.arange(batch.tiles) * 0x9E3779B97F4A7C + index if drop_path else None
        yield replace(batch, loss_weights_L=weights, drop_path_keys_T=keys)


def train_steps(links, plan, drop_path=0.0):
    """Results of each step, its gradients and the final weights: of the stage, and of encoders."""
    options = replace(OPTIONS, drop_path_rate=drop_path)
    trainer = build_trainer(plan, links, options, steps=10, seed=3)
    results, gradients = [], []
    for number in range(len(STEPS)):
        packs = list(packs_of(plan.model, number, drop_path))
        result = train_step(trainer, own_stream(plan, packs))
        results.append((result.loss, result.grad_norm, result.loss_tokens))
        gather_gradients(trainer.model, parallel_state.get_data_parallel_group())
        if trainer.encoders is not None and trainer.encoders.trained:
            gather_gradients(trainer.encoders.model, dist.group.WORLD)
        gradients.append([by_name(stage, lambda p: p.main_grad) for stage in trainer.stages])
    trainer.wait_for_weights()
    return results, gradients, [by_name(stage, lambda p: p) for stage in trainer.stages]


def gather_gradients(model, group):
    """Each rank has only its share of the summed gradients; now all have all."""
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


@functools.cache
def single_process(frozen, tied, drop_path):
    model = model_of_case(Case({}, tied=tied))
    plan = toy_plan(model, stages_of(model)).model_copy(update={"frozen": frozen})
    return run_ranks(plan.parallel, train_steps, plan, drop_path)[0]


def assert_equal(ranks, tensor, expected):
    """Tensors of every rank's stage, and of its whole copy of the encoders."""
    language = {n: value for n, value in expected.items() if is_language(n)}
    rest = {n: value for n, value in expected.items() if not is_language(n)}
    assert_equal_whole([parts[0] for parts in ranks], tensor, language)
    for parts in ranks:
        assert_equal_whole([parts[1]], 1, rest)


def is_language(name):
    return name.startswith(("language.", "embedding.", "head."))


@pytest.mark.parametrize("name", CASES)
def test_encoders_beside_the_pipeline_train_as_one_process(name):
    """Prevents: a loss or gradient that depends on who encodes an item, features at the wrong
    token, and ranks that wait for ever for one that has nothing to encode."""
    case = CASES[name]
    plan = plan_of(case)
    [reference, *_] = [single_process(case.frozen, case.tied, case.drop_path)]
    results, gradients, weights = reference
    ranks = run_ranks(plan.parallel, train_steps, plan, case.drop_path)
    for rank in ranks:
        for got, expected in zip(rank[0], results, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)
    tensor = plan.parallel.tensor
    for step, [expected] in enumerate(gradients):
        assert_equal([rank[1][step] for rank in ranks], tensor, expected)
    assert_equal([rank[2] for rank in ranks], tensor, weights[0])
