"""Export of a plan as a folder of another trainer's files, written atomically."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import check_same_data
from omnibal.job.plan_files import PlanFiles
from omnibal.model.targets import TargetName, TrainerConstraints, trainer_of
from omnibal.packing.next_fit import largest_first
from omnibal.trainers.export import megatron_bridge, megatron_lm, ms_swift, xtuner
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.expressible import obstacles
from omnibal.trainers.export.reading_order import ORDER_FILE, reading_order, write_order
from omnibal.trainers.export.run_page import RUN_PAGE, Expected, run_page

# A trainer is one function, so that it is added without a class.
EXPORTS: Mapping[TargetName, Callable[[ExportInput], Exported]] = {
    TargetName.MS_SWIFT: ms_swift.export,
    TargetName.MS_SWIFT_DEEPSPEED: ms_swift.export_deepspeed,
    TargetName.XTUNER: xtuner.export,
    TargetName.MEGATRON_LM: megatron_lm.export,
    TargetName.MEGATRON_BRIDGE: megatron_bridge.export,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Export:
    """A plan as a trainer's files, with the expected run."""

    given: ExportInput
    exported: Exported
    expected: Expected  # counts of the run, for its page

    @property
    def files(self) -> list[str]:  # sorted names of files within the folder
        order = [] if self.given.order is None else [ORDER_FILE]
        return sorted([*self.exported.files, *order, RUN_PAGE])

    def write(self) -> None:
        """Write `given.folder` atomically, with the reading order and the run's page."""
        given = self.given
        with atomic_directory(given.folder) as folder:
            for name, write in self.exported.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write(folder / name)
            if given.order is not None:
                write_order(given.order, given.lengths, given.annotations, folder / ORDER_FILE)
            page = run_page(given, self.exported, self.expected)
            (folder / RUN_PAGE).write_text(page, encoding="utf-8")


def make_export(given: ExportInput, export: Callable[[ExportInput], Exported]) -> Export:
    """Return a trainer's files, not yet written, with deviations and notes of all trainers."""
    exported, expected, data = export(given), Expected.count(given), given.plan.data
    deviations = (*exported.deviations, *_unpredicted_costs(given), *_dropped_samples(expected))
    notes = exported.notes
    if given.annotations is not None and data is not None and data.origin is None:
        # Only lengths of `omnibal lengths` store the hash of their data.
        assumed = "row k is assumed to be sample k of --data"
        notes += (f"The plan's lengths do not name their data: {assumed}.",)
    exported = replace(exported, deviations=deviations, notes=notes)
    return Export(given=given, exported=exported, expected=expected)


def export_input(
    files: PlanFiles,
    target: TrainerConstraints,
    data: Path | None,
    folder: Path,
    workers: int = 0,
    checkpoint: str = "",
) -> ExportInput:
    """Return the plan with its data.

    Without `data`, files that name samples are left out. Every rank has `workers` loader processes.

    Raises:
        UserError: the trainer cannot express the plan, or `data` is not the planned data.
    """
    # Before the data is read, which may take long.
    obstacle = next(obstacles(files.plan, files.data, target), None)
    if obstacle is not None:
        raise UserError(f"{obstacle}; plan for it with `omnibal plan --for {target.name}`")
    annotations, order = None, None
    if data is not None:
        annotations = Annotations.open(data)
        _check_exported_data(files, annotations)
    if files.plan.data is not None:
        packs, lengths = files.steps
        order = reading_order(packs)
        if target.packs.next_fit:
            order = replace(order, packs=largest_first(order.packs, lengths.tokens))
    return ExportInput(
        files=files,
        target=target,
        order=order,
        annotations=annotations,
        folder=folder.absolute(),
        workers=workers,
        checkpoint=checkpoint,
    )


def _check_exported_data(files: PlanFiles, annotations: Annotations) -> None:
    """Raise unless `--data` is the data whose lengths were planned."""
    plan = files.plan
    if plan.data is None:
        raise UserError("--data is given for a plan of shapes; leave it out or plan with --lengths")
    if plan.data.origin is not None:
        check_same_data("--data", annotations.sha256, plan.data.origin.data_sha256)
        return
    lengths = files.steps[1]
    # Too low if the scan skipped samples behind the last kept sample.
    samples = len(lengths) if lengths.sample is None else int(lengths.sample[-1]) + 1
    if samples != len(annotations):
        raise UserError(
            f"--data has {len(annotations):,} samples, and the plan {samples:,}; give its own"
        )


def _dropped_samples(expected: Expected) -> Iterator[str]:
    if expected.dropped_packs:
        yield (
            f"The last step has {expected.dropped_packs:,} of {expected.packs_per_step:,} packs, "
            f"and trainers drop it: {expected.dropped_samples:,} sample(s) are not trained."
        )
    elif expected.dropped_samples:
        yield f"{expected.dropped_samples:,} sample(s) do not fill a step, and are left out."


def _unpredicted_costs(given: ExportInput) -> Iterator[str]:
    """Yield computation missing from the prediction of a plan made for another trainer."""
    plan, target = given.plan, given.target
    planned, stages = trainer_of(plan.made_for), plan.parallel.pipeline
    # The prediction is that of the planned trainer; exporting does not predict again.
    left_out = "which this plan does not predict: expect less speed and more memory."
    if target.packs.padded.applies(stages) and not planned.packs.padded.applies(stages):
        yield f"{target.title} pads every pack to the longest and computes the padding, {left_out}"
    replicates = target.stages.encoders_whole and not planned.stages.encoders_whole
    if replicates and plan.parallel.tensor > 1 and plan.model.encoders:
        yield f"Tensor-parallel ranks of {target.title} replicate the encoders, {left_out}"
    if target.stages.head_on_all_tokens and not planned.stages.head_on_all_tokens:
        yield f"The head of {target.title} computes logits of tokens without loss too, {left_out}"
