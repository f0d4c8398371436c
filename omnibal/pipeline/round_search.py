"""Search for the rounds in which data-parallel encoders run while pipelines would wait.

The stages, the schedule and how encoders run are planned before. What is chosen here is, for every
number of micro-batches that steps have: how many micro-batches a round has, where on each stage's
list its ranks encode and run backward, and how unequally stages share a round.

A stage is idle for known times in the pipeline without encoders. Rounds are laid into these: of
every round a stage gets what it has time for before the round's features are needed, as far as it
will have time for the backward too. Then single loads are changed while simulated steps get
shorter. No choice makes a step shorter than the pipeline alone with its first round's encoding, so
what is left to gain is known.

Shapes: W rounds, p stages, m micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np

from omnibal.cost.encoder_phase import EncodersCost
from omnibal.cost.model import CostModel
from omnibal.model.data_parallel_encoders import DataParallelEncoders, EncoderRound, EncoderRounds
from omnibal.pipeline.encoder_rounds import pipeline_rows, rows_of_groups, simulate_rounds
from omnibal.pipeline.encoder_waits import with_encoders
from omnibal.pipeline.encoding import RoundWork
from omnibal.pipeline.operation_graph import schedule_graph
from omnibal.pipeline.round_work import groups_of, shares_of_rounds, with_rounds, work_of
from omnibal.pipeline.schedule_memory import schedule_memories
from omnibal.pipeline.schedules import Pass, PipelineSchedule
from omnibal.pipeline.simulate import SimulatedRows, Timeline
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_cost import workload_times
from omnibal.pipeline.stage_memory import GIB, fits_cap
from omnibal.pipeline.workload import Workload

_SAMPLED_ROWS = 96
"""Pipelines of steps that rounds are searched on, at most, but one step at least."""
_MOST_NUMBERS = 4
"""Numbers of micro-batches that rounds are searched for: those of most steps."""
_LEAST_SHARE = 0.02
"""Share of the groups' steps that a number must have."""
_MOST_ROUNDS = 16
"""Rounds of a step, of which each has a message and passes of its own."""
_FILLED = (1.0, 0.5, 0.0)
"""Parts of a round's time that an idle time must have for the round to be laid into it."""
_CHANGES = 160
"""Changes of a stage's load in one round that are tried."""
_IN_VAIN = 40
"""Changes in vain after which the loads stay."""
_TOLERANCE = 1e-9
"""Relative time by which a step must be shorter."""
_LESS_MEMORY = 0.03
"""Share of its memory by which a slower choice of rounds must be below a quicker one."""
_LEAST_GAIN = 0.002
"""Share of the step that rounds must save: they ask more of the trainer, and of memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundProblem:
    """A planned pipeline beside data-parallel encoders."""

    workload: Workload
    """With encoders before and after all micro-batches."""
    features: tuple[str, ...]
    """Names of the workload's features."""
    cost: CostModel
    """Costs of the pipeline's units, of all levels."""
    encoders: EncodersCost
    beside: DataParallelEncoders
    stages_at: Sequence[Sequence[Stage]]
    """Parts of the model, with what they recompute at each level."""
    schedule: PipelineSchedule
    memory_cap_bytes: float

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.stages_at[0]) // self.schedule.chunks

    def beside_as(self, beside: DataParallelEncoders) -> Self:
        """The pipeline beside encoders that run otherwise."""
        workload = with_encoders(self.workload, self.features, self.encoders, beside)
        return replace(self, beside=beside, workload=workload)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundChoice:
    """Encoders in rounds, beside a pipeline as it is planned."""

    beside: DataParallelEncoders
    peak_gib: float
    """Memory of the fullest device with the planned stages."""
    fits: bool
    """Whether the planned stages leave them memory enough; others may."""


def search_rounds(problem: RoundProblem) -> list[RoundChoice]:
    """The encoders in the rounds that are found best, quickest first, each of which takes less
    memory than those before it; none where no rounds save any time.

    A pass among those of a pipeline must fit beside them, so that smaller passes, and fewer items
    that are kept, are tried too. The last is the first that the planned stages leave enough for, if
    there is one.
    """
    beside = problem.beside
    # Ranks that wait for each other within a step are simulated together, and these are not.
    if beside.sharded > 1 or problem.stages == 1 or problem.workload.runs_together:
        return []
    numbers = _numbers(problem.workload, beside)
    least = [_Search.of(problem, number).before_ms * (1 - _LEAST_GAIN) for number in numbers]
    found = [
        each
        for variant in _variants(beside)
        if (each := _found(problem.beside_as(variant), numbers, least))
    ]
    choices = list[RoundChoice]()
    for each in sorted(found, key=_steps_ms):
        choice = _choice(problem, _joined(each))
        if choices and choice.peak_gib >= choices[-1].peak_gib * (1 - _LESS_MEMORY):
            continue
        choices.append(choice)
        if choice.fits:
            break
    return choices


def improved_rounds(problem: RoundProblem) -> DataParallelEncoders:
    """The encoders with other loads in their rounds by which steps are shorter, and which fit."""
    found = [
        _Search.of(problem, each.micro_batches).improved(each.rounds)
        for each in problem.beside.rounds
    ]
    improved = problem.beside.model_copy(update={"rounds": tuple(found)})
    return improved if _choice(problem, improved).fits else problem.beside


def _choice(problem: RoundProblem, beside: DataParallelEncoders) -> RoundChoice:
    encoders = problem.features, problem.encoders, beside
    workload = with_rounds(with_encoders(problem.workload, *encoders), *encoders)
    peaks = schedule_memories(problem.cost, problem.stages_at, workload, problem.schedule)
    peak_gib = max(peak.peak_gib for peak in peaks)
    fits = bool(fits_cap(peak_gib * GIB, problem.memory_cap_bytes))
    return RoundChoice(beside=beside, peak_gib=peak_gib, fits=fits)


def _steps_ms(found: Sequence["_Found"]) -> list[float]:
    return [each.step_ms for each in found]


def _variants(beside: DataParallelEncoders) -> Iterator[DataParallelEncoders]:
    """The encoders with smaller passes, by halving, and with fewer items kept, down to none."""
    kept_of, passes_of = [beside.kept_items], [beside.items_per_pass]
    while max(passes_of[-1].values()) > 1:
        passes_of.append({name: max(items // 2, 1) for name, items in passes_of[-1].items()})
    if any(beside.kept_items.values()):
        kept_of += [{name: kept // 2 for name, kept in beside.kept_items.items()},
                    dict.fromkeys(beside.kept_items, 0)]  # fmt: skip
    for kept, items in product(kept_of, passes_of):
        yield beside.model_copy(update={"kept_items": kept, "items_per_pass": items})


def _found(
    problem: RoundProblem, numbers: Sequence[int], least_ms: Sequence[float]
) -> list["_Found"]:
    """Rounds of the first of the numbers, and of the others for which any are clearly shorter."""
    found = list[_Found]()
    for number, most_ms in zip(numbers, least_ms, strict=True):
        search = _Search.of(problem, number)
        rounds, step_ms = search.best()
        if step_ms < most_ms:
            found.append(_Found(search=search, rounds=rounds, step_ms=step_ms))
        elif number == numbers[0]:
            return []
    return found


def _joined(found: Sequence["_Found"]) -> DataParallelEncoders:
    beside = found[0].search.problem.beside
    return beside.model_copy(update={"rounds": tuple(each.as_rounds for each in found)})


def _numbers(workload: Workload, beside: DataParallelEncoders) -> list[int]:
    """Numbers of micro-batches that all pipelines of a group have in many steps, from 2 on."""
    _, step = np.unique(workload.step, return_inverse=True)
    ranks = workload.data_parallel_size
    counts = np.bincount(step * ranks + workload.dp_rank).reshape(-1, beside.pipelines)
    equal = counts[(counts == counts[:, :1]).all(axis=1), 0]
    numbers, groups = np.unique(equal, return_counts=True)
    often = np.argsort(-groups, kind="stable")[:_MOST_NUMBERS]
    least = _LEAST_SHARE * len(counts)
    return [int(numbers[at]) for at in often if groups[at] >= least and numbers[at] > 1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Search:
    """Search for the rounds of steps of one number of micro-batches."""

    problem: RoundProblem
    sample: Workload
    """Some of the steps that have it."""
    number: int
    rows: SimulatedRows
    """Pipelines of the sample's groups, group by group."""
    step: np.ndarray
    """Step of every row."""
    before_ms: float
    """Mean step with encoders before and after all micro-batches."""
    alone: Timeline
    """The pipeline without encoders, of mean times."""

    @classmethod
    def of(cls, problem: RoundProblem, number: int) -> "_Search":
        """Choose the sample."""
        beside, workload = problem.beside, problem.workload
        whole = EncoderRounds.model_construct(micro_batches=number, rounds=())
        steps, _ = groups_of(workload, beside, whole)
        numbers = np.unique(workload.step)[np.unique(steps)]
        most = max(_SAMPLED_ROWS // workload.data_parallel_size, 1)
        sample = workload.of_steps(numbers).some_steps(most)
        step, group = groups_of(sample, beside, whole)
        times = workload_times(problem.cost, problem.stages_at, sample)
        nothing = _no_work(np.unique(sample.step)[step], group, beside.pipelines, number)
        rows = rows_of_groups(times, sample, nothing, problem.schedule)
        assert times.waits_ms is not None, "encoders are data-parallel"
        first, last = pipeline_rows(sample, nothing)
        waits_ms = times.waits_ms[first, 0] + times.waits_ms[last, 1]
        assert sample.encoding is not None
        waits_ms -= sum(sample.encoding.once_ms)
        mean = replace(
            rows,
            pass_ms={kind: ms.mean(axis=0, keepdims=True) for kind, ms in rows.pass_ms.items()},
            forward_link_ms=rows.forward_link_ms.mean(axis=0, keepdims=True),
            backward_link_ms=rows.backward_link_ms.mean(axis=0, keepdims=True),
            counts=rows.counts[:1],
        )
        row_step = np.repeat(step, beside.pipelines)
        return cls(
            problem=problem,
            sample=sample,
            number=number,
            rows=rows,
            step=row_step,
            before_ms=_mean_step_ms(rows.simulated().step_ms + waits_ms, row_step),
            alone=mean.simulated().of_step(0),
        )

    def best(self) -> tuple[tuple[EncoderRound, ...], float]:
        """Rounds of the shortest mean step among some, and that."""
        found = (self._of_sizes(sizes) for sizes in _partitions(self.number))
        return min(found, key=lambda each: each[1])

    def _of_sizes(self, sizes: Sequence[int]) -> tuple[tuple[EncoderRound, ...], float]:
        """The better of equal shares and of those that stages have time for."""
        stages = self.problem.stages
        equal = np.zeros((len(sizes), stages))
        laid = self._laid(sizes, self._work(_rounds(sizes, equal)))
        found = [self._placed(sizes, loads) for loads in (equal, laid)]
        return min(found, key=lambda each: each[1])

    def _work(self, rounds: tuple[EncoderRound, ...]) -> RoundWork:
        beside, encoders = self.problem.beside, self.problem.encoders
        asked = EncoderRounds(micro_batches=self.number, rounds=rounds)
        groups = groups_of(self.sample, beside, asked)
        shares = shares_of_rounds(self.sample, self.problem.features, encoders, beside, asked)
        return work_of(list(shares), rounds, groups, encoders, beside)

    def _placed(
        self, sizes: Sequence[int], loads: np.ndarray
    ) -> tuple[tuple[EncoderRound, ...], float]:
        """Rounds at the places of the shortest mean step, and that.

        Args:
            loads: of every stage in every round, [W, p].
        """
        work, schedule = self._work(_rounds(sizes, loads)), self.problem.schedule
        best: tuple[tuple[EncoderRound, ...], float] | None = None
        tried = set()
        for filled in product(_FILLED, _FILLED):
            places = tuple(self._places(work, sizes, *filled))
            if places in tried:
                continue
            tried.add(places)
            rounds = _rounds(sizes, loads, places)
            step_ms = simulate_rounds(schedule, self.rows, replace(work, rounds=rounds)).step_ms
            mean_ms = _mean_step_ms(step_ms, self.step)
            if best is None or mean_ms < best[1]:
                best = rounds, mean_ms
        assert best is not None
        return best

    def _places(
        self, work: RoundWork, sizes: Sequence[int], ahead: float, behind: float
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Places of every stage's rounds, forward and back, in the idle times of mean passes.

        Args:
            ahead: part of a round's time that the idle time must have which it is laid into.
            behind: likewise of its backward.
        """
        forward_ms, back_ms = (ms.mean(axis=(0, 1)).T for ms in (work.forward_ms, work.backward_ms))
        needed, given = self._needed_and_given(sizes)
        passes = [self._passes(stage) for stage in range(self.problem.stages)]
        laid, encoded = [], 0.0
        for (start, end), each_ms in zip(passes, forward_ms, strict=True):
            idle = start - np.concatenate([[0.0], end[:-1]])
            forward = _laid_ahead(idle, end, each_ms, needed, ahead)
            last = forward[-1]
            encoded = max(encoded, (end[last - 1] if last else 0.0) + each_ms[-1])
            laid.append((forward, idle))
        # No gradients come back before all stages have encoded all rounds; a stage that comes to a
        # backward before could wait for ever.
        given = np.maximum(given, encoded) + work.exchange_back_ms.mean(axis=0)
        for (forward, idle), (start, _), each_ms in zip(laid, passes, back_ms, strict=True):
            yield forward, _laid_behind(forward[-1], idle, start, each_ms, given, behind)

    def _passes(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of a stage's mean passes without encoders, in the order of its list."""
        graph = schedule_graph(self.problem.schedule, self.problem.stages, self.number)
        places = [
            (Pass(int(graph.kind[one])), (graph.micro_batch[one], graph.part[one]))
            for one in graph.of_stage(stage)
        ]
        times = self.alone.start_ms, self.alone.end_ms
        start, end = (np.array([ms[kind][at] for kind, at in places]) for ms in times)
        return start, end

    def _needed_and_given(self, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """When the first part of the model takes the features of every round, and when the last of
        its gradients are there. [W] each"""
        ends = np.cumsum(sizes)
        back = next(each for each in self.alone.end_ms if each is not Pass.FORWARD)
        needed = self.alone.start_ms[Pass.FORWARD][ends - sizes, 0]
        return needed, self.alone.end_ms[back][ends - 1, 0]

    def _laid(self, sizes: Sequence[int], work: RoundWork) -> np.ndarray:
        """Loads by which stages get what they have time for, [W, p].

        Args:
            work: of equal shares.
        """
        stages, needed = self.problem.stages, self._needed_and_given(sizes)[0]
        forward_ms, back_ms = work.forward_ms.mean(axis=(0, 1)), work.backward_ms.mean(axis=(0, 1))
        ratio = float(back_ms.sum() / max(forward_ms.sum(), 1e-12))
        end_ms = float(self.alone.step_ms)
        passes = [self._passes(stage) for stage in range(stages)]
        turn = [
            min(self.alone.start_ms[kind].min(axis=0)[part] for kind in self.alone.start_ms
                if kind is not Pass.FORWARD)
            for part in range(stages)
        ]  # fmt: skip
        back_room = np.array(
            [_idle_ms(*each, turn[stage], end_ms) for stage, each in enumerate(passes)]
        )
        loads, used = np.zeros((len(sizes), stages)), np.zeros(stages)
        for number, by in enumerate(needed):
            whole = float(forward_ms[number].sum())
            if number:
                room = np.array([_idle_ms(*each, 0.0, by) for each in passes]) - used
                if ratio > 0:
                    room = np.minimum(room, (back_room / ratio) - used)
                loads[number] = room.max() - room
            used += _filled(loads[number], whole)
        return loads

    def improved(self, rounds: tuple[EncoderRound, ...]) -> EncoderRounds:
        """Change single loads while the step gets shorter."""
        sizes = [one.micro_batches for one in rounds]
        loads = np.array([one.load_ms for one in rounds])
        rounds, step_ms = self._placed(sizes, loads)
        unit_ms = float(self._work(rounds).forward_ms.mean()) or 1.0
        rng, in_vain = np.random.default_rng(0), 0
        for _ in range(_CHANGES):
            changed = loads.copy()
            at = rng.integers(len(sizes)), rng.integers(loads.shape[1])
            changed[at] = max(changed[at] + rng.choice([-2.0, -1.0, 1.0, 2.0]) * unit_ms, 0.0)
            found, found_ms = self._placed(sizes, changed)
            in_vain += 1
            if found_ms < step_ms * (1 - _TOLERANCE):
                rounds, step_ms, loads, in_vain = found, found_ms, changed, 0
            if in_vain == _IN_VAIN:
                break
        return EncoderRounds(micro_batches=self.number, rounds=rounds)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """Rounds that are found, of one number of micro-batches."""

    search: _Search
    rounds: tuple[EncoderRound, ...]
    step_ms: float

    @property
    def as_rounds(self) -> EncoderRounds:
        """As a plan has them."""
        return EncoderRounds(micro_batches=self.search.number, rounds=self.rounds)


def _partitions(number: int) -> list[list[int]]:
    """Micro-batches of every round: the first and the last round have one, as nothing hides them,
    and those between as few as there are rounds for, or more."""
    found = []
    most = 1
    while True:
        inner = max(number - 2, 0)
        sizes = [most] * (inner // most) + ([inner % most] if inner % most else [])
        if len(sizes) + 2 <= _MOST_ROUNDS:
            found.append([1, *sizes, 1])
        if most >= inner:
            return found
        most *= 2


def _rounds(
    sizes: Sequence[int],
    loads: np.ndarray,
    places: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = (),
) -> tuple[EncoderRound, ...]:
    """Rounds of these sizes, loads [W, p] and places by stage; all at the start without any."""
    none = (0,) * loads.shape[1]
    return tuple(
        EncoderRound(
            micro_batches=size,
            forward_after=tuple(of[0][number] for of in places) if places else none,
            backward_after=tuple(of[1][number] for of in places) if places else none,
            load_ms=tuple(np.round(loads[number], 6).tolist()),
        )
        for number, size in enumerate(sizes)
    )


def _no_work(step: np.ndarray, group: np.ndarray, pipelines: int, number: int) -> RoundWork:
    """Groups by whose places rows are found."""
    none = np.zeros((len(step), pipelines, 1, 1))
    whole = EncoderRound(micro_batches=number, forward_after=(), backward_after=(), load_ms=())
    return RoundWork(
        rounds=(whole,),
        step=step,
        first_rank=group * pipelines,
        forward_ms=none,
        backward_ms=none,
        exchange_ms=none[:, 0, :, 0],
        exchange_back_ms=none[:, 0, :, 0],
    )


def _mean_step_ms(row_ms: np.ndarray, step: np.ndarray) -> float:
    """Mean over steps of the longest of each's rows."""
    longest = np.zeros(int(step.max()) + 1)
    np.maximum.at(longest, step, row_ms)
    return float(longest[np.unique(step)].mean())


def _laid_ahead(
    idle: np.ndarray, end: np.ndarray, each_ms: np.ndarray, needed: np.ndarray, part: float
) -> tuple[int, ...]:
    """Places of a stage's rounds, forward: each at the first idle time that is long enough, but in
    time to be needed. What they take is taken off `idle`.

    Args:
        idle: time before each pass, and `end` of each pass, [passes].
        each_ms: time of each round, and when it is `needed`, [W].
        part: of a round's time that the idle time must have.
    """
    places, place = [], 0
    for took, by in zip(each_ms, needed, strict=True):
        while place < len(idle) and idle[place] < part * took and end[place] + took <= by:
            place += 1
        places.append(place)
        if place < len(idle):
            idle[place] = max(idle[place] - took, 0)
    return tuple(places)


def _laid_behind(
    place: int,
    idle: np.ndarray,
    start: np.ndarray,
    each_ms: np.ndarray,
    given: np.ndarray,
    part: float,
) -> tuple[int, ...]:
    """Places of a stage's rounds, back, as `_laid_ahead`: from `place` on, after they are given."""
    places = []
    for took, since in zip(each_ms, given, strict=True):
        while place < len(idle) and (start[place] < since or idle[place] < part * took):
            place += 1
        places.append(place)
        if place < len(idle):
            idle[place] = max(idle[place] - took, 0)
    return tuple(places)


def _idle_ms(start: np.ndarray, end: np.ndarray, since: float, until: float) -> float:
    """Time between two in which a stage with these passes is idle."""
    begins, ends = np.concatenate([[0.0], end]), np.append(start, np.inf)
    both = np.minimum(ends, until) - np.maximum(begins, since)
    return float(np.maximum(both, 0).sum())


def _filled(load: np.ndarray, whole: float) -> np.ndarray:
    """What ranks get of divisible work, each up to one level of load with it. [p]"""
    levels = (np.cumsum(np.sort(load)) + whole) / np.arange(1, len(load) + 1)
    return np.maximum(levels.min() - load, 0)
