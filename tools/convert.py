"""Convert released checkpoints (InternVL, Qwen-VL, Llama, Qwen) to this project's and back.

    python tools/convert.py import InternVL2-2B -o imported
    python tools/convert.py import InternVL3-8B --audio whisper-large-v3 -o imported
    python tools/convert.py export run --like InternVL2-2B -o mine
    python tools/convert.py export run --layout transformers --tokenizer-model tokenizer -o mine
    python tools/convert.py export run --adapter --like InternVL3-8B-hf -o adapter

Memory is about one file's tensors: they are streamed.
"""

import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import torch
import typer

from megatron.vlm.checkpoint.identity import CheckpointIdentity, open_newest
from megatron.vlm.conversion.adapter_files import add_adapter, export_adapter, list_fully_trained
from megatron.vlm.conversion.exporting import plan_export_as, plan_export_like, write_export
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from megatron.vlm.conversion.released_files import SINGLE_FILE, dtype_name
from megatron.vlm.conversion.tensor_map import TensorLayout
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
from omnibal.cli.console import progress
from omnibal.data.tokenizer import open_tokenizer

_NO_TOKENIZER = (
    "\nnote: without a tokenizer, config.json does not set image_token_id; give --tokenizer-model"
)
_UNITS = {"MB": 10**6, "GB": 10**9}

app = typer.Typer(help=__doc__.split("\n\n")[0], add_completion=False)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="folder of a released checkpoint")],
    output: Annotated[Path, typer.Option("--output", "-o", help="run directory to make")],
    audio: Annotated[
        Path | None,
        typer.Option(help="folder of a released Whisper, to add its encoder"),
    ] = None,
    positions_per_token: Annotated[
        int, typer.Option(min=1, max=4096, help="with --audio: positions of 20 ms per token")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="with --audio: seed of new weights")] = 0,
    adapter: Annotated[
        Path | None, typer.Option(help="folder of the model's adapter, saved by PEFT")
    ] = None,
) -> None:
    """Make a run directory of a released checkpoint: weights, model.toml and tokenizer.

    Supported are InternVL's own checkpoints (InternVLChatModel with InternLM2, Llama, Qwen2 or
    Qwen3, dense or with experts), Transformers' (InternVLForConditionalGeneration), Qwen2-VL,
    Qwen2.5-VL and Qwen3-VL, dense or with experts, and text-only models (LlamaForCausalLM,
    Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM). Train from it with
    `pretrain_vlm.py --load RUN --finetune`, under any plan for model.toml.

    --audio adds Whisper's encoder, a projector with initial weights, and tokens for recordings.

    --adapter adds the adapter's matrices: a plan with the same rank and targets (`omnibal plan
    --lora-rank ...`) continues to train them.
    """
    inputs = [path for path in (source, audio, adapter) if path is not None]
    check_folder("-o", output, inputs)
    if audio is not None and adapter is not None:
        raise UserError("--adapter and --audio are exclusive; drop one")
    check_new_folder(output)
    released = open_released(source)
    print(f"{source}: {released.model.name}, layout {released.layout}, {released.bytes:,} bytes")
    if released.files.unread is not None:
        print(
            f"note: weights are from {SINGLE_FILE}, not from the files in {released.files.unread}"
        )
    checkpoint = released
    if audio is not None:
        checkpoint = add_audio(released, audio, positions_per_token, seed)
        print(f"{audio}: {checkpoint.model.name}, {checkpoint.bytes:,} bytes with the encoder")
    if adapter is not None:
        checkpoint = add_adapter(released, adapter)
        assert checkpoint.adapters is not None
        adapters = checkpoint.adapters
        print(f"{adapter}: rank {adapters.rank}, {', '.join(adapters.targets)}")
    with progress("importing, bytes", checkpoint.bytes) as advance:
        lines = import_checkpoint(checkpoint, output, advance)
    print("\n".join(lines))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="run directory; uses its newest checkpoint")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder to make")],
    like: Annotated[
        Path | None,
        typer.Option(help="released checkpoint, for the files, names and types"),
    ] = None,
    layout: Annotated[
        TensorLayout | None,
        typer.Option(
            metavar="LAYOUT", help=f"without --like: tensor names, {', '.join(TensorLayout)}"
        ),
    ] = None,
    tokenizer_model: Annotated[
        Path | None,
        typer.Option(help=f"without --like: tokenizer (default: RUN/{TOKENIZER_FOLDER})"),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="type of the tensors (default: as in --like, or as stored)"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="without --like: max size of a file")] = "5GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="write only the run's adapters, in PEFT's format")
    ] = False,
) -> None:
    """Write the weights of a run as a checkpoint for other tools.

    Adapters are merged into the weights; with --adapter only they are written, for PEFT and the
    model of --like or --layout.

    With --like, all other files are copied from there: configuration, code, tokenizer. If it is a
    Whisper, only the audio encoder is written, and its decoder copied. Without it config.json is
    made from the model; --layout transformers is for InternVLForConditionalGeneration, and
    qwen3-vl, qwen2.5-vl, llama, qwen2, qwen3 or qwen3-moe for the classes of these names.
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
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    note = ""
    if like is not None:
        planned = plan_export_like(stored, open_released(like), torch_dtype)
    else:
        assert layout is not None  # checked with --like
        folder = run / TOKENIZER_FOLDER
        path = tokenizer_model or (folder if folder.is_dir() else None)
        tokenizer = None if path is None else open_tokenizer(path)
        # Other layouts' config.json has no image_token_id.
        names_image = not (layout.is_original or layout.is_text_only)
        note = _NO_TOKENIZER if tokenizer is None and names_image else ""
        shard_bytes = _parse_bytes(max_shard_size)
        planned = plan_export_as(stored, layout, torch_dtype, tokenizer, shard_bytes)
    with progress("exporting, bytes", planned.bytes) as advance:
        write_export(planned, output, advance)
    types = {dtype_name(piece.dtype) for file in planned.files for piece in file.pieces}
    print(
        f"wrote {output}: step {stored.step} of {stored.path.parent}, layout {planned.layout}, "
        f"{len(planned.files)} file(s) of {', '.join(sorted(types))}{note}"
    )


def _export_adapter(
    stored: CheckpointIdentity, like: Path | None, layout: TensorLayout | None, output: Path
) -> None:
    if like is not None:
        layout = open_released(like).layout
    assert layout is not None  # checked with --like
    modules = export_adapter(stored, layout, output, None if like is None else str(like))
    print(
        f"wrote {output}: the adapters of step {stored.step} of {stored.path.parent}, on "
        f"{modules} modules of layout {layout}"
    )
    full = list_fully_trained(stored)
    if full:
        print(
            f"note: weights of {', '.join(full)} were trained too, and are not in the adapter; "
            "export without --adapter for the model with merged adapters"
        )


def _export_audio(stored: CheckpointIdentity, like: Path, output: Path, dtype: str | None) -> None:
    if dtype is not None:
        raise UserError("--dtype and --like of a Whisper are exclusive; drop --dtype")
    audio = open_audio(like, stored.model, stored.model.audio.positions_per_token)
    check_same_encoder(stored, audio)
    total = sum(path.stat().st_size for path in like.glob("*.safetensors"))
    with progress("exporting, bytes", total) as advance:
        export_audio(stored, audio, output, advance)
    print(
        f"wrote {output}: the audio encoder of step {stored.step} of {stored.path.parent}, and the "
        f"other files of {like}"
    )


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)(MB|GB)", text)
    if match is None:
        raise UserError(f"--max-shard-size must be a number of MB or GB, such as 5GB, got {text}")
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
