"""Training in any parallel layout against one process: equal losses, gradients and trained weights.
Tensors are merged from their shards."""

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.encoders import ImagesEncoder

# A large epsilon, or AdamW turns rounding errors into full steps. With 1e-3, embedding weights
# differed by more than 1e-4 on some CPUs.
OPTIONS = replace(OPTIONS, adam_eps=1e-2, vision_lr=OPTIONS.lr / 4)

# Packs as (tiles, text tokens). Token counts are odd and even. One step has no image. Pack (1, 2)
# has no loss, which begins at the third text token.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)]],
    [[(0, 7)], [(0, 12), (0, 2)], [(0, 5)]],
    [[(0, 21)], [(1, 2)], [(2, 8)]],
]


def model_of(vocabulary=51, kv_heads=2, language_bias=False, is_qwen3=False, tied=False, **vision):
    """Return two layers per tower, with vision heads and vocabulary not divisible by 2."""
    model = toy_model(**{"layers": 2, "heads": 3, "hidden_size": 24, **vision})
    sizes = {"layers": 2, "vocab_size": vocabulary, "kv_heads": kv_heads, "tied_head": tied}
    qwen3 = {"qk_norm": True, "head_size": 10} if is_qwen3 else {}
    return model.with_tower("language", **sizes, **qwen3, qkv_bias=language_bias)


MODELS = {
    "300M-like": model_of(),
    "6B-like": model_of(language_bias=True, is_qwen3=True, normalization="RMSNorm", qkv_bias=False),
    "without-qk-norm": model_of(qk_norm=False),
    # At TP 4 the vision encoder's fourth rank has only padded heads.
    "one-key": model_of(kv_heads=1, language_bias=True, is_qwen3=True),
    "two-keys": model_of(vocabulary=49, heads=5, hidden_size=20),
    "for-four": model_of(vocabulary=49, kv_heads=4, language_bias=True, heads=5, hidden_size=20),
}
TIED, UNTIED = model_of(tied=True), model_of()


def with_unequal_weights(batch):
    """Return the batch with loss weights that differ by position."""
    weights = torch.linspace(0.5, 1.5, len(batch.labels_L))
    return replace(batch, loss_weights_L=weights, loss_weight=weights.sum().item())


def batches_of(model, number, packs):
    """Yield the packs of step `number`."""
    for index, samples in enumerate(packs):
        yield with_unequal_weights(toy_batch(model, samples, seed=100 * number + index))


def in_turn(plan, number, batches):
    """Return this rank's micro-batches of a step dealt to ranks in turn."""
    return MicroBatchStream.of(
        batches[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
    )


class Feed(NamedTuple):
    """Functions that turn steps into micro-batches."""

    packed: Callable = batches_of
    """Returns the packs of a step."""
    dealt: Callable = in_turn
    """Returns a rank's part of the packs."""
    drop_path: float = 0.0


PLAIN_FEED = Feed()


def train_steps(links, plan, steps, load=None, save=None, first=0, feed=PLAIN_FEED):
    """Return loss, norm and tokens per step, gradients per step, and final weights by name."""
    options = replace(OPTIONS, drop_path_rate=feed.drop_path)
    trainer = build_trainer(plan, links, options, steps=10, seed=3)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(options))
    if load is not None:
        assert load_checkpoint(load, *parts).step == first
    results, gradients = [], []
    for number, packs in enumerate(steps, first):
        own = feed.dealt(plan, number, list(feed.packed(plan.model, number, packs)))
        result = train_step(trainer, own, slots=trainer.max_in_lockstep(len(own)))
        results.append((result.loss, result.grad_norm, result.loss_tokens))
        gradients.append(gradients_of(trainer))
    trainer.wait_for_weights()
    if save is not None:
        writer = CheckpointWriter(save, *parts, keep_last=None, asynchronous=False)
        writer.save(first + len(steps), {})
        writer.finish()
        assert not writer.failures
    return results, gradients, weights_of(trainer)


ENCODERS = "encoders "
"""Name prefix of tensors of data-parallel encoders."""


def stages_of_trainer(trainer):
    """Yield (name prefix, stage, data-parallel model if trained) of each chunk and encoder."""
    yield from (("", *pair) for pair in zip(trainer.chunks, trainer.models, strict=True))
    if trainer.encoders is not None:
        copies = trainer.encoders.data_parallel
        yield ENCODERS, trainer.encoders.stage, None if copies is None else copies.models[0]


def gradients_of(trainer):
    """Return full gradients of the step by global name, on every data-parallel rank."""
    found = {}
    for begin, stage, model in stages_of_trainer(trainer):
        if stage.sharded is not None:
            parts = {flat: gradients.own_Q for flat, gradients in model.gradients.items()}
            value = unshard_parameters(parts).__getitem__
        else:
            if model is not None:
                gather_gradients(model, dist.group.WORLD if begin else None)
            value = lambda parameter: parameter.main_grad  # noqa: E731
        found |= {begin + name: one for name, one in by_name(stage, value).items()}
    return found


def weights_of(trainer):
    """Return full trained weights by global name, on every data-parallel rank."""
    found = {}
    for begin, stage, *_ in stages_of_trainer(trainer):
        value = lambda parameter: parameter  # noqa: E731
        if stage.sharded is not None:
            value = unshard_parameters(
                {flat: flat.own_Q for flat in stage.sharded.flats}
            ).__getitem__
        found |= {begin + name: one for name, one in by_name(stage, value).items()}
    return found


def unshard_parameters(parts):
    """Return full tensors by parameter, gathered from shards of flat tensors."""
    found = {}
    for flat, own in parts.items():
        group = flat.groups.shards
        whole = own.new_empty(len(own) * group.size())
        dist.all_gather_into_tensor(whole, own, group=group)
        found |= dict(zip(flat.parameters, flat.views(whole), strict=True))
    return found


def gather_gradients(model, group=None):
    """Gather the reduced gradient shards, so that all ranks have all gradients."""
    group = parallel_state.get_data_parallel_group() if group is None else group
    experts = parallel_state.get_expert_data_parallel_group()
    for buffers, ranks in ((model.buffers, group), (model.expert_parallel_buffers, experts)):
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)


def by_name(stage, value):
    """Return this rank's tensors by global name, with experts of all expert-parallel ranks."""
    group = parallel_state.get_expert_model_parallel_group()
    found = {
        global_parameter_name(stage, name): value(parameter).detach().clone()
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    }
    for name, own in found.items():
        if ".experts." in name:
            found[name] = own.new_empty((len(own) * group.size(), *own.shape[1:]))
            dist.all_gather_into_tensor(found[name], own, group=group)
    return found


def run(plan, steps=STEPS, **options):
    return run_ranks(plan.parallel, functools.partial(train_steps, **options), plan, steps)


def find_moved(links, plan):
    """Return whether each parameter moves in two steps; of adapters, B moves first, then A."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    for number, packs in enumerate(STEPS[:2]):
        train_step(trainer, MicroBatchStream.of([*batches_of(plan.model, number, packs)]))
    trainer.wait_for_weights()
    return {name: not torch.equal(before[name], p) for name, p in trainer.stage.named_parameters()}


_ALONE = {}


def as_one_process(plan, steps=STEPS, **options):
    """Return one process's results with unshared packs, cached by model and steps."""
    whole = {"context": 1, "recompute": ((),)}
    plan = toy_plan(plan.model, stages_of(plan.model)).model_copy(update={
        "frozen": plan.frozen, "adapters": plan.adapters,
        "levels": tuple(level.model_copy(update=whole) for level in plan.levels),
    })  # fmt: skip
    key = plan.model_dump_json(), repr(steps), repr(options)
    if key not in _ALONE:
        [_ALONE[key]] = run(plan, steps, **options)
    return _ALONE[key]


def compare_with_one_process(plan, steps=STEPS, rel=1e-5, **options):
    """Train in the plan's layout and in one process; return the ranks' results."""
    ranks = run(plan, steps, **options)
    assert_same_training(ranks, plan, as_one_process(plan, steps, **options), rel)
    return ranks


def compare_resumed(folder, *layouts, steps=STEPS, rel=1e-5, **options):
    """Train in successive layouts (plan, number of steps); compare with one process.

    Each layout resumes from the checkpoint of the previous layout.
    """
    results, gradients, weights = as_one_process(layouts[-1][0], steps, **options)
    done = 0
    for plan, count in layouts:
        first, done = done, done + count
        load = folder if first else None
        ranks = run(plan, steps[first:done], load=load, save=folder, first=first, **options)
        assert_same_results(ranks, results[first:done], rel)
    assert_same_training(ranks, plan, (results[first:], gradients[first:], weights), rel)


DIVIDED_AXIS = {
    "word_embeddings.weight": 0, "head.weight": 0, "linear_qkv.weight": 0, "linear_qkv.bias": 0,
    "q_layernorm.weight": 0, "k_layernorm.weight": 0, "linear_proj.weight": 1,
    "linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_fc2.weight": 1, "in_proj.weight": 0,
    "conv_weight": 0, "A_log": 0, "dt_bias": 0, "out_proj.weight": 1, "eh_proj.weight": 0,
}  # fmt: skip


LANGUAGE_PARTS = ("language.", "prediction.")
ROW_PIECES = ("o_proj", "down_proj", "proj", "out_proj", "fc2", "linear_fc2", "linear_2")
"""Adapters of row-parallel linears."""


def axis_of(name):
    if ".adapters." in name:
        piece, matrix = name.split(".")[-2:]
        divides_inputs = piece in ROW_PIECES
        return None if divides_inputs == (matrix == "lora_b") else int(divides_inputs)
    if name.startswith(("projector.norm.", "vision_embedding.")) or ".experts." in name:
        return None
    if name.startswith(LANGUAGE_PARTS) and "_layernorm" in name:  # shared by all heads
        return None
    [axis] = [axis for end, axis in DIVIDED_AXIS.items() if name.endswith(end)] or [None]
    return axis


def whole(name, parts, gated=()):
    """Return a tensor merged from its tensor-parallel shards; replicas must be equal.

    Args: `gated`: name prefixes of towers with gated feed-forwards.
    """
    axis = axis_of(name)
    if axis is None:
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], rtol=1e-5, atol=1e-7, msg=name)
        return parts[0]
    if name.startswith((*LANGUAGE_PARTS, *gated)) and "linear_fc1" in name:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(parts, axis)


def assert_equal_whole(ranks, plan, expected):
    """Assert that merged tensors, and each encoder replica, equal the expected; padding is 0."""
    towers = plan.model.encoders.items()
    gated = [f"{name}." for name, one in towers if isinstance(one, ImagesEncoder) and one.gated]
    found, tensor = set(), plan.parallel.tensor
    assert len({tuple(name for name in rank if name.startswith(ENCODERS)) for rank in ranks}) == 1
    for first in range(0, len(ranks), tensor):
        group = ranks[first : first + tensor]
        for full_name in group[0]:
            name, parts = full_name.removeprefix(ENCODERS), [rank[full_name] for rank in group]
            found.add(name)
            copies = [[part] for part in parts] if full_name.startswith(ENCODERS) else [parts]
            for own in copies:
                value, other = whole(name, own, gated), expected[name]
                real = value[tuple(map(slice, other.shape))]
                atol = 1e-4 * other.abs().max().item()
                torch.testing.assert_close(real, other, rtol=1e-4, atol=atol, msg=name)
                assert value.count_nonzero() == real.count_nonzero(), name
    assert found == expected.keys()


def assert_same_results(ranks, expected, rel):
    """Assert that every rank's loss, norm and tokens per step equal one process's."""
    for results, *_ in ranks:
        for got, other in zip(results, expected, strict=True):
            assert got == pytest.approx(other, rel=rel)


def assert_same_training(ranks, plan, reference, rel=1e-5):
    results, gradients, weights = reference
    assert_same_results(ranks, results, rel)
    for step, expected in enumerate(gradients):
        assert_equal_whole([rank[1][step] for rank in ranks], plan, expected)
    assert_equal_whole([rank[2] for rank in ranks], plan, weights)
