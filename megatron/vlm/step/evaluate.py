"""Loss on held-out packs, and greedy answers to held-out questions, in the training pipeline.

Every turn of a sample is one question, with reference answers of earlier turns as context. An
answer is correct only if its text equals the reference.

Shapes: A questions of a micro-batch.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat, takewhile
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape, MicroBatchStream, encoder_inputs
from megatron.vlm.inputs.reader import Prompt, SampleReader
from megatron.vlm.step.train import SeenBatches, Trainer, global_sums
from omnibal.data.chat import expected_answer
from omnibal.data.sample import Sample
from omnibal.job.runlog import EvaluatedAnswer, Evaluation, KindAccuracy, ValidationRecord
from omnibal.model.limits import Caps
from omnibal.pipeline.stage_units import Stage

_DEFAULT_KIND = "all"

# By sample and field of a micro-batch. Empty if no encoder runs.
EncoderInputs: TypeAlias = Mapping[Sample, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Held-out packs of this data-parallel rank; may be empty."""

    interval: int  # steps between validations
    batches: Callable[[], MicroBatchStream]  # reads the packs from the start, for this stage
    slots: int = 0  # minimum micro-batches, with empty micro-batches for lockstep ranks


def validate(trainer: Trainer, validation: Validation, step: int) -> ValidationRecord:
    """Return the weighted mean loss over all ranks' held-out packs, and its tokens; collective."""
    started = time.perf_counter()
    seen = SeenBatches()
    batches = seen.count(trainer.append_empty(validation.batches(), validation.slots))
    with trainer.evaluating():
        losses = trainer.run_forward(batches)
    sums = global_sums(trainer.links, losses, seen)
    return ValidationRecord(
        step=step,
        loss=sums.mean_loss,
        loss_tokens=int(sums.loss_tokens),
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    sample: Sample
    turn: int  # index of the asked turn in the sample
    prompt: Prompt
    answer_ids: list[int] = field(default_factory=list)  # generated so far, with the end token

    @property
    def tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.answer_ids)


def evaluate_answers(
    trainer: Trainer,
    caps: Caps,
    reader: SampleReader,
    step: int,
    on_progress: Callable[[int, int], None],
    *,
    samples: int,
    max_new_tokens: int,
) -> Evaluation:
    """Return accuracy by kind of question, and all answers, equal on all ranks; collective.

    Args:
        caps: limits of a micro-batch, summed over its questions, with `max_new_tokens` each.
        on_progress: receives (answered, total) questions of this data-parallel rank.
        samples: number of samples, evenly spaced over the held-out data.
    """
    data_ranks = trainer.plan.parallel.data
    questions = list(_list_questions(reader, samples, max_new_tokens))
    own = questions[parallel_state.get_data_parallel_rank() :: data_ranks]
    waves = _split_waves(own, caps, micro_batches=2 * trainer.links.size, room=max_new_tokens)
    answered = 0
    with trainer.evaluating():
        # A rank without questions runs empty waves until all lockstep ranks are done.
        for wave in chain(waves, repeat([])):
            if not trainer.max_in_lockstep(len(wave)):
                break
            _answer_wave(trainer, reader, wave, max_new_tokens)
            answered += sum(map(len, wave))
            on_progress(answered, len(own))
    shares: list[list[EvaluatedAnswer]] = [[] for _ in range(data_ranks)]
    results = []
    for question in own:
        turn = question.sample.turns[question.turn]
        words = takewhile(reader.answer_end.__ne__, question.answer_ids)
        results.append(
            EvaluatedAnswer(
                sample=question.sample.identity,
                question=turn.question,
                expected=expected_answer(turn.answer, reader.model, reader.tokenizer),
                answered=reader.tokenizer.decode(list(words)),
                kind=turn.kind or _DEFAULT_KIND,
            )
        )
    dist.all_gather_object(shares, results, group=parallel_state.get_data_parallel_group())
    return _score_answers([answer for share in shares for answer in share], step)


def _list_questions(reader: SampleReader, samples: int, max_new_tokens: int) -> Iterator[Question]:
    total = len(reader.annotations)
    for index in np.linspace(0, total - 1, min(samples, total)).round().astype(int):
        sample = reader.shown_sample(reader.annotations[int(index)])
        for turn in range(len(sample.turns)):
            prompt = reader.prompt(sample, turn, max_new_tokens)
            yield Question(sample=sample, turn=turn, prompt=prompt)


def _split_waves(
    questions: Sequence[Question], caps: Caps, micro_batches: int, room: int
) -> Iterator[list[list[Question]]]:
    """Yield waves of at most `micro_batches` groups, each within `caps` or a single question."""
    groups: list[list[Question]] = []
    filled: Counter[str] = Counter()  # of the last group, by feature
    for question in questions:
        needed = Counter({**question.prompt.items, "tokens": question.tokens + room})
        if not groups or any(filled[name] + needed[name] > caps[name] for name in caps.names):
            groups.append([])
            filled.clear()
        groups[-1].append(question)
        filled.update(needed)
    remaining = iter(groups)
    while wave := list(islice(remaining, micro_batches)):
        yield wave


def _answer_wave(
    trainer: Trainer, reader: SampleReader, wave: list[list[Question]], max_new_tokens: int
) -> None:
    """Append generated `answer_ids` to a wave's questions, one token each per round; collective."""
    samples = {question.sample for group in wave for question in group}
    inputs = {sample: read_media(reader, sample, trainer.forward_units) for sample in samples}
    active, links = wave, trainer.links
    # No KV cache: every round runs the whole text again, but media are read once.
    for _ in range(max_new_tokens):
        slots = trainer.max_in_lockstep(len(active))
        if not slots:
            break
        batches = MicroBatchStream(
            batches=(question_batch(group, inputs, reader) for group in active),
            shapes=[_shape(group) for group in active],
        )
        outputs = trainer.run_forward(trainer.append_empty(batches, slots, answers=True))
        asked = [question for group in active for question in group]
        # Broadcast by the last stage, so that all stages continue with the same questions.
        next_ids = torch.zeros(len(asked), dtype=torch.int64, device=current_device())
        if links.is_last:
            next_ids = torch.cat(outputs)
        last_rank = links.ranks[links.stage_of(links.last_part)]
        dist.broadcast(next_ids, last_rank, group=links.activations)
        for question, next_id in zip(asked, next_ids.tolist(), strict=True):
            question.answer_ids.append(next_id)
        end = reader.answer_end
        active = [[q for q in group if q.answer_ids[-1] != end] for group in active]
        active = [group for group in active if group]


def _shape(group: list[Question]) -> MicroBatchShape:
    names = group[0].prompt.items
    items = {name: sum(question.prompt.items[name] for question in group) for name in names}
    return MicroBatchShape(**items, tokens=sum(question.tokens for question in group))


def read_media(reader: SampleReader, sample: Sample, units: Stage) -> dict[str, torch.Tensor]:
    """Return a sample's encoder inputs that `units` embed, by field of `MicroBatch`."""
    media = {}
    if units.holds("vision embed") and reader.model.images is not None:
        media["patches_YX"] = reader.patches(sample, reader.list_shown(sample))
    elif units.holds("vision embed"):
        media["pixels_TCPP"] = reader.pixels(sample)
    if units.holds("audio embed"):
        media["frames_CBF"] = torch.from_numpy(reader.clips(sample))
    return media


def question_batch(
    group: list[Question], inputs: EncoderInputs, reader: SampleReader
) -> MicroBatch:
    """Return a micro-batch of questions with their answers so far, and `inputs` if encoders run."""
    shape, segment_tokens = _shape(group), [question.tokens for question in group]
    prompts = [question.prompt for question in group]
    fields = {
        # Media of later turns are not in the prompt.
        name: torch.cat([inputs[q.sample][name][: q.prompt.items[feature] * rows] for q in group])
        for name, (feature, rows, _) in encoder_inputs(reader.model).items()
        if name in inputs.get(group[0].sample, {})
    }
    answered = [len(question.answer_ids) for question in group]
    # A generated image placeholder token shows no image.
    asked = [
        np.pad(prompt.token_ids, (0, count), constant_values=-1)
        for prompt, count in zip(prompts, answered, strict=True)
    ]
    asked_S = torch.from_numpy(np.concatenate(asked))
    if reader.model.language.rope_sections is not None:
        shown = (prompt.shown for prompt in prompts)
        positions = np.concatenate(list(map(reader.rope_positions, asked, shown, answered)), 1)
        fields["rope_positions_3S"] = torch.from_numpy(positions)
    token_ids = [ids for q in group for ids in (q.prompt.token_ids, np.array(q.answer_ids, int))]
    return MicroBatch(
        tiles=shape.tiles,
        clips=shape.clips,
        image_tokens=shape.image_tokens,
        image_grids=tuple(grid for prompt in prompts for grid, _ in prompt.shown),
        tokens=shape.tokens,
        segment_tokens=tuple(segment_tokens),
        token_ids_S=torch.from_numpy(np.concatenate(token_ids)),
        image_positions_M=reader.image_positions(asked_S),
        audio_positions_N=reader.audio_positions(asked_S),
        answer_positions_A=torch.from_numpy(np.cumsum(segment_tokens) - 1),  # last tokens
        **fields,
    ).to(current_device())


def _score_answers(answers: list[EvaluatedAnswer], step: int) -> Evaluation:
    by_kind: dict[str, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        by_kind[answer.kind].append(answer)
    kinds = []
    for kind, members in sorted(by_kind.items(), key=lambda item: (-len(item[1]), item[0])):
        # Chance: always answering with the most frequent answer.
        most_common = Counter(answer.expected for answer in members).most_common(1)[0][1]
        kinds.append(
            KindAccuracy(
                kind=kind,
                questions=len(members),
                correct=sum(answer.answered == answer.expected for answer in members),
                chance=most_common / len(members),
            )
        )
    return Evaluation(step=step, kinds=tuple(kinds), examples=tuple(answers))
