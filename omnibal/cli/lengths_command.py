"""`omnibal lengths`: count tokens and images of a dataset."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError

import omnibal.cli.options as shared
from omnibal.base.errors import UserError
from omnibal.base.files import is_stream, one_line_error
from omnibal.base.outputs import check_files
from omnibal.base.remote_path import location
from omnibal.base.worker_pool import LocalPool, Pool, usable_cores
from omnibal.cli.console import print_notes, print_result, progress
from omnibal.data.lengths import Lengths, write_lengths
from omnibal.families.named import model_notes, named_model, named_model_file
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import MAX_TILES_OF_IMAGE
from omnibal.model.limits import words

_PARQUET_MAGIC = b"PAR1"  # first bytes of every Parquet file


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSizeOptions:
    max_dynamic_patch: Annotated[
        int | None,
        shared.count_option("max tiles per image (default: the model's)", most=MAX_TILES_OF_IMAGE),
    ] = None
    min_pixels: Annotated[
        int | None, shared.count_option("min pixels, native resolution (default: the model's)")
    ] = None
    max_pixels: Annotated[
        int | None, shared.count_option("max pixels, native resolution (default: the model's)")
    ] = None

    def apply(self, model: ModelConfig) -> ModelConfig:
        max_tiles = self.max_dynamic_patch
        if max_tiles is not None:
            tiling = model.vision.tiling
            if max_tiles < tiling.min_dynamic_patch:
                raise UserError(f"--max-dynamic-patch must be {tiling.min_dynamic_patch} or more")
            tiling = tiling.model_copy(update={"max_dynamic_patch": max_tiles})
            model = model.with_tower("vision", tiling=tiling)
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        pixels = {name: limit for name, limit in limits.items() if limit is not None}
        return self._set_pixels(model, pixels) if pixels else model

    @staticmethod
    def _set_pixels(model: ModelConfig, pixels: dict[str, int]) -> ModelConfig:
        options = words([f"--{name.replace('_', '-')}" for name in pixels])
        tower = model.images
        if tower is None:
            raise UserError(f"{options}: {model.name} has no native-resolution images; omit it")
        if tower.resize == "fixed":
            side = math.isqrt(tower.max_pixels)
            raise UserError(f"{options}: all images are {side} x {side} pixels; leave it out")
        try:
            # `model_copy` would not validate that min_pixels <= max_pixels.
            changed = tower.model_validate(tower.model_dump() | pixels)
        except ValidationError as error:
            raise one_line_error(error, options, "give others") from error
        (name,) = (name for name, encoder in model.encoders.items() if encoder is tower)
        return model.model_copy(update={"encoders": model.encoders | {name: changed}})


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    processes: shared.ProcessesOption = None
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="processes here, or a Ray cluster")
    ] = "local"
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ray cluster (default: found by Ray)")
    ] = None

    @contextmanager
    def open_pool(self) -> Iterator[Pool]:
        if self.engine == "local":
            if self.address is not None:
                raise UserError("--address needs --engine ray: add it, or leave --address out")
            yield LocalPool(self.processes or usable_cores())
            return
        from omnibal.base.ray_pool import ray_pool

        if self.processes is not None:  # Ray counts cores itself
            raise UserError(
                "--processes does not go with --engine ray, which takes all cores of the cluster: "
                "leave it out, or start the nodes with fewer (`ray start --num-cpus`)"
            )
        with ray_pool(self.address) as pool:
            yield pool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanOptions:
    data_index: Annotated[
        Path | None, typer.Option(help="index to write or extend, to open large data fast")
    ] = None
    data_root: shared.DataRootOption = None
    template: shared.TemplateOption = None
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="at a bad sample: stop, or list it")
    ] = "stop"


def lengths(
    meta: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help="annotations or meta JSON, path or URL", parser=location
        ),
    ],
    model: shared.ModelOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write")],
    image_sizes: ImageSizeOptions,
    pool: PoolOptions,
    scan: ScanOptions,
    tokenizer_model: shared.TokenizerOption = None,
    as_json: shared.JsonOption = False,
) -> None:
    """Count tokens and images of every sample of a dataset.

    Formats: ms-swift (also its cached datasets), LLaMA-Factory, Qwen-VL, InternVL and LLaVA
    (docs/data.md).
    """
    from omnibal.data.external_lengths import cached_folder
    from omnibal.report.plan_tables import sources_table

    start = time.perf_counter()
    is_file = output.is_file() and not is_stream(output)
    if is_file and output.stat().st_size and not is_parquet(output):
        # Not a result of an earlier scan: it may be the user's data.
        raise UserError(f"-o {output}: exists and is not Parquet; move it or choose another -o")
    config = image_sizes.apply(named_model(model))
    if scan.template is not None:
        config = config.model_copy(update={"chat_template": scan.template})
    if scan.template not in (None, "tokenizer") and config.tiling is not None:
        # InternVL's own templates go with its own tiling.
        own_tiles = config.tiling.model_copy(update={"by_processor": False})
        config = config.with_tower("vision", tiling=own_tiles)
    if cached_folder(meta) is not None:
        given = {"--tokenizer-model": tokenizer_model, "--template": scan.template}
        for option, value in given.items():
            if value is not None:
                raise UserError(f"{option} was given, and {meta} has counted tokens: leave it out")
        counted, skipped, skipped_list = _convert_cached(meta, model, config, output), 0, None
    elif tokenizer_model is None:
        raise UserError(
            f"--tokenizer-model was not given, and {meta} holds text that is to be counted: name "
            "the model's tokenizer.json, tokenizer.model, or a folder with one"
        )
    else:
        arguments = meta, model, config, tokenizer_model, output, pool, scan
        try:
            counted, skipped, skipped_list = _scan(*arguments)
        except KeyboardInterrupt as error:
            sys.stderr.write("interrupted: run the same command again to resume\n")
            raise SystemExit(130) from error
    *by_source, all_samples = counted.statistics_by_source()
    result = {
        "samples": len(counted),
        "seconds": time.perf_counter() - start,
        "skipped": skipped,
        "skipped_list": str(skipped_list) if skipped and skipped_list else None,
        "sources": by_source,
    }
    print_result(as_json, result, sources_table([*by_source, all_samples]))


def _convert_cached(meta: Path, model: str, config: ModelConfig, output: Path) -> Lengths:
    """Write and return lengths from the token counts of ms-swift's cached dataset."""
    from omnibal.data.external_lengths import cached_files, read_cached_lengths, read_cached_tokens

    check_files({"-o": output}, [*cached_files(meta), named_model_file(model)])
    print_notes(model_notes(model))
    tokens = read_cached_tokens(meta)
    with progress("reading", len(tokens)) as advance:
        counted = read_cached_lengths(meta, tokens, config, advance)
    print_notes(["the dataset does not mark tokens with loss: all are counted as such"], prefix="")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_lengths(counted, output)
    return counted


def _scan(
    meta: Path,
    model: str,
    config: ModelConfig,
    tokenizer_path: Path,
    output: Path,
    pool_options: PoolOptions,
    options: ScanOptions,
) -> tuple[Lengths, int, Path | None]:
    """Scan, write and return lengths, the number of skipped samples, and the file listing them."""
    from omnibal.data.annotations import Annotations
    from omnibal.data.data_index import DataIndex
    from omnibal.data.scan import scan_key, scan_lengths, skipped_notes, write_skipped
    from omnibal.data.scan_journal import ScanJournal
    from omnibal.data.tokenizer import list_tokenizer_files, open_tokenizer

    keeps_files = not is_stream(output)  # a pipe has no folder for a journal to resume from
    skipped_list = output.with_name(f"{output.name}.skipped.txt")
    partial = output.with_name(f"{output.name}.partial")
    outputs: dict[str, Path | None] = {"-o": output, "--data-index": options.data_index}
    if keeps_files:
        outputs |= {"the list next to -o": skipped_list, "the journal next to -o": partial}
    check_files(outputs, [meta, named_model_file(model), *list_tokenizer_files(tokenizer_path)])
    print_notes(model_notes(model))
    tokenizer = open_tokenizer(tokenizer_path)
    with pool_options.open_pool() as pool:
        index = DataIndex(pool=pool, progress=progress)
        if options.data_index is not None:
            index = DataIndex.resume(options.data_index, pool, progress)
        annotations = Annotations.open(meta, index, below=options.data_root)
        check_files(outputs, annotations.files)  # known only now: the meta JSON names them
        is_own = config.chat_template == "tokenizer"
        rule = f"the chat template of {tokenizer_path}" if is_own else config.chat_template
        print_notes([f"conversations are written by {rule}"])
        output.parent.mkdir(parents=True, exist_ok=True)
        key = scan_key(config, tokenizer)
        journal = ScanJournal.open(partial, key, annotations) if keeps_files else None
        print_notes(journal.notes(len(annotations)) if journal else (), prefix="")
        with progress("scanning", len(annotations)) as advance:
            scan = scan_lengths(
                annotations, config, tokenizer, advance,
                pool=pool, on_error=options.on_error, journal=journal,
            )  # fmt: skip
    if keeps_files:
        write_skipped(scan.skipped, skipped_list)
    write_lengths(scan.lengths, output)
    if journal is not None:
        journal.remove()  # last: until then, a kill loses no counts
    written_list = skipped_list if keeps_files else None
    print_notes(skipped_notes(scan.skipped, written_list), prefix="")
    return scan.lengths, len(scan.skipped), written_list


def is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
