"""Checkpoints from an untrusted source never run code in any reader."""

import io
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from checkpoint_cases import refusals, save
from commands import launcher
from ranks import run_ranks
from released import imported, save_toy, write_tokenizer
from toy import OPTIONS, stages_of, toy_model, toy_plan

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.checkpoint.run_folders import write_checksums
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.job.runlog import checkpoint_path

STEPS = 10


class Attack:
    """Creates a file when it is unpickled, then is None."""

    def __init__(self, made):
        self.made = str(made)

    def __reduce__(self):
        return eval, (f"(open({self.made!r}, 'w'), None)[1]",)


def archive(made):
    stream = io.BytesIO()
    torch.save([Attack(made)], stream)
    return stream.getvalue()


def edit_metadata(edit):
    def change(folder, made):
        file = folder / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        edit(metadata, folder, made)
        file.write_bytes(pickle.dumps(metadata))

    return change


def redirect(kind):
    """Redirect stored items of a kind to an archive that runs code."""

    def edit(metadata, folder, made):
        content = archive(made)
        (folder / "__9_9.distcp").write_bytes(content)
        of_kind = [key for key, one in metadata.state_dict_metadata.items() if kind in str(one)]
        assert of_kind
        for index, place in metadata.storage_data.items():
            if index.fqn in of_kind:
                place = replace(place, relative_path="__9_9.distcp", offset=0, length=len(content))
                metadata.storage_data[index] = place

    return edit_metadata(edit)


@edit_metadata
def store_as_objects(metadata, folder, made):
    redirect("Tensor")(folder, made)
    metadata.storage_data = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    [other, *_] = (one for one in metadata.state_dict_metadata.values() if "Bytes" in str(one))
    metadata.state_dict_metadata = dict.fromkeys(metadata.state_dict_metadata, other)


@edit_metadata
def point_outside(metadata, folder, made):
    shutil.copytree(folder, folder.parent / "other")
    for index, place in metadata.storage_data.items():
        elsewhere = f"../other/{place.relative_path}"
        metadata.storage_data[index] = replace(place, relative_path=elsewhere)


def inject_object(metadata, folder, made):
    metadata.storage_meta = Attack(made)


CHANGES_A_CLASS = (
    b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    b"(N}\x8c\x08__hash__cbuiltins\nlist\nstb."
)
HOSTILE = {
    "metadata": lambda folder, made: (folder / ".metadata").write_bytes(pickle.dumps(Attack(made))),
    "within": edit_metadata(inject_object),
    "class": lambda folder, made: (folder / ".metadata").write_bytes(CHANGES_A_CLASS),
    "common": lambda folder, made: (folder / "common.pt").write_bytes(archive(made)),
    "tensors": redirect("Tensor"),
    "as-objects": store_as_objects,
    "outside": point_outside,
    "objects": redirect("Bytes"),
}
HARMLESS = "objects"  # never read


def hostile_copies(run, step, folder, names=HOSTILE):
    """Return attacked copies of a run. Running their code would create a `.made` file."""
    for name in names:
        shutil.copytree(run, folder / name)
        path = checkpoint_path(folder / name, step)
        HOSTILE[name](path, folder / f"{name}.made")
        write_checksums(path, {})
    return [folder / name for name in names]


def save_first(links, plan, folder):
    save(build_trainer(plan, links, OPTIONS, steps=STEPS, seed=3), folder, 1)


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "sharded": 2}], ids=["whole", "sharded"])
def test_training_runs_nothing_of_a_checkpoint(tmp_path, sizes):
    """Prevents --load and --finetune from running code in any file of a checkpoint."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, *([] if sizes else [4])), **sizes)
    run_ranks(plan.parallel, save_first, plan, tmp_path / "run")
    folders = hostile_copies(tmp_path / "run", 1, tmp_path)
    for told in run_ranks(plan.parallel, refusals, plan, folders, OPTIONS, STEPS):
        for folder, *lines in zip(folders, told[::2], told[1::2], strict=True):
            for line in lines:
                if folder.name == HARMLESS:
                    assert line is None
                else:
                    assert "cannot be read" in line and "\n" not in line, line
    assert not list(tmp_path.glob("*.made"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a read-only imported run with a tokenizer."""
    folder = tmp_path_factory.mktemp("released")
    write_tokenizer(save_toy("300m-qwen2", folder / "model", "transformers"))
    return imported(folder / "model", folder / "run")


@pytest.mark.parametrize(
    "command",
    [
        ("tools/chat.py", "--prompt", "a b", "--max-new-tokens", 1, "--load"),
        ("tools/convert.py", "export", "--layout", "transformers", "-o", "OUT"),
    ],
    ids=["chat", "export"],
)
def test_commands_run_nothing_of_a_checkpoint(tmp_path, run, command):
    """Prevents chat.py and `convert.py export` from running a checkpoint's code, and tracebacks."""
    for folder in hostile_copies(run, 0, tmp_path, ("within", "as-objects", HARMLESS)):
        words = [tmp_path / "out" / folder.name if word == "OUT" else word for word in command]
        ended = launcher().run(*words, folder)
        if folder.name == HARMLESS:
            assert ended.returncode == 0, ended.stderr
        else:
            # Other lines report progress.
            [line] = (one for one in ended.stderr.splitlines() if one.startswith("error: "))
            assert ended.returncode == 2 and "cannot be read" in line, (folder.name, line)
            assert "Traceback" not in ended.stderr
    assert not list(tmp_path.glob("*.made"))


def test_a_fifo_is_refused(tmp_path, run):
    """Prevents a command that hangs on a FIFO."""
    for name in (".metadata", "common.pt", "metadata.json"):
        copy = shutil.copytree(run, tmp_path / name)
        (checkpoint_path(copy, 0) / name).unlink()
        os.mkfifo(checkpoint_path(copy, 0) / name)
        with pytest.raises(UserError, match="is no regular file"):
            open_newest(copy)
