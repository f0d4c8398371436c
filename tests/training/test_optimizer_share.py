"""A resume reads and holds of the optimizer's state what the rank updates, to the bit."""

import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.checkpoint.files import checkpoint_path
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.parallel import Parallel

_STEPS = 4
_ROWS = 3 * 2 * 2 * 4 * 16384
"""Bytes of the rows that two parameters are cut in, at both ends of a share; three tensors each."""
_CUTS = 3 * 2 * 2 * 2
"""Blocks more that are read there, each of two parts where tensor-parallel ranks have stored it."""


def wide_model():
    """Its largest parameters, gated and not, are each longer than a quarter of the model."""
    model = toy_model(layers=1, ffn_hidden_size=16384)
    language = model.language.model_copy(update={"layers": 1, "ffn_hidden_size": 8192})
    return model.model_copy(update={"language": language})


def wide_plan(data, tensor):
    model = wide_model()
    return toy_plan(model, stages_of(model), data=data, tensor=tensor)


class HostMemory(TorchDispatchMode):
    """Bytes of storages that were made meanwhile and live, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves(arguments) if plain(leaf)}
        result = operation(*arguments, **(options or {}))
        for leaf in filter(plain, tree_leaves(result)):
            storage = leaf.untyped_storage()
            key = storage.data_ptr()
            if id(storage) in given or not storage.nbytes() or key in self._known:
                continue
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key, size):
        self._known.discard(key)
        self.now -= size


def plain(leaf):
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "cpu"


def read_bytes():
    """Bytes that this process has read of files, as Linux counts them."""
    [line] = [one for one in Path("/proc/self/io").read_text().splitlines() if "rchar" in one]
    return int(line.split()[1])


@dataclass(frozen=True)
class Resumed:
    """Bytes of a resume on one rank."""

    read: int
    peak_of_memory: int
    share: int
    weights: list[int]
    """Of every parameter of the stage, float32."""
    stored_tensors: int


def resumed(links, plan, load, save):
    """Resume from one directory and save in another."""
    trainer = build_trainer(plan, links, OPTIONS, steps=_STEPS, seed=5)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
    memory, before = HostMemory(), read_bytes()
    with memory:
        load_checkpoint(load, *parts)
    read = read_bytes() - before
    CheckpointWriter(save, *parts, keep_last=None, asynchronous=False).save(1, {})
    [optimizer] = trainer.optimizers[0].chained_optimizers
    states = [
        value
        for state in optimizer.optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    ]
    return Resumed(
        read=read,
        peak_of_memory=memory.peak,
        share=sum(value.nbytes for value in states) * 3 // 2,  # moments, and in fp32 the weights
        weights=[parameter.nbytes for parameter in trainer.stage.parameters()],
        stored_tensors=2 * len(states) + 2 * len(list(trainer.stage.parameters())),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints after a step, by tensor-parallel size."""
    folders = {}
    for tensor in (1, 2):
        folders[tensor] = tmp_path_factory.mktemp(f"tensor{tensor}")
        plan = wide_plan(1, tensor)
        run_ranks(plan.parallel, trained, plan, folders[tensor])
    return folders


def trained(links, plan, save):
    trainer = build_trainer(plan, links, OPTIONS, steps=_STEPS, seed=3)
    train_step(trainer, MicroBatchStream.of([toy_batch(plan.model, [(1, 9)], seed=1)]))
    trainer.wait_for_weights()
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
    CheckpointWriter(save, *parts, keep_last=None, asynchronous=False).save(1, {})


def content(links, path):
    loaded = dist_checkpointing.load_plain_tensors(str(path))
    return {name: value for name, value in loaded.items() if torch.is_tensor(value)}


CHANGES = {
    "four-ranks": (1, 1, 4),
    "tensor-parallel": (2, 2, 2),
    "from-tensor-parallel": (2, 1, 4),
    "to-tensor-parallel": (1, 2, 2),
}
"""Tensor-parallel size before; tensor- and data-parallel size after."""


@pytest.mark.parametrize(("before", "tensor", "data"), CHANGES.values(), ids=CHANGES)
def test_resume_reads_its_own_share(saved, tmp_path, before, tensor, data):
    """Prevents: a resume for which a data-parallel rank needs room for other ranks' state, or that
    gives it values of another place where a parameter is cut between ranks."""
    plan, checkpoint = wide_plan(data, tensor), checkpoint_path(saved[before], 1)
    for rank in run_ranks(plan.parallel, resumed, plan, saved[before], tmp_path):
        largest, whole = max(rank.weights), 3 * sum(rank.weights)
        assert rank.share < whole / data * 1.1
        # The moments themselves, which a CPU has in the same memory.
        held = rank.peak_of_memory - rank.share * 2 // 3
        assert held < rank.share + largest + _ROWS
        if before >= tensor:  # else of each row only some columns are a rank's
            about_files = 6 * 1024 * (rank.stored_tensors + _CUTS) + 4 * described(checkpoint)
            assert rank.read < sum(rank.weights) + rank.share + about_files + _ROWS
    [expected], [found] = (
        run_ranks(Parallel(pipeline=1, data=1), content, path)
        for path in (checkpoint, checkpoint_path(tmp_path, 1))
    )
    assert found.keys() == expected.keys()
    for name in expected:
        rows = min(len(found[name]), len(expected[name]))  # words are padded to 128 a rank
        assert torch.equal(found[name][:rows], expected[name][:rows]), name


def described(checkpoint):
    """Bytes of files that describe a checkpoint."""
    return sum((checkpoint / name).stat().st_size for name in (".metadata", "common.pt"))
