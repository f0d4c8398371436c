"""A dry run's ranks and stages, compared with Megatron-core's groups and the built stages."""

import io

import pytest
from data_parallel_cases import data_parallel_plan
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from pipeline_cases import MODEL, pipeline_plan
from ranks import run_ranks
from rich.console import Console

from megatron.vlm.run.dry_run import print_dry_run
from omnibal.job.plan import PlannedLevel
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel


def own_place(links):
    return {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
        "pipeline": links.rank,
    }


@pytest.mark.parametrize(
    "sizes", [(2, 2, 1), (1, 2, 2), (2, 1, 2)], ids=["tp2-pp2", "pp2-dp2", "tp2-dp2"]
)
def test_places_are_those_that_core_assigns(sizes):
    """Prevents a printed layout that differs from the trained layout."""
    parallel = Parallel(**dict(zip(("tensor", "pipeline", "data"), sizes, strict=True)))
    found = run_ranks(parallel, own_place)
    places = [parallel.place(rank) for rank in range(parallel.world_size)]
    assert [{name: place[name] for name in found[0]} for place in places] == found


@pytest.mark.parametrize("sizes", [(1, 2, 4, 2), (2, 2, 4, 4), (4, 1, 2, 2), (2, 2, 2, 4)])
def test_expert_groups_are_megatrons(sizes):
    """Prevents other expert groups than Megatron-core makes."""
    tensor, pipeline, data, expert = sizes
    parallel = Parallel(
        tensor=tensor, pipeline=pipeline, data=data, expert=expert, sequence_parallel=tensor > 1
    )
    groups = RankGenerator(
        tp=1, ep=expert, dp=parallel.expert_data, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp"
    )
    for group in groups.get_ranks("dp"):
        places = [parallel.place(rank) for rank in group]
        assert len({(place["pipeline"], place["expert"]) for place in places}) == 1
    for group in groups.get_ranks("ep"):
        assert [parallel.place(rank)["expert"] for rank in group] == [*range(parallel.expert)]
        assert len({parallel.place(rank)["data"] for rank in group}) == parallel.lockstep_ranks


def dry_run_lines(plan):
    """Return the lines of a dry run with single spaces."""
    text = io.StringIO()
    print_dry_run(plan, Console(file=text, width=140))
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def test_stages_name_their_units_and_every_rank_is_listed():
    """Prevents layer numbers that restart on each stage, and missing ranks."""
    text = "\n".join(dry_run_lines(pipeline_plan(3, 8, vision=(1,), language=(2,), data=2)))
    for said in (
        "6 processes: TP 1 x PP 3 x DP 2", "vision embed, vision 0..1 ",
        "vision 2..3, projector, language embed, language 0 ", "language 1..2, head ",
        " vision 1 ", " language 2 ",
    ):  # fmt: skip
        assert said in text


def test_data_parallel_encoders_are_listed():
    """Prevents a dry run that omits encoders outside the pipeline."""
    lines = dry_run_lines(data_parallel_plan(MODEL, (2,), data=4, pipelines=2, per_pass=3, kept=7))
    assert "Data-parallel encoders, replicated: vision embed, vision 0..3, projector" in lines
    assert "vision 3 7 4" in lines
    assert any(line.startswith("0 language embed, language 0 ") for line in lines)


def test_levels_name_their_ranks_and_recomputed_layers():
    """Prevents a dry run that misses recomputation stated by context-parallel levels."""
    levels = tuple(
        PlannedLevel(caps=Caps.of(tiles=4, tokens=tokens), context=context, recompute=again)
        for tokens, context, again in (
            (1000, 1, ((), ("language 1",))),
            (8000, 2, (("vision 0..3",), ())),
        )
    )
    lines = dry_run_lines(pipeline_plan(8, data=2).model_copy(update={"levels": levels}))
    assert {"0 4 1,000 1", "1 4 8,000 2 contiguous gather"} <= set(lines)
    for said in ("level 0: language 1", "level 1: vision 0..3", "level 0: nothing"):
        assert any(said in line for line in lines), said
