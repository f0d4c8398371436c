"""Advice if no sizes fit some devices: the smallest change of each kind that fits.

Each change is tried alone: on one device adapters and frozen parts, then smaller caps, free sizes
and shardings, up to four times the devices in whole nodes, and devices with more memory. Reports
the first sizes that fit, by ascending state. A plan may choose faster sizes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.plan_data import least_caps, limited_features
from omnibal.model.adapters import adapters_of
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.limits import Caps
from omnibal.model.parallel import SIZE_OPTIONS, WeightSharding
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search.caps import cap_space
from omnibal.search.feasible import (
    least_state_gib,
    need_text,
    roomier_devices,
    smaller_caps,
    what_would_fit,
)
from omnibal.search.goal import Earlier, Goal, ShapesAlone
from omnibal.search.parallel_sizes import possible_sizings
from omnibal.search.strategy import Choice, Setting, StrategyRequest, need_gib_of, possible_choices

_MOST_SIZES = 12
"""Max sizes to try per change, by ascending state, which dominates there."""
_MOST_DEVICES = 4  # max factor on devices
_LORA_RANK = 16
_EVERY_CAPS = 4  # stride in the caps of `smaller_caps`

RequestOf = Callable[[Goal], StrategyRequest]
"""Function that returns the strategy request of a goal with free sizes."""


def message_with_what_fits(error: DoesNotFit, goal: Goal, request_of: RequestOf) -> str:
    """Format the error with changes of the goal that would fit."""
    changes, tried = list[str](), list[str]()
    for kind, candidates in _kinds(goal):
        for text, changed in candidates:
            if kind not in tried:
                tried.append(kind)
            found = _fitting(request_of, changed)
            if found is not None:
                changes.append(f"{text}, as in {found}")
                break
    return what_would_fit(error, changes, tried)


_Candidates = Iterable[tuple[str, Goal]]


def _kinds(goal: Goal) -> list[tuple[str, _Candidates]]:
    any_sharding = []
    if set(goal.shardings) != set(goal.job.trainer.shardings):
        text = f"--sharding auto instead of {' or '.join(goal.shardings)}"
        free = replace(goal.free, shardings=tuple(WeightSharding))
        any_sharding = [(text, replace(goal, free=free))]
    roomier = [
        (text, replace(goal, job=replace(goal.job, cluster=cluster)))
        for text, cluster in roomier_devices(goal.job)
    ]
    is_alone = goal.free.sizes is not None and goal.free.sizes.gpus == 1
    trains_less = [("--lora-rank", _of_adapters(goal)), ("--freeze", _of_frozen_parts(goal))]
    return [
        *(trains_less if is_alone else []),
        ("smaller caps", _of_smaller_caps(goal)),
        ("other sizes than those given", _of_free_sizes(goal)),
        ("--sharding auto", any_sharding),
        ("more --gpus", _of_more_devices(goal)),
        ("a preset device with more memory", roomier),
    ]


def _of_adapters(goal: Goal) -> _Candidates:
    job = goal.job
    if job.adapters is None and not job.frozen:
        others = tuple(part for part in model_parts(job.model) if part != LANGUAGE)
        adapted = replace(job, frozen=others, adapters=adapters_of(rank=_LORA_RANK))
        yield f"--lora-rank {_LORA_RANK}", replace(goal, job=adapted)


def _of_frozen_parts(goal: Goal) -> _Candidates:
    job, parts = goal.job, model_parts(goal.job.model)
    if job.adapters is None and not job.frozen and len(parts) > 1:
        for part in parts:
            yield f"--freeze {part}", replace(goal, job=replace(job, frozen=(part,)))


def _of_smaller_caps(goal: Goal) -> _Candidates:
    data = goal.data
    if isinstance(data, Earlier) or data.caps is None:
        return
    names = data.caps.names
    if isinstance(data, ShapesAlone):
        least = Caps.of(**dict.fromkeys(names, 1))
    else:
        least = least_caps(data.lengths, names)
    every = smaller_caps(data.caps, least)
    for caps in [*every[::_EVERY_CAPS], *every[-1:]]:
        text = f"{' '.join(reversed(caps.options))} instead of {data.caps}"
        yield text, replace(goal, data=replace(data, caps=caps))


def _of_free_sizes(goal: Goal) -> _Candidates:
    sizes = goal.free.sizes
    assert sizes is not None
    for name, option in SIZE_OPTIONS.items():
        others: dict[str, Any] = {name: None}
        if (given := getattr(sizes, name)) is not None:
            freed = replace(goal.free, sizes=replace(sizes, **others))
            yield f"no {option} {given}", replace(goal, free=freed)


def _of_more_devices(goal: Goal) -> _Candidates:
    sizes, node = goal.free.sizes, goal.job.cluster.gpus_per_node
    assert sizes is not None
    gpus = sizes.gpus
    # Whole nodes, in steps >= a quarter of the devices.
    unit = max(gpus // 4 // node, 1) * node
    first = gpus // unit * unit + unit
    for more in range(first, _MOST_DEVICES * max(gpus, node) + 1, unit):
        freed = replace(goal.free, sizes=replace(sizes, gpus=more))
        yield f"--gpus {more} instead of {gpus}", replace(goal, free=freed)


def _fitting(request_of: RequestOf, goal: Goal) -> str | None:
    """Sizes that fit and their memory. None if nothing fits or the goal is invalid."""
    try:
        request = request_of(goal).drawn()
        sizings = possible_sizings(request)
    except UserError:
        return None
    setting = Setting(request=request, packs={})
    caps = request.caps
    if caps is None:
        caps = cap_space(request, limited_features(request.job.model)).level(1.0)[-1]
    choices = [(each, caps) for each in sizings]
    return _first_fit(setting, possible_choices(setting, choices, processes=1))


def _first_fit(setting: Setting, choices: list[Choice]) -> str | None:
    """First sizes that fit by ascending state, with pipeline encoders first."""
    cap_gib = setting.request.job.memory_cap_gib
    for placement in EncoderPlacement:
        placed = [choice for choice in choices if choice[0].placement is placement]
        states = {choice: least_state_gib(setting.job(choice[0])) for choice in placed}
        least = sorted(placed, key=lambda each: (states[each], str(each[0].parallel)))
        for choice in least[:_MOST_SIZES]:
            if not fits_cap(states[choice], cap_gib):
                break
            need_gib = need_gib_of(setting.request_of(choice))
            if fits_cap(need_gib, cap_gib):
                return f"{choice[0].options} ({need_text(need_gib, cap_gib)})"
    return None
