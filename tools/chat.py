"""Ask a trained or imported model a question, with or without images, videos or recordings.

    python tools/chat.py --load run --image page.png --prompt "What does the page say?"

To try a checkpoint, not to serve it: one process holds the model, and decodes greedily without a
key-value cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import typer

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.conversion.tokenizer_files import TOKENIZER_FOLDER
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.run.generate import generate, load_whole_model
from megatron.vlm.run.launch import RankLaunch, initialize_distributed, shut_down_distributed
from omnibal.base.errors import UserError
from omnibal.base.frozen import MAX_COUNT
from omnibal.base.program import run_app
from omnibal.cli.help_groups import with_groups
from omnibal.data.annotations import Annotations, video_at
from omnibal.data.chat import check_tokenizer
from omnibal.data.sample import AUDIO, IMAGE, VIDEO, Sample, Turn
from omnibal.data.stored_files import AudioFile, ImageFile
from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from omnibal.model.config import PlainPrecision
from omnibal.model.parallel import Parallel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass
class MediaFiles:
    """Media of the question."""

    image: Annotated[list[Path] | None, typer.Option(help="image file; repeatable")] = None
    video: Annotated[
        list[Path] | None, typer.Option(help="video file or folder of frames; repeatable")
    ] = None
    audio: Annotated[list[Path] | None, typer.Option(help="WAV or FLAC file; repeatable")] = None


@app.command(help=__doc__.split("\n\n")[0])
@with_groups
def chat(
    load: Annotated[Path, typer.Option(help="run directory; uses its newest checkpoint")],
    prompt: Annotated[
        str,
        typer.Option(
            help=f"the question; {IMAGE}, {VIDEO} and {AUDIO} in it place files, else they come "
            "first"
        ),
    ],
    media: MediaFiles,
    tokenizer_model: Annotated[
        Path | None, typer.Option(help=f"tokenizer (default: the run's {TOKENIZER_FOLDER} folder)")
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message (default: model's)")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MAX_COUNT)] = 256,
    precision: Annotated[PlainPrecision, typer.Option(help="precision of the model")] = "bf16",
) -> None:
    checkpoint = open_newest(load)
    if tokenizer_model is None and not (load / TOKENIZER_FOLDER).is_dir():
        raise UserError(f"{load}: has no folder {TOKENIZER_FOLDER}; give --tokenizer-model")
    tokenizer = open_tokenizer(tokenizer_model or load / TOKENIZER_FOLDER)
    check_tokenizer(checkpoint.model, tokenizer)
    sample = _make_sample(prompt, media, system)
    # Generation gets the sample itself, and does not index the annotations.
    reader = SampleReader(cast(Annotations, [sample]), tokenizer, checkpoint.model)
    # Raises for missing files and too long a text before the model is loaded.
    reader.prompt(sample, 0, max_new_tokens, chatting=True)
    initialize_distributed(
        RankLaunch(rank=0, world_size=1, local_rank=0), Parallel(pipeline=1), seed=0
    )
    try:
        model = load_whole_model(checkpoint, precision)
        _print_answer(generate(model, reader, sample, max_new_tokens), tokenizer)
    finally:
        shut_down_distributed()


def _print_answer(ids: Iterator[int], tokenizer: Tokenizer) -> None:
    answer: list[int] = []
    printed = ""
    for token in ids:
        answer.append(token)
        # A character may take several tokens: incomplete characters are not printed yet.
        text = tokenizer.decode(answer).rstrip("\N{REPLACEMENT CHARACTER}")
        print(text[len(printed) :], end="", flush=True)
        printed = text
    print()


def _make_sample(prompt: str, media: MediaFiles, system: str | None) -> Sample:
    images, videos, audio = (files or [] for files in (media.image, media.video, media.audio))
    # Marks are prepended: images come first, then videos, then recordings.
    for mark, option, files in ((AUDIO, "audio", audio), (VIDEO, "video", videos)):
        if files:
            prompt = _place_marks(prompt, mark, option, files)
    prompt = _place_marks(prompt, IMAGE, "image", images)
    return Sample(
        identity="prompt",
        source="prompt",
        where="--prompt",
        images=tuple(ImageFile(path) for path in images),
        videos=tuple(map(video_at, videos)),
        turns=(Turn(prompt, "", None),),
        recordings=tuple(AudioFile(path) for path in audio),
        system=system,
    )


def _place_marks(prompt: str, mark: str, option: str, files: list[Path]) -> str:
    """Prepend a mark for each file unless the prompt has marks."""
    placed = prompt.count(mark)
    if placed not in (0, len(files)):
        raise UserError(
            f"--prompt has {placed} {mark} for {len(files)} --{option}; write one for each, or none"
        )
    missing = [path for path in files if not (path.is_file() or (mark == VIDEO and path.is_dir()))]
    if missing:
        raise UserError(f"--{option} {missing[0]}: is not a file; correct the path")
    if placed or not files:
        return prompt
    # InternVL's prompts: several images are numbered, a single one is not.
    noun = option.capitalize()
    names = [f"{noun}-{k}: " for k in range(1, len(files) + 1)] if len(files) > 1 else [""]
    return "".join(f"{name}{mark}\n" for name in names) + prompt


def main() -> None:
    run_app(app, "chat.py")


if __name__ == "__main__":
    main()
