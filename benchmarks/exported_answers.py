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

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.inputs.reader import SampleReader
from omnibal.data.annotations import Annotations
from omnibal.data.sample import Sample
from omnibal.data.tokenizer import open_tokenizer
from omnibal.job.runlog import read_evaluation

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
    turns = dict(turns_by_question(reader))
    answers = evaluation.examples[: arguments.questions]
    unknown = [one for one in answers if (one.sample, one.question) not in turns]
    if unknown or not answers:
        sys.exit(f"{arguments.run}: the evaluation is not of {arguments.eval_data}")
    other = InternVLForConditionalGeneration.from_pretrained(arguments.exported).eval()
    same = 0
    for ours in track(answers, "asking in Transformers"):
        sample, turn = turns[ours.sample, ours.question]
        theirs = answer(other, reader, sample, turn, arguments.max_new_tokens)
        same += theirs == ours.answered
        if theirs != ours.answered:
            print(f"{ours.sample}: {ours.question!r}: {ours.answered!r}, there {theirs!r}")
    print(f"{same} of {len(answers)} answers are the same in Transformers")
    sys.exit(same != len(answers))


def turns_by_question(
    reader: SampleReader,
) -> Iterator[tuple[tuple[str, str], tuple[Sample, int]]]:
    """Every turn of every sample, under the names that an evaluation gives them."""
    for index in range(len(reader.annotations)):
        sample = reader.annotations[index].shown(reader.model.vision.tiling)
        for turn, asked in enumerate(sample.turns):
            yield (sample.identity, asked.question), (sample, turn)


@torch.inference_mode()
def answer(
    model: InternVLForConditionalGeneration,
    reader: SampleReader,
    sample: Sample,
    turn: int,
    max_new_tokens: int,
) -> str:
    """Transformers' greedy answer to one question."""
    prompt = reader.prompt(sample, turn, max_new_tokens)
    pixels = reader.pixels([sample])[: prompt.tiles]
    images = {"pixel_values": pixels} if len(pixels) else {}
    input_ids = torch.from_numpy(prompt.token_ids).unsqueeze(0)
    end = reader.answer_end
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
