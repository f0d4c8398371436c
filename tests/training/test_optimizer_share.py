"""A resume reads and holds only the rank's own shard of optimizer state, bit for bit, also with an
optimizer that stores state as Transformer Engine's FusedAdam does."""

import weakref
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoint_cases import TOTAL_STEPS, train_range
from megatron.core import dist_checkpointing
from megatron.core import optimizer as core_optimizer
from megatron.core.optimizer import distrib_optimizer
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import OPTIONS, toy_model

from megatron.vlm.checkpoint.run_folders import CHECKSUMS_FILE
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.step.train import build_trainer
from omnibal.job.runlog import checkpoint_path
from omnibal.model.parallel import Parallel

_ROWS = 3 * 2 * 2 * 4 * 16384
"""Bytes of the partial rows at both ends of a shard, in two parameters of three tensors."""
_CUTS = 3 * 2 * 2 * 2
"""Extra blocks read there; two parts per block if saved by tensor-parallel ranks."""


# Its largest parameters, gated or not, exceed a quarter of the model.
WIDE = toy_model(layers=1, ffn_hidden_size=16384).with_tower(
    "language", layers=1, ffn_hidden_size=8192
)


class HostMemory(TorchDispatchMode):
    """Counts current and peak bytes of CPU storages allocated inside the context."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves(arguments) if on_cpu(leaf)}
        result = operation(*arguments, **(options or {}))
        for leaf in filter(on_cpu, tree_leaves(result)):
            storage = leaf.untyped_storage()
            key = storage.data_ptr()
            if id(storage) in given or not storage.nbytes() or key in self._known:
                continue
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._count_free, key, storage.nbytes())
        return result

    def _count_free(self, key, size):
        self._known.discard(key)
        self.now -= size


def on_cpu(leaf):
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "cpu"


def read_bytes():
    """Return the bytes this process has read from files, as counted by Linux."""
    [line] = [one for one in Path("/proc/self/io").read_text().splitlines() if "rchar" in one]
    return int(line.split()[1])


def resume_result(links, plan, load, save):
    """Load one checkpoint, save another. Return bytes read, peak bytes, bytes of the rank's shard
    and of each fp32 parameter, and the number of stored tensors."""
    trainer = build_trainer(plan, links, OPTIONS, steps=TOTAL_STEPS, seed=5)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
    memory, before = HostMemory(), read_bytes()
    with memory:
        load_checkpoint(load, *parts)
    read = read_bytes() - before
    CheckpointWriter(save, *parts, keep_last=None, asynchronous=False).save(1, {})
    [optimizer] = trainer.optimizers[0].chained_optimizers
    states = optimizer.optimizer.state.values()
    moments = [value for state in states for key, value in state.items() if key != "step"]
    weights = [parameter.nbytes for parameter in trainer.stage.parameters()]
    share = sum(value.nbytes for value in moments) * 3 // 2  # and in fp32 the weights
    return read, memory.peak, share, weights, 2 * len(moments) + 2 * len(weights)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints after one step, by tensor-parallel size."""
    folders = {tensor: tmp_path_factory.mktemp(f"tensor{tensor}") for tensor in (1, 2)}
    for tensor, folder in folders.items():
        plan = pipeline_plan(model=WIDE, tensor=tensor)
        run_ranks(plan.parallel, train_range, plan, 0, 1, None, folder)
    return folders


def content(links, path):
    loaded = dist_checkpointing.load_plain_tensors(str(path))
    return {name: value for name, value in loaded.items() if torch.is_tensor(value)}


@pytest.mark.parametrize(
    ("before", "tensor", "data"),
    [(1, 1, 4), (2, 2, 2), (2, 1, 4), (1, 2, 2)],
    ids=["four-ranks", "tensor-parallel", "from-tensor-parallel", "to-tensor-parallel"],
)
def test_resume_reads_its_own_share(checkpoints, tmp_path, before, tensor, data):
    """Prevents allocation of other ranks' state on resume, and values read from wrong offsets."""
    plan = pipeline_plan(model=WIDE, data=data, tensor=tensor)
    checkpoint = checkpoint_path(checkpoints[before], 1)
    # Metadata files.
    described = sum((checkpoint / name).stat().st_size for name in (".metadata", "common.pt"))
    files = [file for file in sorted(checkpoint.iterdir()) if file.name != CHECKSUMS_FILE]
    ranks = run_ranks(plan.parallel, resume_result, plan, checkpoints[before], tmp_path)
    for rank, (read, peak, share, weights, stored) in enumerate(ranks):
        assert share < 3 * sum(weights) / data * 1.1
        # Excludes the moments, which are in host memory too without a GPU.
        assert peak - share * 2 // 3 < share + max(weights) + _ROWS
        if before >= tensor:  # otherwise a rank owns only some columns of a row
            about_files = 6 * 1024 * (stored + _CUTS) + 4 * described
            checked = sum(file.stat().st_size for file in files[rank :: len(ranks)])
            assert read < sum(weights) + share + checked + about_files + _ROWS
    [expected], [found] = (
        run_ranks(Parallel(pipeline=1, data=1), content, path)
        for path in (checkpoint, checkpoint_path(tmp_path, 1))
    )
    assert found.keys() == expected.keys()
    for name in expected:
        rows = min(len(found[name]), len(expected[name]))  # vocabulary padded to 128 per rank
        assert torch.equal(found[name][:rows], expected[name][:rows]), name


SAVED_STEP = 3


class FusedAdam(torch.optim.Optimizer):
    """AdamW with two fp32 moments per parameter and the step in its group, absent before the first
    step. Groups without parameters are skipped."""

    steps_taken: tuple[int, ...] = ()

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode):
        assert adam_w_mode
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "bias_correction": True})

    def moment(self, parameter, name):
        assert name in ("exp_avg", "exp_avg_sq")
        assert self.state[parameter][name].dtype == torch.float32
        return self.state[parameter][name]

    def parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self):
        state_dict = super().state_dict()
        numbered = dict(enumerate(self.parameters()))
        state_dict["state"] = {
            number: {name: self.moment(numbered[number], name) for name in state}
            for number, state in state_dict["state"].items()
        }
        return state_dict

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for number, parameter in enumerate(self.parameters()):
            state = state_dict["state"].get(number, {})
            self.state[parameter] = {name: value.float().clone() for name, value in state.items()}
            for name in state:
                self.moment(parameter, name)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["params"]:
                continue
            assert group["bias_correction"]
            group["step"] = group["step"] + 1 if "step" in group else 1
            assert isinstance(group["step"], int)  # the kernel takes an int
            for parameter in group["params"]:
                self.update(parameter, group)
        FusedAdam.steps_taken += (group["step"],)

    def update(self, parameter, group):
        names, gradient = ("exp_avg", "exp_avg_sq"), parameter.grad
        if not self.state[parameter]:
            self.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
        first, second = (self.moment(parameter, name) for name in names)
        beta1, beta2 = group["betas"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrected = first / (1 - beta1 ** group["step"])
        spread = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * corrected / spread)


def train_with(links, is_fused, *arguments):
    """Return `train_range`'s results and the step counts used in FusedAdam's bias correction."""
    if is_fused:
        core_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        core_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    return *train_range(links, *arguments), FusedAdam.steps_taken


def run_range(plan, is_fused, *arguments):
    ranks = run_ranks(plan.parallel, train_with, is_fused, plan, *arguments)
    weights = {name: value for _, own, _ in ranks for name, value in own.items()}
    [steps_taken] = {steps for _, _, steps in ranks}
    return ranks[0][0], weights, steps_taken


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    """Prevents a KeyError on "step" at resume, and a restarted bias correction."""
    plan = pipeline_plan(4, data=2)
    losses, weights, _ = run_range(plan, True, 0, TOTAL_STEPS, None, None)
    first, _, steps = run_range(plan, True, 0, SAVED_STEP, None, tmp_path)
    assert steps == (1, 2, 3)
    rest, resume_result, steps = run_range(plan, True, SAVED_STEP, TOTAL_STEPS, tmp_path, None)
    assert steps == (4, 5, 6)
    assert first + rest == losses
    assert [name for name in weights if not torch.equal(resume_result[name], weights[name])] == []


@pytest.mark.parametrize("fused_first", [True, False], ids=["fused-to-torch", "torch-to-fused"])
def test_resumes_with_the_other_optimizer(tmp_path, fused_first):
    """Prevents checkpoints that load only with the optimizer that wrote them."""
    plan = pipeline_plan(4)
    losses, weights, _ = run_range(plan, fused_first, 0, TOTAL_STEPS, None, None)
    run_range(plan, fused_first, 0, SAVED_STEP, None, tmp_path)
    rest, resume_result, _ = run_range(
        plan, not fused_first, SAVED_STEP, TOTAL_STEPS, tmp_path, None
    )
    assert rest == pytest.approx(losses[SAVED_STEP:], rel=1e-5)
    torch.testing.assert_close(resume_result, weights, rtol=1e-4, atol=1e-5)


def test_state_before_the_first_step_is_saved_and_resumed(tmp_path):
    """Prevents a failed first save if all steps were skipped."""
    plan = pipeline_plan(4)
    losses, _, _ = run_range(plan, True, 0, TOTAL_STEPS, None, None)
    run_range(plan, True, 0, 0, None, tmp_path)
    resume_result, _, steps = run_range(plan, True, 0, TOTAL_STEPS, tmp_path, None)
    assert steps == (1, 2, 3, 4, 5, 6)
    assert resume_result == losses
