"""Every trainer's export: the one place that a new one is added to."""

from collections.abc import Callable, Mapping
from pathlib import Path

from omnibal.job.plan_files import PlanFiles
from omnibal.model.targets import TARGETS, TargetName
from omnibal.trainers.export import megatron_bridge, megatron_lm, ms_swift, xtuner
from omnibal.trainers.export.directory import Export, export_input, make_export
from omnibal.trainers.export.exported import Exported, ExportInput

EXPORTS: Mapping[TargetName, Callable[[ExportInput], Exported]] = {
    TargetName.MS_SWIFT: ms_swift.export,
    TargetName.MS_SWIFT_DEEPSPEED: ms_swift.export_deepspeed,
    TargetName.XTUNER: xtuner.export,
    TargetName.MEGATRON_LM: megatron_lm.export,
    TargetName.MEGATRON_BRIDGE: megatron_bridge.export,
}


def export_of(
    files: PlanFiles,
    name: TargetName,
    data: Path | None,
    folder: Path,
    workers: int,
    checkpoint: str = "",
) -> Export:
    """Make a plan's files for a trainer, not yet written.

    Without `data`, files that name samples are left out. Every rank has `workers` loader processes.
    """
    given = export_input(files, TARGETS[name], data, folder.absolute(), workers, checkpoint)
    return make_export(given, EXPORTS[name])
