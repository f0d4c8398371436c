"""Sinks of metrics: TensorBoard and Weights & Biases."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from omnibal.base.errors import UserError
from omnibal.base.files import atomic
from omnibal.job.runlog import StepRecord

_WANDB_ID_FILE = "wandb_id.txt"
_PLOTTED = {  # fields of a step's record, by group of plots
    "train": ("loss", "grad_norm", "learning_rate", "skipped", "replaced_samples"),
    "speed": ("step_ms", "between_ms", "mfu"),
}


class TensorBoardSink:
    """Event files in `directory`; their points after `trained_steps` are replaced."""

    def __init__(self, directory: Path, trained_steps: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"--tensorboard-dir {directory}: TensorBoard is not installed; "
                "pip install tensorboard, or leave the option out"
            ) from error
        try:
            self._writer = SummaryWriter(
                str(directory), purge_step=trained_steps + 1, flush_secs=20
            )
        except OSError as error:
            raise UserError(
                f"--tensorboard-dir {directory}: {error.strerror}; give a writable directory"
            ) from error

    def write(self, steps: int, values: Mapping[str, float]) -> None:
        """Add a point per value at `steps` trained steps; a step and its validation share it."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, steps)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of a Weights & Biases project; `WANDB_*` variables configure the library.

    Its id is stored in `directory` for resumes. The library drops steps that it already has.
    """

    def __init__(self, project: str, name: str, directory: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"--wandb-project {project}: Weights & Biases is not installed; pip install wandb, "
                "or leave the option out"
            ) from error
        id_file = directory / _WANDB_ID_FILE
        if not id_file.exists():
            with atomic(id_file) as temporary:
                temporary.write_text(secrets.token_hex(4))
        where = {"id": id_file.read_text(), "dir": str(directory)}
        self._run = wandb.init(project=project, name=name, resume="allow", **where)

    def write(self, steps: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=steps)

    def close(self) -> None:
        self._run.finish()


MetricsSink: TypeAlias = TensorBoardSink | WandbSink


def step_values(record: StepRecord) -> dict[str, float]:
    """Return the scalars of a step to plot, by name."""
    values = {
        f"{group}/{name}": float(getattr(record, name))
        for group, names in _PLOTTED.items()
        for name in names
    }
    samples_per_s = record.samples * 1e3 / record.step_ms if record.step_ms else 0.0
    values["speed/samples_per_s"] = samples_per_s
    if record.prediction_loss:
        values["train/prediction_loss"] = record.prediction_loss
    if record.experts is not None:
        values |= {f"experts/{name}": value for name, value in record.experts}
    for number, stage in enumerate(record.stages):
        # Tuples are per-rank times, for planning again only.
        scalars = ((name, value) for name, value in stage if not isinstance(value, tuple))
        values |= {f"stage_{number}/{name}": value for name, value in scalars}
    return values
