"""Greedy answers to held-out questions, through the training pipeline.

Every turn of a sample is one question, with reference answers of earlier turns as context. An
answer counts only if it equals the reference.

Shapes: A answers wanted in a micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat, takewhile

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape, MicroBatchStream
from megatron.vlm.inputs.native_images import asked_fields, shown_cells
from megatron.vlm.inputs.reader import Prompt, SampleReader
from megatron.vlm.step.train import Trainer
from omnibal.data.chat import expected_answer
from omnibal.data.sample import Sample
from omnibal.job.runlog import EvaluatedAnswer, Evaluation, KindAccuracy
from omnibal.model.limits import Caps
from omnibal.pipeline.stage import Stage

_KIND_OF_PLAIN_DATA = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A turn of a sample, with the answer so far."""

    sample: Sample
    turn: int
    prompt: Prompt
    items: dict[str, int]
    """Items of every kind up to the turn, as named in caps."""
    answer_ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.answer_ids)

    @classmethod
    def of(
        cls, reader: SampleReader, sample: Sample, turn: int, room: int, *, chatting: bool = False
    ) -> "Question":
        """Encode a turn's question; `room` and `chatting` as in `SampleReader.prompt`."""
        prompt = reader.prompt(sample, turn, room, chatting)
        cells = shown_cells(prompt.shown, reader.model.images)
        items = {"tiles": prompt.tiles, "clips": prompt.clips, "image_tokens": cells}
        return cls(sample=sample, turn=turn, prompt=prompt, items=items)


def evaluate(
    trainer: Trainer,
    caps: Caps,
    reader: SampleReader,
    step: int,
    on_progress: Callable[[int, int], None],
    *,
    samples: int,
    max_new_tokens: int,
) -> Evaluation:
    """Ask all questions and compare answers within `caps`; collective, with equal results on all
    ranks.

    Args:
        on_progress: receives (answered, total) questions of this rank.
        samples: number of samples, evenly spaced over the held-out data.
    """
    data_ranks = trainer.plan.parallel.data
    questions = list(_questions(reader, samples, max_new_tokens))
    own = questions[parallel_state.get_data_parallel_rank() :: data_ranks]
    waves = _waves(own, caps, micro_batches=2 * trainer.links.size, room=max_new_tokens)
    answered = 0
    with trainer.evaluating():
        # A rank without questions runs empty waves until all lockstep ranks are done.
        for wave in chain(waves, repeat([])):
            if not trainer.most_in_lockstep(len(wave)):
                break
            _answer(trainer, reader, wave, max_new_tokens)
            answered += sum(map(len, wave))
            on_progress(answered, len(own))
    shares: list[list[EvaluatedAnswer]] = [[] for _ in range(data_ranks)]
    results = [_compared(question, reader) for question in own]
    dist.all_gather_object(shares, results, group=parallel_state.get_data_parallel_group())
    return _scored([answer for share in shares for answer in share], step)


def _questions(reader: SampleReader, samples: int, max_new_tokens: int) -> Iterator[Question]:
    total = len(reader.annotations)
    for index in np.linspace(0, total - 1, min(samples, total)).round().astype(int):
        sample = reader.shown_sample(reader.annotations[int(index)])
        for turn in range(len(sample.turns)):
            yield Question.of(reader, sample, turn, max_new_tokens)


def _waves(
    questions: Sequence[Question], caps: Caps, micro_batches: int, room: int
) -> Iterator[list[list[Question]]]:
    """Split questions into waves of a few pipelines of micro-batches, within the caps if
    possible."""
    groups: list[list[Question]] = []
    filled: Counter[str] = Counter()
    for question in questions:
        needed = Counter({**question.items, "tokens": question.tokens + room})
        if not groups or any(filled[name] + needed[name] > caps[name] for name in caps.names):
            groups.append([])
            filled.clear()
        groups[-1].append(question)
        filled.update(needed)
    remaining = iter(groups)
    while wave := list(islice(remaining, micro_batches)):
        yield wave


def _answer(
    trainer: Trainer, reader: SampleReader, wave: list[list[Question]], max_new_tokens: int
) -> None:
    """Generate `answer_ids` of the wave's questions; finished questions leave the next round."""
    samples = {question.sample for group in wave for question in group}
    media = Media.of(reader, samples, trainer.forward_units)
    active, links = wave, trainer.links
    for _ in range(max_new_tokens):
        slots = trainer.most_in_lockstep(len(active))
        if not slots:
            break
        batches = MicroBatchStream(
            batches=(micro_batch(group, media, reader) for group in active),
            shapes=[_shape(group) for group in active],
        )
        outputs = trainer.run_forward(trainer.joining(batches, slots, answers=True))
        asked = [question for group in active for question in group]
        # From the last stage, so that all stages continue alike.
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
    items = {n: sum(question.items[n] for question in group) for n in group[0].items}
    return MicroBatchShape(**items, tokens=sum(question.tokens for question in group))


@dataclass(frozen=True, slots=True)
class Media:
    """Encoder inputs by sample."""

    pixels: dict[Sample, torch.Tensor] = field(default_factory=dict)
    patches: dict[Sample, torch.Tensor] = field(default_factory=dict)
    frames: dict[Sample, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: SampleReader, samples: Iterable[Sample], units: Stage) -> "Media":
        """Read the inputs that these units embed."""
        media = cls()
        for one in samples:
            if units.holds("vision embed") and reader.model.images is not None:
                media.patches[one] = reader.patches(one, reader.shown(one))
            elif units.holds("vision embed"):
                media.pixels[one] = reader.pixels([one])
            if units.holds("audio embed"):
                media.frames[one] = torch.from_numpy(reader.clips(one))
        return media


def micro_batch(group: list[Question], media: Media, reader: SampleReader) -> MicroBatch:
    """Return questions with their answers so far, and `media` if encoders run."""
    prompts = [question.prompt for question in group]
    ids = [np.concatenate([q.prompt.token_ids, np.array(q.answer_ids, np.int64)]) for q in group]
    token_ids = np.concatenate(ids)
    segment_tokens = tuple(len(one) for one in ids)
    # A generated image placeholder token shows no image.
    asked = [np.concatenate([q.prompt.token_ids, np.full(len(q.answer_ids), -1)]) for q in group]
    asked_S = torch.from_numpy(np.concatenate(asked))
    pixels = [media.pixels[q.sample][: q.prompt.tiles] for q in group if media.pixels]
    frames = [media.frames[q.sample][: q.prompt.clips] for q in group if media.frames]
    patches = [media.patches[q.sample] for q in group if media.patches]
    answered = [len(question.answer_ids) for question in group]
    return MicroBatch(
        tiles=sum(prompt.tiles for prompt in prompts),
        clips=sum(prompt.clips for prompt in prompts),
        tokens=len(token_ids),
        segment_tokens=segment_tokens,
        pixels_TCPP=torch.cat(pixels) if pixels else None,
        token_ids_S=torch.from_numpy(token_ids),
        frames_CBF=torch.cat(frames) if frames else None,
        image_positions_M=reader.image_positions(asked_S),
        audio_positions_N=reader.audio_positions(asked_S),
        answer_positions_A=torch.from_numpy(np.cumsum(segment_tokens) - 1),
        **asked_fields(reader, list(zip(prompts, answered, strict=True)), patches),
    ).to(current_device())


def _compared(question: Question, reader: SampleReader) -> EvaluatedAnswer:
    turn = question.sample.turns[question.turn]
    end = reader.answer_end
    words = list(takewhile(end.__ne__, question.answer_ids))
    return EvaluatedAnswer(
        sample=question.sample.identity,
        question=turn.question,
        expected=expected_answer(turn.answer, reader.model, reader.tokenizer),
        answered=reader.tokenizer.decode(words),
        kind=turn.kind or _KIND_OF_PLAIN_DATA,
    )


def _scored(answers: list[EvaluatedAnswer], step: int) -> Evaluation:
    by_kind: dict[str, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        by_kind[answer.kind].append(answer)
    kinds = []
    for kind, members in sorted(by_kind.items(), key=lambda item: (-len(item[1]), item[0])):
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
