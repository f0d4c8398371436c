"""Convert released checkpoints (InternVL, Qwen-VL, Llama, Qwen) to this project's and back.

    python tools/convert.py import InternVL2-2B -o imported
    python tools/convert.py import InternVL3-8B --audio whisper-large-v3 -o imported
    python tools/convert.py export run --like InternVL2-2B -o mine
    python tools/convert.py export run --layout transformers --tokenizer-model tokenizer -o mine
    python tools/convert.py export run --adapter --like InternVL3-8B-hf -o adapter

Tensors are read and written a few at a time: no more than about one file's are in memory.
"""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron.vlm.checkpoint.identity import CheckpointIdentity, open_newest
from megatron.vlm.conversion.adapter_files import add_adapter, export_adapter, list_fully_trained
from megatron.vlm.conversion.exporting import plan_export_as, plan_export_like, write_export
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from megatron.vlm.conversion.released_files import SINGLE_FILE, dtype_name
from megatron.vlm.conversion.tensor_map import Layout
from megatron.vlm.conversion.tokenizer_files import TOKENIZER_FOLDER
from megatron.vlm.conversion.whisper import (
    add_audio,
    check_same_encoder,
    export_audio,
    is_whisper,
    open_audio,
)
from omnibal.base.errors import UserError
from omnibal.base.files import check_new_folder
from omnibal.base.outputs import check_folder
from omnibal.base.program import run_app
from omnibal.data.tokenizer import open_tokenizer

_NO_TOKENIZER = (
    "\nnote: no tokenizer goes along, so config.json does not set image_token_id; give one as "
    "--tokenizer-model"
)
_UNITS = {"MB": 10**6, "GB": 10**9}

app = typer.Typer(
    help=__doc__.split("\n\n")[0], add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress bar on stderr: bytes done, rate and time left."""
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="folder of a released checkpoint")],
    output: Annotated[Path, typer.Option("--output", "-o", help="run directory to make")],
    audio: Annotated[
        Path | None,
        typer.Option(help="folder of a released Whisper, whose encoder the model gets"),
    ] = None,
    positions_per_token: Annotated[
        int, typer.Option(min=1, max=4096, help="with --audio: of 20 ms each, that become a token")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="with --audio: of what has no weights yet")] = 0,
    adapter: Annotated[
        Path | None, typer.Option(help="folder of an adapter of that model that PEFT has saved")
    ] = None,
) -> None:
    """Make a run directory of a released checkpoint: weights, model.toml and tokenizer.

    Read are InternVL's own checkpoints (InternVLChatModel, with InternLM2, Llama, Qwen2 or Qwen3,
    dense or with experts), those of Transformers (InternVLForConditionalGeneration), those of
    Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense or with experts, and text-only ones (LlamaForCausalLM,
    Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM). Train from it with
    `pretrain_vlm.py --load RUN --finetune`, under any plan for model.toml.

    With --audio the model gets Whisper's encoder, a projector of its own with first weights, and
    words for recordings, which the tokenizer gets too.

    With --adapter the run has the adapter's matrices beside the weights: a plan with the same rank
    and targets (`omnibal plan --lora-rank ...`) goes on with them.
    """
    inputs = [path for path in (source, audio, adapter) if path is not None]
    check_folder("-o", output, inputs)
    if audio is not None and adapter is not None:
        raise UserError("--adapter does not go with --audio; import the one and then the other")
    check_new_folder(output)
    released = open_released(source)
    print(f"{source}: {released.model.name}, layout {released.layout}, {released.bytes:,} bytes")
    if released.files.unread is not None:
        others = f"those that {released.files.unread} names"
        print(f"note: the weights are those of {SINGLE_FILE}, not {others}")
    wanted = released
    if audio is not None:
        wanted = add_audio(released, audio, positions_per_token, seed)
        print(f"{audio}: {wanted.model.name}, {wanted.bytes:,} bytes with the encoder")
    if adapter is not None:
        wanted = add_adapter(released, adapter)
        assert wanted.adapters is not None
        print(f"{adapter}: rank {wanted.adapters.rank}, {', '.join(wanted.adapters.targets)}")
    with _progress("importing", wanted.bytes) as advance:
        lines = import_checkpoint(wanted, output, advance)
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
        Layout | None,
        typer.Option(
            metavar="LAYOUT", help=f"without --like: names of the tensors, {', '.join(Layout)}"
        ),
    ] = None,
    tokenizer_model: Annotated[
        Path | None,
        typer.Option(
            help=f"without --like: tokenizer to go along (default: RUN/{TOKENIZER_FOLDER})"
        ),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="of the tensors (default: as in --like, or as stored)"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="without --like: of a file")] = "5GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="write the run's adapters alone, in PEFT's format")
    ] = False,
) -> None:
    """Write the weights of a run as a checkpoint that other tools load.

    Adapters are added to the weights that they are beside; with --adapter they are written alone,
    as PEFT opens them on the model of --like, or on one of --layout.

    With --like, everything but the weights is copied from there: configuration, code, tokenizer.
    Where that is a Whisper, the audio encoder alone is written, and its decoder copied too.
    Without it config.json is made from the model; --layout transformers is what
    InternVLForConditionalGeneration loads, and qwen3-vl, qwen2.5-vl, llama, qwen2, qwen3 or
    qwen3-moe what those classes do.
    """
    if (like is None) == (layout is None):
        raise UserError("give either --like CHECKPOINT or --layout NAME, and not both")
    if like is not None and tokenizer_model is not None:
        raise UserError("--tokenizer-model goes with --layout; --like brings its own tokenizer")
    check_folder("-o", output, [path for path in (run, like, tokenizer_model) if path is not None])
    check_new_folder(output)
    stored = open_newest(run)
    if adapter:
        _export_adapter(stored, like, layout, output)
        return
    if like is not None and is_whisper(like):
        _export_audio(stored, like, output, dtype)
        return
    wanted_dtype = None if dtype is None else getattr(torch, dtype)
    note = ""
    if like is not None:
        planned = plan_export_like(stored, open_released(like), wanted_dtype)
    else:
        assert layout is not None  # checked with --like
        folder = run / TOKENIZER_FOLDER
        given = tokenizer_model or (folder if folder.is_dir() else None)
        tokenizer = None if given is None else open_tokenizer(given)
        names_image = not (layout.is_original or layout.is_text_only)
        note = _NO_TOKENIZER if tokenizer is None and names_image else ""
        planned = plan_export_as(stored, layout, wanted_dtype, tokenizer, _bytes(max_shard_size))
    with _progress("exporting", planned.bytes) as advance:
        write_export(planned, output, advance)
    types = {dtype_name(piece.dtype) for file in planned.files for piece in file.pieces}
    print(
        f"wrote {output}: step {stored.step} of {stored.path.parent}, layout {planned.layout}, "
        f"{len(planned.files)} file(s) of {', '.join(sorted(types))}{note}"
    )


def _export_adapter(
    stored: CheckpointIdentity, like: Path | None, layout: Layout | None, output: Path
) -> None:
    opened = None if like is None else open_released(like)
    if opened is not None:
        layout = opened.layout
    assert layout is not None  # checked with --like
    modules = export_adapter(stored, layout, output, None if like is None else str(like))
    print(
        f"wrote {output}: the adapters of step {stored.step} of {stored.path.parent}, beside "
        f"{modules} modules of layout {layout}"
    )
    whole = list_fully_trained(stored)
    if whole:
        print(
            f"note: {', '.join(whole)} was trained whole, which no adapter holds; without "
            "--adapter the whole model is exported, with its adapters in the weights"
        )


def _export_audio(stored: CheckpointIdentity, like: Path, output: Path, dtype: str | None) -> None:
    if dtype is not None:
        raise UserError("--dtype does not go with --like of a Whisper; its types are kept")
    audio = open_audio(like, stored.model, stored.model.audio.positions_per_token)
    check_same_encoder(stored, audio)
    total = sum(path.stat().st_size for path in like.glob("*.safetensors"))
    with _progress("exporting", total) as advance:
        export_audio(stored, audio, output, advance)
    print(
        f"wrote {output}: the audio encoder of step {stored.step} of {stored.path.parent}, and all "
        f"else of {like}"
    )


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(MB|GB)", text)
    if match is None:
        raise UserError(f"--max-shard-size {text}: must be a number of MB or GB, such as 5GB")
    return int(match[1]) * _UNITS[match[2]]


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    sys.exit(128 + number)


def main() -> None:
    # SIGTERM raises as Ctrl-C does, so that partial output is removed.
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        run_app(app, "convert.py")
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()
