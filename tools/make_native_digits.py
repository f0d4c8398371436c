"""Compose scanned digits into a small dataset of images at native resolution, for Qwen3-VL.

Samples as in tools/make_digits_dataset.py, with digits from 26 to 36 pixels wide, and a tokenizer
like Qwen3-VL's: byte-level, with chat template, image and video tokens. A second task, for
adapters, asks for the next digit. Text and tokenizer are deterministic.

    OUTPUT/dataset.json  OUTPUT/tokenizer/{tokenizer.json,tokenizer_config.json,chat_template.jinja}
    OUTPUT/{train,heldout}/{meta.json,SOURCE.jsonl,images/*.png}
    OUTPUT/next/{train,heldout}/{meta.json,digits_next.jsonl,images/*.png}
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.make_digits_dataset import (
    SOURCES,
    Composer,
    Composition,
    Turn,
    dataset_folder,
    run_maker,
    splits,
    training_lines,
    write_split,
)

FORMAT = 2  # incremented when equal arguments give a different dataset
_TASK_RATIO = 4  # samples of the main task per sample of the adapters' task
VOCABULARY = 384  # all bytes, the pieces below, and syllables of the questions
PIECES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
# Equal to Qwen3-VL's template for conversations without tools.
TEMPLATE = "".join(Path(__file__).with_name("native_digits.jinja").read_text("utf-8").splitlines())


class NativeComposer(Composer):
    """Generator of samples with digits of more sizes."""

    cell_pixels = (26, 37)

    def next_digit(self) -> Composition:
        """Return a question for the successor of a digit, 0 after 9."""
        chosen = self.choose(1)
        successor = (int(self.scans.digits[chosen[0]]) + 1) % 10
        turns = [Turn("Which digit comes next?", str(successor), "next")]
        return self._composition([self.draw(chosen, columns=1)], chosen, turns)


def byte_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Return a trained tokenizer in which text round-trips and each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(PIECES),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, texts: Iterator[str]) -> None:
    """Write the tokenizer's files, with the chat template."""
    folder.mkdir()
    byte_tokenizer(texts).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(PIECES[3:]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def make_dataset(output: Path, samples: int, heldout_samples: int, seed: int) -> None:
    """Write the dataset atomically."""
    with dataset_folder(output, FORMAT, samples, heldout_samples, seed) as part:
        for name, scans, count, rng in splits(samples, heldout_samples, seed):
            composer = NativeComposer(scans, rng)
            write_split(part / name, composer, SOURCES, count)
            next_task = {"digits_next": (1.0, NativeComposer.next_digit)}
            write_split(part / "next" / name, composer, next_task, max(count // _TASK_RATIO, 1))
        write_tokenizer(part / "tokenizer", training_lines(part / "train"))


def main(arguments: list[str] | None = None) -> int:
    return run_maker(arguments, __doc__, FORMAT, make_dataset)


if __name__ == "__main__":
    sys.exit(main())
