"""What a dry run says about ranks and stages, against those that core and the builder make."""

import io

import pytest
from data_parallel_cases import data_parallel_plan
from megatron.core import parallel_state
from ranks import run_ranks
from rich.console import Console
from toy import stages_of, toy_model, toy_plan

from megatron.vlm.run.dry_run import print_dry_run
from omnibal.job.plan import PlannedLevel
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel


def own_place(links):
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        links.rank,
    )


@pytest.mark.parametrize(
    "sizes", [(2, 2, 1), (1, 2, 2), (2, 1, 2)], ids=["tp2-pp2", "pp2-dp2", "tp2-dp2"]
)
def test_places_are_those_that_core_assigns(sizes):
    """Prevents: a printed layout that is not the one that trains."""
    parallel = Parallel(**dict(zip(("tensor", "pipeline", "data"), sizes, strict=True)))
    found = run_ranks(parallel, own_place)
    places = [parallel.place(rank) for rank in range(parallel.world_size)]
    assert [(place["tensor"], place["data"], place["pipeline"]) for place in places] == found
    first = [parallel.first_rank(stage) for stage in range(parallel.pipeline)]
    assert [places[rank] for rank in first] == [
        {"tensor": 0, "data": 0, "pipeline": stage} for stage in range(parallel.pipeline)
    ]


def test_stages_name_their_units_and_every_rank_is_listed():
    """Prevents: layers counted from each stage's own 0, or forgotten ranks."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 3, 8, vision=(1,), language=(2,)), data=2)
    text = io.StringIO()
    print_dry_run(plan, Console(file=text, width=140))
    printed = text.getvalue()
    assert "6 processes: tensor 1 x pipeline 3 x data 2" in printed
    assert "vision embed, vision 0..1 " in printed
    assert "vision 2..3, projector, language embed, language 0 " in printed
    assert "language 1..2, head " in printed
    assert " vision 1 " in printed and " language 2 " in printed


def test_data_parallel_encoders_are_listed():
    """Prevents: a dry run that leaves out the encoders where no stage holds them."""
    plan = data_parallel_plan(toy_model(), (2,), data=4, pipelines=2, per_pass=3, kept=7)
    text = io.StringIO()
    print_dry_run(plan, Console(file=text, width=140))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "Beside them, whole on every rank: vision embed, vision 0..3, projector" in lines
    assert "vision 3 7 4" in lines
    assert any(line.startswith("0 language embed, language 0 ") for line in lines)


def test_levels_name_their_ranks_and_recomputed_layers():
    """Prevents: a dry run that finds nothing recomputed where levels say what is."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 8), data=2)
    levels = [
        PlannedLevel(caps=Caps.of(tiles=4, tokens=tokens), context=context, recompute=again)
        for tokens, context, again in (
            (1000, 1, ((), ("language 1",))),
            (8000, 2, (("vision 0..3",), ())),
        )
    ]
    text = io.StringIO()
    plan = plan.model_copy(update={"levels": tuple(levels)})
    print_dry_run(plan, Console(file=text, width=140))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "0 4 1,000 1" in lines
    assert "1 4 8,000 2 contiguous gather" in lines
    for said in ("level 0: language 1", "level 1: vision 0..3", "level 0: nothing"):
        assert any(said in line for line in lines), said
