"""Whether Transformers answers with an exported checkpoint as this project did with the run's.

    ./scripts/quickstart.sh
    python benchmarks/exported_answers.py

Takes the held-out questions that RUN/evaluation.json has answers to, asks them again in
Transformers' InternVLForConditionalGeneration, greedily and one by one, and compares the texts.
Token ids and pixels are made by this project's data path; everything behind them is Transformers'.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track
from transformers import InternVLForConditionalGeneration

from megatron.vlm.checkpoint_identity import open_newest
from megatron.vlm.data import SampleReader
from omnibal.data.annotations import Annotations, Sample
from omnibal.data.chat import answer_end, encode_prompt
from omnibal.data.tokenizer import open_tokenizer
from omnibal.runlog import read_evaluation

QUICKSTART = Path(__file__).parent.parent / "work" / "quickstart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=QUICKSTART / "run")
    parser.add_argument("--exported", type=Path, default=QUICKSTART / "exported")
    parser.add_argument("--eval-data", type=Path, default=QUICKSTART / "digits/heldout/meta.json")
    parser.add_argument(
        "--tokenizer-model", type=Path, default=QUICKSTART / "digits/tokenizer.model"
    )
    parser.add_argument("--questions", type=int, help="only so many (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="as in the evaluation")
    arguments = parser.parse_args()
    evaluation = read_evaluation(arguments.run)
    if evaluation is None:
        sys.exit(f"{arguments.run}: holds no evaluation; run pretrain_vlm.py with --eval-data")
    reader = SampleReader(
        Annotations.open(arguments.eval_data),
        open_tokenizer(arguments.tokenizer_model),
        open_newest(arguments.run).model,
    )
    answered = {(one.sample, one.question): one.answered for one in evaluation.examples}
    asked = [
        (sample, turn)
        for sample, turn in questions(reader.annotations)
        if (sample.identity, sample.turns[turn].question) in answered
    ][: arguments.questions]
    other = InternVLForConditionalGeneration.from_pretrained(arguments.exported).eval()
    same = 0
    for sample, turn in track(asked, "asking in Transformers"):
        theirs = answer(other, reader, sample, turn, arguments.max_new_tokens)
        ours = answered[sample.identity, sample.turns[turn].question]
        same += theirs == ours
        if theirs != ours:
            print(f"{sample.identity}: {sample.turns[turn].question!r}: {ours!r}, there {theirs!r}")
    print(f"{same} of {len(asked)} answers are the same in Transformers")
    sys.exit(same != len(asked))


def questions(annotations: Annotations) -> Iterator[tuple[Sample, int]]:
    """Every turn of every sample."""
    for index in range(len(annotations)):
        sample = annotations[index]
        yield from ((sample, turn) for turn in range(len(sample.turns)))


@torch.inference_mode()
def answer(
    model: InternVLForConditionalGeneration,
    reader: SampleReader,
    sample: Sample,
    turn: int,
    max_new_tokens: int,
) -> str:
    """Transformers' greedy answer to one question."""
    tiles = reader.tiles_per_image(sample)
    prompt = encode_prompt(sample, turn, tiles, reader.model, reader.tokenizer)
    seen = sum(one.question.count("<image>") for one in sample.turns[: turn + 1])
    pixels = reader.pixels([sample])[: sum(tiles[:seen])]
    images = {"pixel_values": pixels} if len(pixels) else {}
    input_ids = torch.from_numpy(prompt).unsqueeze(0)
    end = answer_end(reader.model, reader.tokenizer)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
        **images,
    )
    words = output[0, input_ids.shape[1] :].tolist()
    return reader.tokenizer.decode(words[: words.index(end)] if end in words else words)


if __name__ == "__main__":
    main()
