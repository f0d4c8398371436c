"""A plan as XTuner's preset packs, their order, and its loader's settings.

From InternLM/xtuner: xtuner/v1/datasets/preset_pack.py at 5cda4fb, preset_sampler.py at 147cb2e,
config.py at 0404287 and its loader's test.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.record_files import is_array
from omnibal.model.units import LANGUAGE
from omnibal.trainers.export.exported import (
    Exported,
    ExportInput,
    Writer,
    array_file,
    fill_template,
    json_file,
    script_file,
)
from omnibal.trainers.export.layout import all_or_none
from omnibal.trainers.export.megatron_flags import launch_variables, torchrun
from omnibal.trainers.export.reading_order import record_numbers, sample_numbers

_ORDER, _SCRIPT = "sampler_order.npy", "xtuner_packs.py"
_NO_CHARACTERS = -1  # character range of samples that are not cut from long texts


def export(given: ExportInput) -> Exported:
    plan = given.plan
    for path in () if given.annotations is None else given.annotations.files:
        if path.suffix == ".tar" or is_array(path):
            kind = "a tar shard" if path.suffix == ".tar" else "a JSON array"
            raise UserError(f"{path}: is {kind}, and XTuner reads JSONL; write that and plan again")
    return Exported(
        files=_pack_files(given),
        variables=launch_variables(given, CONFIG="$EXPORT/config.py"),
        command=torchrun(plan, 'xtuner/v1/train/cli/sft.py --config "$CONFIG"'),
        settings=_xtuner_settings(given),
        deviations=tuple(_xtuner_deviations(given)),
        notes=tuple(_xtuner_notes(given)),
    )


def _pack_files(given: ExportInput) -> dict[str, Writer]:
    order, annotations = given.order, given.annotations
    if order is None:
        return {}
    # Packs are numbered in reading order, so the order of full steps is 0, 1, ...
    packs = np.arange((given.full_steps or 0) * given.packs_per_step, dtype=np.int64)
    files, lengths = {_SCRIPT: script_file(_SCRIPT), _ORDER: array_file(packs)}, given.lengths
    record = record_numbers(order, lengths, annotations)
    if record is None:
        return files
    if annotations is None:
        file, paths = lengths.source[order.packs.samples], list(lengths.source_names)
    else:
        file = annotations.file[sample_numbers(order, lengths)]
        paths = [str(path.absolute()) for path in annotations.files]
    # Per sample: file, line, first and last character, first and last token.
    none, start = np.full(len(record), _NO_CHARACTERS), np.zeros(len(record))
    columns = [file, record, none, none, start, lengths.tokens[order.packs.samples]]
    return files | {
        "boundaries.npy": array_file(order.packs.offsets.astype(np.int64)),
        "samples.npy": array_file(np.stack(columns, axis=1).astype(np.int64)),
        "paths.json": json_file(paths),
    }


def _xtuner_settings(given: ExportInput) -> str:
    """Return Python statements of a config: data, FSDP and recomputation. Empty without samples."""
    if given.order is None:
        return ""
    roots = {} if given.annotations is None else _roots(given.annotations)
    return fill_template(
        "xtuner_config.py.jinja",
        given=given,
        folder=repr(str(given.folder)),
        model=repr(given.checkpoint or given.plan.model.name),
        lr=launch_variables(given)["LR"],
        roots={repr(str(path)): repr(str(root)) for path, root in roots.items()},
        has_images=bool(given.plan.model.encoders),
        order=_ORDER,
        ratio=1.0 if all_or_none(given.plan.stages_at(0), LANGUAGE) else 0.0,
    )


def _roots(annotations: Annotations) -> dict[Path, Path]:
    """Return the image root by annotation file. Raise if a file has several."""
    # A file is a dataset in XTuner, with one root; here a source has one, and may share files.
    pairs = np.unique(np.stack([annotations.file, annotations.source], axis=1), axis=0)
    roots: dict[Path, Path] = {}
    for file, source in pairs.tolist():
        path, root = annotations.files[file].absolute(), annotations.entries[source].root.absolute()
        if roots.setdefault(path, root) != root:
            raise UserError(
                f"{path}: has images in {roots[path]} and {root}; XTuner takes one folder per file"
            )
    return roots


def _xtuner_deviations(given: ExportInput) -> Iterator[str]:
    plan, order = given.plan, given.order
    if order is not None:
        length = given.longest_pack
        yield (
            f"XTuner pads every pack to {length:,} tokens, and computes the padding: packs fill "
            f"{100 * order.tokens.mean() / length:.1f} % of that on average."
        )
    yield (
        "XTuner recomputes a share of the language layers (recompute_ratio), here all or none; set "
        "recomputation of encoders in the model's config."
    )
    if plan.model.encoders:
        yield (
            "IMAGES ARE LOST by PresetPackDataset of XTuner (xtuner/v1/datasets/preset_pack.py, "
            f"5cda4fb), without an error. {_SCRIPT}, imported by the settings, repairs that; check "
            "that your version still needs it."
        )


def _xtuner_notes(given: ExportInput) -> Iterator[str]:
    if given.order is None:
        yield "The plan is of shapes only, without packs to write: plan with --lengths."
        return
    if given.annotations is None and record_numbers(given.order, given.lengths, None) is None:
        yield (
            "No --data was given, and the scan skipped samples of several sources: boundaries.npy, "
            "samples.npy and paths.json are left out, as line numbers are unknown."
        )
    elif given.annotations is None:
        yield (
            "No --data was given: paths.json has the names of the sources, "
            f"{', '.join(map(repr, given.lengths.source_names))}. Replace each by the path of its "
            "JSONL, as in DatasetConfig; row k of a source is assumed to be its line k."
        )
    yield "config.py is yours: the settings above, with the config of your model."
    yield (
        "xtuner_packs.py was tested with a stand-in for XTuner that has its fields. It ends a run "
        "at the first sample whose token count differs from the plan's."
    )
    yield "Line numbers are XTuner's without filters: keep sample_ratio at 1."
