"""Candidates of parallel sizes: layouts of a number of GPUs, with weight shardings and placements.

All tensor, pipeline, data and expert sizes that the model, the cluster and the trainer allow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from omnibal.base.errors import UserError
from omnibal.job.job import JobSpec
from omnibal.model.config import ClusterConfig
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.parallel import Parallel, WeightSharding, expert_sizes, state_group
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD
from omnibal.search.schedule_choice import able_schedules, check_may_run
from omnibal.search.strategy import Sizing, StrategyRequest


def possible_sizings(request: StrategyRequest, *, is_all: bool = False) -> list[Sizing]:
    """Return parallel sizes and encoder placements on these GPUs. UserError if none.

    Args:
        is_all: include free shardings that are slow at their sizes (`_is_worth_a_try`).
    """
    sizings, refused = list[Sizing](), dict[EncoderPlacement, UserError]()
    for placement in request.placements:
        try:
            placed = request.job.with_sizes(request.job.parallel, placement)
            parallels = _possible_parallels(replace(request, job=placed), is_all=is_all)
        except UserError as error:
            refused[placement] = error
        else:
            sizings += [Sizing(parallel, placement) for parallel in parallels]
    if sizings:
        return sizings
    raise placements_error(refused)


def placements_error(refused: Mapping[EncoderPlacement, UserError]) -> UserError:
    """Return the error if no placement of encoders can be planned, with the reasons of all."""
    reasons = {placement: str(error) for placement, error in refused.items()}
    if len(set(reasons.values())) == 1:
        return next(iter(refused.values()))
    return UserError("; and ".join(f"{place.phrase}: {why}" for place, why in reasons.items()))


def _possible_parallels(request: StrategyRequest, *, is_all: bool) -> list[Parallel]:
    if request.layouts:
        return _able(request, request.layouts)
    _check_given(request)
    ways, gpus = request.shardings, request.sizes.gpus
    divides = request.sizes.sequence_parallel is not False
    found = layouts_of(request.job, gpus, ways, divides=divides)
    if len(ways) > 1 and not is_all:
        found = [parallel for parallel in found if _is_worth_a_try(parallel, request.job.cluster)]
    possible = [p for p in found if request.sizes.are(p) and request.job.allows(p)]
    if possible:
        return _able(request, possible)
    allowed = list(filter(request.job.allows, found))
    if not allowed and WeightSharding.REPLICATED not in ways:
        raise UserError(
            f"{gpus} GPUs were given with --sharding {' or '.join(ways)}, and no "
            "data-parallel ranks of theirs can divide weights so: hybrid needs several whole "
            "nodes, full two ranks; use another number of GPUs, or give --sharding auto"
        )
    raise UserError(_impossible(request, allowed))


def _able(request: StrategyRequest, layouts: Sequence[Parallel]) -> list[Parallel]:
    """Return the layouts that can run a schedule. UserError if none can."""
    if ONE_FORWARD_ONE_BACKWARD.name in request.schedules:
        # Every layout runs 1F1B. One shows errors of all: counting costs takes 50 ms per layout.
        request.job.with_sizes(layouts[0])
        return list(layouts)
    jobs = [request.job.with_sizes(parallel) for parallel in layouts]
    check_may_run(jobs, request.schedules)
    return [job.parallel for job in jobs if able_schedules(request.schedules, job)]


def layouts_of(
    job: JobSpec, gpus: int, ways: Sequence[WeightSharding], *, divides: bool = True
) -> list[Parallel]:
    """Return all layouts of `gpus` GPUs in these shardings, including any that `job` disallows.

    Args:
        divides: whether tensor sizes above 1 use sequence parallelism.
    """
    whole = [
        Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=gpus // tensor // pipeline,
            sequence_parallel=tensor > 1 and divides,
            expert=expert,
        )
        for tensor in _divisors(gpus)
        for pipeline in _divisors(gpus // tensor)
        for expert in expert_sizes(job.model, tensor, gpus // tensor // pipeline)
    ]
    # None if the sharding is impossible
    held = ((way, parallel.with_sharding(way, job.cluster)) for parallel in whole for way in ways)
    always = job.trainer.always_shards
    # On one rank sharded and replicated are equal, unless the trainer always shards.
    return list(dict.fromkeys(p for way, p in held if p and (always or p.sharding is way)))


def _is_worth_a_try(parallel: Parallel, cluster: ClusterConfig) -> bool:
    """Return whether sizes are worth searching if sharding is free.

    With PP > 1, excludes sharding that gathers over the network for every micro-batch, or with TP.
    Also excludes shard groups with a single copy of every expert: each rank would keep all state of
    its experts, which is sharded if weights are replicated.
    """
    if parallel.sharded == 1:
        return True
    if parallel.expert_shards == 1 < parallel.expert_data:
        return False
    # gathers stay on NVLink
    is_within = parallel.tensor == 1 and state_group(parallel).is_within(cluster)
    return parallel.pipeline == 1 or is_within


def _check_given(request: StrategyRequest) -> None:
    """Raise if given sizes are impossible for any choice of free sizes."""
    measured, sizes = request.job.cost_source.tensor, request.sizes
    if measured is not None and sizes.tensor not in (None, measured):
        raise UserError(
            f"--tp {sizes.tensor} was given with a profile of tensor size "
            f"{measured}, and costs of another size cannot be taken from it: leave "
            f"--tp out, give a profile of tensor size {sizes.tensor}, or count without --profile"
        )
    fixed = sizes.fixed_sizes
    product = math.prod(fixed.values())
    if sizes.gpus % product:
        product_text = " x ".join(f"{name} {size}" for name, size in fixed.items())
        below = sizes.gpus // product * product
        above = below + product
        near = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"{sizes.gpus} GPUs are no multiple of {product_text} = {product}, and the parallel "
            f"sizes must multiply to the GPUs: use {near} GPUs or change the sizes"
        )
    tensor, expert = sizes.tensor or 1, sizes.expert or 1
    stages = sizes.pipeline or 1
    for alone in (
        Parallel(tensor=tensor, pipeline=stages, sequence_parallel=tensor > 1),
        Parallel(pipeline=1, data=expert, expert=expert),
    ):
        request.job.check_sizes(alone)


def _impossible(request: StrategyRequest, others: Sequence[Parallel]) -> str:
    """Return the error message for impossible given sizes. `others` are possible without them."""
    sizes = request.sizes
    given = sizes.fixed_sizes | ({} if sizes.expert is None else {"--ep": sizes.expert})
    fixed = " ".join(f"{name} {size}" for name, size in given.items())
    model = request.job.pipeline_model
    allowed = sorted({parallel.tensor for parallel in others})
    measured = request.job.cost_source.tensor
    tensors = (
        "tensor sizes that divide its heads and fit a node"
        if measured is None
        else f"the profile is of tensor size {measured} alone"
    )
    expert = "" if sizes.expert is None else ", or give an --ep that divides tensor x data size"
    if others:
        remedy = (
            f"with {sizes.gpus} GPUs, tensor sizes may be {', '.join(map(str, allowed))}, and "
            f"for each the rest is shared by pipeline and data size: leave a size out{expert}"
        )
    else:
        other = "" if measured is None else ", or a profile of another tensor size"
        remedy = f"use another number of GPUs{other}"
    return (
        f"no parallel sizes multiply to {sizes.gpus} GPUs{f' with {fixed}' if fixed else ''}: "
        f"{model.name} on {request.job.cluster.name} allows at most {model.layers} pipeline "
        f"stages, one per layer, and {tensors}; {remedy}"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
