"""A plan as XTuner's preset packs, their order, and its loader's settings.

Read in InternLM/xtuner: xtuner/v1/datasets/preset_pack.py at 5cda4fb, preset_sampler.py at 147cb2e,
config.py at 0404287 and its loader's test. XTuner uses FSDP without pipelines, and recomputes all
layers or none.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.record_files import is_array
from omnibal.model.units import LANGUAGE
from omnibal.packing.packs import ScheduledPacks
from omnibal.trainers.export.exported import (
    Exported,
    ExportInput,
    Writer,
    array_file,
    json_file,
    script_file,
)
from omnibal.trainers.export.layout import all_or_none
from omnibal.trainers.export.megatron_flags import launch_variables, torchrun
from omnibal.trainers.export.reading_order import record_numbers, sample_numbers

_ORDER, _SCRIPT = "sampler_order.npy", "xtuner_packs.py"
_PLAIN = -1
"""Characters of rows outside long texts."""


def export(given: ExportInput) -> Exported:
    plan = given.plan
    for path in () if given.annotations is None else given.annotations.files:
        if path.suffix == ".tar" or is_array(path):
            kind = "a tar shard" if path.suffix == ".tar" else "a JSON array"
            raise UserError(
                f"{path}: is {kind}, and XTuner reads samples from JSONL, by their lines; write "
                "them as JSONL, one a line, and scan and plan with that"
            )
    return Exported(
        files=_files(given),
        variables=launch_variables(given, CONFIG="$EXPORT/config.py"),
        command=torchrun(plan, 'xtuner/v1/train/cli/sft.py --config "$CONFIG"'),
        settings=_settings(given),
        given_up=tuple(_given_up(given)),
        notes=tuple(_notes(given)),
    )


def _files(given: ExportInput) -> dict[str, Writer]:
    order, annotations, steps = given.order, given.annotations, given.full_steps
    if order is None or steps is None:
        return {}
    whole = np.arange(steps * given.packs_per_step, dtype=np.int64)  # packs of all full steps
    files, lengths = {_SCRIPT: script_file(_SCRIPT), _ORDER: array_file(whole)}, given.lengths
    record = record_numbers(order, lengths, annotations)
    if record is None:
        return files
    if annotations is None:
        file, paths = lengths.source[order.packs.samples], list(lengths.source_names)
    else:
        file = annotations.file[sample_numbers(order, lengths)]
        paths = [str(path.absolute()) for path in annotations.files]
    # File, line, characters and tokens per sample in reading order: tokens 0 to all, no characters.
    plain, start = np.full(len(record), _PLAIN), np.zeros(len(record))
    columns = [file, record, plain, plain, start, lengths.tokens[order.packs.samples]]
    return files | {
        "boundaries.npy": array_file(order.packs.offsets.astype(np.int64)),
        "samples.npy": array_file(np.stack(columns, axis=1).astype(np.int64)),
        "paths.json": json_file(paths),
    }


def _settings(given: ExportInput) -> str:
    """Return the statements of a config on data, FSDP and recomputation."""
    if given.order is None:
        return ""
    plan, datasets = given.plan, "\n".join(_datasets(given))
    ratio = 1.0 if all_or_none(plan.stages_at(0), LANGUAGE) else 0.0
    return f"""\
import sys

from xtuner.v1.config import AdamWConfig, FSDPConfig
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig

EXPORT = {str(given.folder)!r}
MODEL = {given.checkpoint or plan.model.name!r}
OUTPUT = f'{{EXPORT}}/output'
LR = {launch_variables(given)["LR"]}
sys.path.insert(0, EXPORT)
import xtuner_packs  # packs shorter than pack_max_length, and their images

# tokenize_fn: the one of your model; it must count tokens as the plan's lengths do.
dataset_config = [
{datasets}
]
dataloader_config = DataloaderConfig(
    dataset_config_list=dataset_config,
    pack_level="preset",
    pack_config_path=EXPORT,
    sampler_type="preset",
    sampler_config_path=f'{{EXPORT}}/{_ORDER}',
    pack_max_length={given.longest_pack},
    group_by_length=False,
)
fsdp_config = FSDPConfig(recompute_ratio={ratio})
# trainer = TrainerConfig(dataloader_cfg=dataloader_config, fsdp_cfg=fsdp_config,
#                         load_from=MODEL, work_dir=OUTPUT, optim_cfg=AdamWConfig(lr=LR),
#                         global_batch_size={given.packs_per_step}, epoch_num=1, ...)"""


def _datasets(given: ExportInput) -> Iterator[str]:
    if given.annotations is None:
        yield "    # every file of the data, by the path that paths.json names"
        return
    has_images = bool(given.plan.model.encoders)
    for path, root in _roots(given.annotations).items():
        media = f", class_name='VLMJsonlDataset', media_root={str(root)!r}" if has_images else ""
        yield f"    {{'dataset': DatasetConfig(anno_path={str(path)!r}{media}),"
        yield "     'tokenize_fn': ...},"


def _roots(annotations: Annotations) -> dict[Path, Path]:
    """Return the image root of each annotation file (a dataset in XTuner)."""
    pairs = np.unique(np.stack([annotations.file, annotations.source], axis=1), axis=0)
    roots: dict[Path, Path] = {}
    for file, source in pairs.tolist():
        path, root = annotations.files[file].absolute(), annotations.roots[source].absolute()
        if roots.setdefault(path, root) != root:
            raise UserError(
                f"{path}: is of several sources, whose images are in {roots[path]} and in {root}; "
                "XTuner takes a file once, with one folder: copy the file for one of them"
            )
    return roots


def _given_up(given: ExportInput) -> Iterator[str]:
    plan, order = given.plan, given.order
    if order is not None:
        length = given.longest_pack
        share = order.packs.sums(given.lengths.tokens).mean() / length
        yield (
            f"XTuner pads every pack to the longest one's {length:,} tokens, and computes the "
            f"padding: packs fill {100 * share:.1f} % of that on the mean."
        )
    yield (
        "XTuner recomputes a share of the language layers (recompute_ratio), here all or none; "
        "what of an encoder is recomputed is for the model's own config to say."
    )
    if plan.model.encoders:
        yield (
            "PresetPackDataset of XTuner (5cda4fb and 5081ed2, xtuner/v1/datasets/preset_pack.py, "
            "__getitem__) hands on of a whole sample only input_ids, labels and num_tokens: ITS "
            "IMAGES ARE LOST, and training goes on without them. xtuner_packs.py, which the "
            "settings import, mends that; check that your version still needs it."
        )


def _notes(given: ExportInput) -> Iterator[str]:
    if given.order is None:
        yield "The plan is of shapes only, without packs to write: plan with --lengths."
        return
    if given.annotations is None:
        yield from _without_data(given.order, given.lengths)
    yield "config.py is yours: the settings above, with the config of your model."
    yield (
        "xtuner_packs.py has not run with XTuner itself, but with a stand-in that has its fields. "
        "It ends a run at the first sample whose tokens are not as many as the plan counted."
    )
    yield (
        "Lines are counted as XTuner counts them where nothing is filtered, which pack_level "
        '"preset" sees to; sample_ratio stays 1.'
    )


def _without_data(order: ScheduledPacks, lengths: Lengths) -> Iterator[str]:
    if record_numbers(order, lengths, None) is None:
        yield (
            "No --data was given, and samples of several sources were skipped by their scan, so "
            "that lines of files are unknown: boundaries.npy, samples.npy and paths.json are left "
            "out. Give the data that the lengths were scanned from."
        )
        return
    yield (
        "No --data was given: paths.json names the sources of the lengths, "
        f"{', '.join(map(repr, lengths.source_names))}. Put the path of each one's JSONL in its "
        "place, as DatasetConfig has it; row k of a source is taken to be its line k."
    )
