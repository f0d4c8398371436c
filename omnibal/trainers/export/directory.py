"""An export as a folder: what is given to a trainer's export, and all of its files or none."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.base.files import atomic_directory
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import check_same_data
from omnibal.job.plan_files import PlanFiles
from omnibal.model.targets import TrainerConstraints, trainer_of
from omnibal.steps.next_fit import largest_first
from omnibal.trainers.export.expected import Expected
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.expressible import obstacles
from omnibal.trainers.export.order_file import ORDER_FILE, write_order
from omnibal.trainers.export.reading_order import reading_order
from omnibal.trainers.export.run_page import RUN_PAGE, run_page


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Export:
    """A plan as a trainer's files, with the expected run."""

    given: ExportInput
    exported: Exported
    expected: Expected

    @property
    def files(self) -> list[str]:
        order = [] if self.given.order is None else [ORDER_FILE]
        return sorted([*self.exported.files, *order, RUN_PAGE])

    def write(self) -> None:
        """Write the folder atomically."""
        given = self.given
        with atomic_directory(given.folder) as folder:
            for name, write in self.exported.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write(folder / name)
            if given.order is not None:
                lengths = given.files.steps[1]
                write_order(given.order, lengths, given.annotations, folder / ORDER_FILE)
            page = run_page(given, self.exported, self.expected)
            (folder / RUN_PAGE).write_text(page, encoding="utf-8")


def make_export(given: ExportInput, export: Callable[[ExportInput], Exported]) -> Export:
    """Make a trainer's files of a plan, not yet written."""
    exported = export(given)
    expected = Expected.of(given)
    shared = [*_unlike_predicted(given), *_left_out(expected)]
    exported = replace(
        exported, given_up=(*exported.given_up, *shared), notes=(*exported.notes, *_on_trust(given))
    )
    return Export(given=given, exported=exported, expected=expected)


def export_input(
    files: PlanFiles,
    target: TrainerConstraints,
    data: Path | None,
    folder: Path,
    workers: int = 0,
    checkpoint: str = "",
) -> ExportInput:
    """Read the data of a plan that the trainer can express."""
    # Before the data is read, which may take long.
    obstacle = next(obstacles(files.plan, files.data, target), None)
    if obstacle is not None:
        raise UserError(
            f"{obstacle}; make a plan that {target.title} can be told with `omnibal plan --for "
            f"{target.name}`"
        )
    annotations = None if data is None else Annotations.open(data)
    order = None
    if files.plan.data is not None:
        packs, lengths = files.steps
        order = reading_order(packs)
        if target.packs.next_fit:
            order = replace(order, packs=largest_first(order.packs, lengths.tokens))
    if annotations is not None:
        _check_data(files, annotations)
    return ExportInput(
        files=files,
        target=target,
        order=order,
        annotations=annotations,
        folder=folder,
        workers=workers,
        checkpoint=checkpoint,
    )


def _check_data(files: PlanFiles, annotations: Annotations) -> None:
    plan = files.plan
    if plan.data is None:
        raise UserError(
            "--data was given with a plan of shapes only, which has no samples to export; leave it "
            "out, or make a plan with --lengths"
        )
    lengths = files.steps[1]
    if plan.data.origin is not None:
        check_same_data("--data", annotations.sha256, plan.data.origin.data_sha256)
        return
    # Samples of the data, or a lower bound if some were skipped.
    samples = len(lengths) if lengths.sample is None else int(lengths.sample[-1]) + 1
    if samples != len(annotations):
        raise UserError(
            f"--data has {len(annotations):,} samples, and the plan's lengths are of {samples:,}; "
            "give the data that was counted, or plan with its own lengths"
        )


def _left_out(expected: Expected) -> Iterator[str]:
    if expected.dropped_packs:
        yield (
            f"The last step would have {expected.dropped_packs:,} pack(s) instead of "
            f"{expected.packs_per_step:,}, and trainers leave such a step out: "
            f"{expected.dropped_samples:,} sample(s) are not trained."
        )
    elif expected.dropped_samples:
        yield (
            f"{expected.dropped_samples:,} sample(s) would fill no step, and trainers leave such a "
            "step out: they are not trained, and in none of the files."
        )


def _on_trust(given: ExportInput) -> Iterator[str]:
    data = given.files.plan.data
    if given.annotations is not None and data is not None and data.origin is None:
        yield (
            "The plan's lengths do not say which data they are of: that every row is of the sample "
            "in its place is taken on trust. Lengths of `omnibal lengths` say so."
        )


def _unlike_predicted(given: ExportInput) -> Iterator[str]:
    """Yield computation missing from the prediction of a plan made for another trainer."""
    plan, target = given.files.plan, given.target
    planned = trainer_of(plan.made_for)
    left_out = "which the prediction of this plan, not made for it, leaves out"
    stages_of_plan = plan.parallel.pipeline
    foreseen = planned.packs.padded.applies(stages_of_plan)
    if target.packs.padded.applies(stages_of_plan) and not foreseen:
        yield (
            f"{target.title} pads every pack to the longest and computes the padding, {left_out}: "
            "expect less speed and more memory."
        )
    divided = target.stages.encoders_whole and not planned.stages.encoders_whole
    if divided and plan.parallel.tensor > 1 and plan.model.encoders:
        yield (
            f"Every tensor-parallel rank of {target.title} computes all of the encoders, and the "
            "prediction of this plan, not made for it, divides them: expect less speed and more "
            "memory."
        )
    if target.stages.head_on_all_tokens and not planned.stages.head_on_all_tokens:
        yield (
            f"The head of {target.title} computes logits of tokens without loss too, {left_out}: "
            "expect less speed and more memory."
        )
