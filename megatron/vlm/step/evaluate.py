"""Greedy answers to held-out questions, through the same pipeline that trains.

Every turn of a sample is one question, asked with the reference answers of earlier turns as
context. An answer counts when it is exactly the reference.

Shapes: A answers wanted in a micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.vlm.backend import current_device
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape, MicroBatchStream
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.step.schedule import PipelineLinks
from megatron.vlm.step.train import Trainer
from omnibal.data.chat import expected_answer
from omnibal.data.sample import Sample
from omnibal.job.runlog import EvaluatedAnswer, Evaluation, KindAccuracy
from omnibal.model.limits import Caps

_KIND_OF_PLAIN_DATA = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    sample: Sample
    turn: int
    tiles: int
    """Tiles of the images shown up to the turn: the first `tiles` of the sample's."""
    clips: int
    """Clips of the recordings heard up to the turn, likewise."""
    prompt_ids: np.ndarray
    answer_ids: list[int] = field(default_factory=list)
    """Token ids of the answer, appended one by one."""

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOptions:
    """Options of an evaluation: the number of samples and the length of answers."""

    samples: int
    """Number of samples, evenly spaced over the held-out data."""
    max_new_tokens: int


def evaluate(
    trainer: Trainer,
    caps: Caps,
    reader: SampleReader,
    step: int,
    options: EvaluationOptions,
    on_progress: Callable[[int, int], None],
) -> Evaluation:
    """Ask all questions and compare; collective over all ranks, which all get the result.

    Args:
        caps: of a micro-batch of questions, answers included.
        on_progress: receives (questions answered, questions) of this rank's share.
    """
    data_ranks = trainer.plan.parallel.data
    questions = list(_questions(reader, options))
    own = questions[parallel_state.get_data_parallel_rank() :: data_ranks]
    waves = _waves(own, caps, micro_batches=2 * trainer.links.size, room=options.max_new_tokens)
    answered = 0
    with trainer.evaluating():
        # A rank whose questions are done goes on with empty waves while others, in lockstep, have
        # some: there is no end of them until all are done.
        for wave in chain(waves, repeat([])):
            if not trainer.most_in_lockstep(len(wave)):
                break
            _answer(trainer, reader, wave, options.max_new_tokens)
            answered += sum(map(len, wave))
            on_progress(answered, len(own))
    shares: list[list[EvaluatedAnswer]] = [[] for _ in range(data_ranks)]
    results = [_compared(question, reader) for question in own]
    dist.all_gather_object(shares, results, group=parallel_state.get_data_parallel_group())
    return _scored([answer for share in shares for answer in share], step)


def _questions(reader: SampleReader, options: EvaluationOptions) -> Iterator[_Question]:
    total = len(reader.annotations)
    for index in np.linspace(0, total - 1, min(options.samples, total)).round().astype(int):
        sample = reader.annotations[int(index)].shown(reader.model.tiling)
        for turn in range(len(sample.turns)):
            prompt = reader.prompt(sample, turn, options.max_new_tokens)
            yield _Question(
                sample=sample,
                turn=turn,
                tiles=prompt.tiles,
                clips=prompt.clips,
                prompt_ids=prompt.token_ids,
            )


def _waves(
    questions: Sequence[_Question], caps: Caps, micro_batches: int, room: int
) -> Iterator[list[list[_Question]]]:
    """Micro-batches within the caps, answers included, a few pipelines full at a time.

    A question that alone exceeds the caps is asked alone.
    """
    groups: list[list[_Question]] = []
    filled: Counter[str] = Counter()
    for question in questions:
        tokens = question.tokens + room
        needed = Counter(tiles=question.tiles, clips=question.clips, tokens=tokens)
        if not groups or any(filled[name] + needed[name] > caps[name] for name in caps.names):
            groups.append([])
            filled.clear()
        groups[-1].append(question)
        filled.update(needed)
    remaining = iter(groups)
    while wave := list(islice(remaining, micro_batches)):
        yield wave


def _answer(
    trainer: Trainer,
    reader: SampleReader,
    wave: list[list[_Question]],
    max_new_tokens: int,
) -> None:
    """Fill `answer_ids` of the wave's questions; those that have ended leave the next round."""
    pixels: dict[Sample, torch.Tensor] = {}
    frames: dict[Sample, torch.Tensor] = {}
    samples = {question.sample for group in wave for question in group}
    if trainer.forward_stage.holds("vision embed"):
        pixels = {sample: reader.pixels([sample]) for sample in samples}
    if trainer.forward_stage.holds("audio embed"):
        frames = {sample: reader.frames([sample]) for sample in samples}
    active = wave
    for _ in range(max_new_tokens):
        slots = trainer.most_in_lockstep(len(active))
        if not slots:
            break
        batches = MicroBatchStream(
            batches=(_micro_batch(group, pixels, frames, reader) for group in active),
            shapes=[_shape(group) for group in active],
        )
        outputs = trainer.run_forward(trainer.joining(batches, slots, answers=True))
        asked = [question for group in active for question in group]
        next_ids = _broadcast_from_last(trainer.links, outputs, len(asked))
        for question, next_id in zip(asked, next_ids, strict=True):
            question.answer_ids.append(next_id)
        end = reader.answer_end
        active = [[q for q in group if q.answer_ids[-1] != end] for group in active]
        active = [group for group in active if group]


def _shape(group: list[_Question]) -> MicroBatchShape:
    return MicroBatchShape(
        tiles=sum(question.tiles for question in group),
        clips=sum(question.clips for question in group),
        tokens=sum(question.tokens for question in group),
    )


def _micro_batch(
    group: list[_Question],
    pixels: dict[Sample, torch.Tensor],
    frames: dict[Sample, torch.Tensor],
    reader: SampleReader,
) -> MicroBatch:
    ids = [np.concatenate([q.prompt_ids, np.array(q.answer_ids, np.int64)]) for q in group]
    token_ids = np.concatenate(ids)
    segment_tokens = tuple(len(one) for one in ids)
    # A model may answer with the word that stands for an image's tokens, and means none.
    prompts = [np.concatenate([q.prompt_ids, np.full(len(q.answer_ids), -1)]) for q in group]
    asked_S = torch.from_numpy(np.concatenate(prompts))
    return MicroBatch(
        tiles=sum(question.tiles for question in group),
        clips=sum(question.clips for question in group),
        tokens=len(token_ids),
        segment_tokens=segment_tokens,
        pixels_TCPP=torch.cat([pixels[q.sample][: q.tiles] for q in group]) if pixels else None,
        token_ids_S=torch.from_numpy(token_ids),
        frames_CBF=torch.cat([frames[q.sample][: q.clips] for q in group]) if frames else None,
        image_positions_M=reader.image_positions(asked_S),
        audio_positions_N=reader.audio_positions(asked_S),
        answer_positions_A=torch.from_numpy(np.cumsum(segment_tokens) - 1),
    ).to(current_device())


def _broadcast_from_last(
    links: PipelineLinks, outputs: list[torch.Tensor], answers: int
) -> list[int]:
    """Send the answers' next tokens to every stage, so that all continue the same questions."""
    next_ids = torch.zeros(answers, dtype=torch.int64, device=current_device())
    if links.is_last:
        next_ids = torch.cat(outputs)
    last_rank = dist.get_process_group_ranks(links.activations)[-1]
    dist.broadcast(next_ids, last_rank, group=links.activations)
    return next_ids.tolist()


def _compared(question: _Question, reader: SampleReader) -> EvaluatedAnswer:
    turn = question.sample.turns[question.turn]
    end = reader.answer_end
    words = (
        question.answer_ids[: question.answer_ids.index(end)]
        if (end in question.answer_ids)
        else question.answer_ids
    )
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
