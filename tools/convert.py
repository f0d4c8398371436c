"""Convert released InternVL checkpoints to this project's and back.

    python tools/convert.py import InternVL2-2B -o imported
    python tools/convert.py export run --like InternVL2-2B -o mine
    python tools/convert.py export run --layout transformers --tokenizer-model tokenizer -o mine

Tensors are read and written a few at a time: no more than about one file's are in memory.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron.vlm.checkpoint_identity import open_newest
from megatron.vlm.conversion.exporting import (
    Export,
    plan_export_as,
    plan_export_like,
    write_export,
)
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from megatron.vlm.conversion.tensor_map import Layout
from omnibal.data.tokenizer import open_tokenizer
from omnibal.errors import EXIT_USER_ERROR, UserError

_UNITS = {"MB": 10**6, "GB": 10**9}

app = typer.Typer(
    help=__doc__.split("\n\n")[0], no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr of bytes done, their rate and the time left."""
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="folder of a released checkpoint")],
    output: Annotated[Path, typer.Option("--output", "-o", help="run directory to make")],
) -> None:
    """Make a run directory of a released checkpoint: weights, model.toml and tokenizer.

    Read are InternVL's own checkpoints (InternVLChatModel, with InternLM2, Llama or Qwen2) and
    those of Transformers (InternVLForConditionalGeneration). Train from it with
    `pretrain_vlm.py --load RUN --finetune`, under any plan for model.toml.
    """
    released = open_released(source)
    print(f"{source}: {released.model.name}, layout {released.layout}, {released.bytes:,} bytes")
    with _progress("importing", released.bytes) as advance:
        lines = import_checkpoint(released, output, advance)
    print("\n".join(lines))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run directory; its newest checkpoint is taken")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to make")],
    like: Annotated[
        Path | None,
        typer.Option(help="released checkpoint whose files, names and types the copy has"),
    ] = None,
    layout: Annotated[
        Layout | None, typer.Option(help="without --like: names to give the tensors")
    ] = None,
    tokenizer_model: Annotated[
        Path | None, typer.Option(help="without --like: tokenizer that goes with the model")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="of the tensors (default: as in --like, or as stored)"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="without --like: of a file")] = "5GB",
) -> None:
    """Write the weights of a run as a checkpoint that other tools load.

    With --like, everything but the weights is copied from there: configuration, code, tokenizer.
    Without it config.json is made from the model; --layout transformers is what
    InternVLForConditionalGeneration loads.
    """
    if (like is None) == (layout is None):
        raise UserError("give either --like CHECKPOINT or --layout NAME, and not both")
    if like is not None and tokenizer_model is not None:
        raise UserError("--tokenizer-model goes with --layout; --like brings its own tokenizer")
    stored = open_newest(run)
    wanted_dtype = None if dtype is None else getattr(torch, dtype)
    if like is not None:
        planned = plan_export_like(stored, open_released(like), wanted_dtype)
    else:
        tokenizer = None if tokenizer_model is None else open_tokenizer(tokenizer_model)
        planned = plan_export_as(stored, layout, wanted_dtype, tokenizer, _bytes(max_shard_size))
    with _progress("exporting", planned.bytes) as advance:
        write_export(planned, output, advance)
    print(_summary(planned, output))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(MB|GB)", text)
    if match is None:
        raise UserError(f"--max-shard-size {text}: must be a number of MB or GB, such as 5GB")
    return int(match[1]) * _UNITS[match[2]]


def _summary(planned: Export, output: Path) -> str:
    types = {str(piece.dtype) for file in planned.files for piece in file.pieces}
    names = ", ".join(sorted(name.removeprefix("torch.") for name in types))
    return (
        f"wrote {output}: step {planned.stored.step} of {planned.stored.path.parent}, layout "
        f"{planned.layout}, {len(planned.files)} file(s) of {names}"
    )


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
