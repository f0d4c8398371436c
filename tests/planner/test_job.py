"""Job specs: validated on construction, with costs computed once."""

from dataclasses import fields
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
from plan_cases import MODEL, alter, counting, example_lengths, example_profile, job_spec, request

from omnibal.base.errors import UserError
from omnibal.cost import source as source_module
from omnibal.cost.analytic import analytic_cost
from omnibal.cost.profile import model_sha256
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.job import job as job_module
from omnibal.job.job import JobSpec
from omnibal.job.plan_files import PlanFiles, make_job, read_plan_data, save_plan
from omnibal.job.planner import make_plan
from omnibal.model.config import load_cluster
from omnibal.model.limits import Caps, memory_cap_gib
from omnibal.model.parallel import Parallel, check_parallel
from omnibal.search.cap_search import search_caps
from omnibal.search.strategy import FreeSizes, StrategyRequest

pytestmark = pytest.mark.quick

PROFILE = example_profile().model_copy(update={"model_sha256": model_sha256(MODEL)})
MEASURED = CostSource(PROFILE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parallel": Parallel(pipeline=100)}, "is more than the 8 layers"),
        ({"parallel": Parallel(tensor=64, pipeline=1)}, "devices of a node"),
        ({"cost_source": CostSource(example_profile())}, "with other sizes than internvl-digits"),
        ({"cost_source": MEASURED, "precision": "bf16"}, "profile was measured in fp32"),
        (
            {"cost_source": MEASURED, "parallel": Parallel(tensor=2, pipeline=1)},
            "tensor size 1 but the plan has 2",
        ),
        ({"frozen": ("vision", "projector", "language")}, "leave a part to train"),
        ({"frozen": ("vision", "vision")}, "at most once"),
        ({"frozen": ("audio",)}, "audio, and .* has only the parts vision, projector, language"),
        (
            {"cluster": load_cluster("laptop-cpu").model_copy(update={"peak_tflops": {}})},
            "peak_tflops has no rate for fp32",
        ),
    ],
)
def test_a_wrong_job_cannot_be_made(wrong: dict, message: str) -> None:
    """Prevents an invalid job found after minutes of packing or searching, or never."""
    with pytest.raises(UserError, match=message):
        job_spec(**wrong)


@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_costs_are_those_of_its_source(frozen: tuple[str, ...]) -> None:
    """Prevents costs computed for other settings than the job's."""
    counted, measured = job_spec(frozen=frozen), job_spec(frozen=frozen, cost_source=MEASURED)
    setting = counted.cost_setting
    every = (counted, analytic_cost(setting)), (measured, MEASURED.costs(setting))
    for job, expected in every:
        assert job.cost.source == expected.source
        for unit, cost in expected.units.items():
            np.testing.assert_array_equal(job.cost.units[unit].forward_ms, cost.forward_ms)
            np.testing.assert_array_equal(job.cost.units[unit].backward_ms, cost.backward_ms)
        assert job.memory_cap_gib == memory_cap_gib(job.cluster)


def test_other_sizes_have_other_costs() -> None:
    """Prevents a resized job that keeps the costs of its old parallel sizes."""
    job = job_spec()
    split = job.with_sizes(Parallel(tensor=2, pipeline=2))
    assert split.cost.units["head"].parameters < job.cost.units["head"].parameters
    assert job.parallel == Parallel(pipeline=2, data=2)


def test_checked_and_costed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents repeated validation and cost computation in a plan or a search."""
    made = counting(monkeypatch, source_module, analytic_cost)
    checked = counting(monkeypatch, job_module, check_parallel)
    planned = request(epochs=1)
    make_plan(planned)
    make_plan(planned.with_caps(Caps.of(tiles=8, tokens=400)))
    samples = {"lengths": example_lengths(), "samples_per_step": 50, "samples": 100}
    sizes = {"sizes": FreeSizes(gpus=4), "layouts": (planned.job.parallel,)}
    of_caps = StrategyRequest(job=planned.job, **sizes, **samples)
    search_caps(of_caps, "time", lambda done: None)
    assert (made.call_count, checked.call_count) == (1, 1)


@pytest.mark.parametrize("source", [ANALYTIC, MEASURED], ids=["counted", "measured"])
@pytest.mark.parametrize("lengths", [example_lengths(), None], ids=["data", "shapes"])
def test_a_plan_directory_gives_its_job_again(tmp_path, source, lengths) -> None:
    """Prevents a check, replay or run of another job than was planned."""
    planned = request(cost_source=source, frozen=("vision",), lengths=lengths)
    result = make_plan(planned)
    save_plan(result, tmp_path / "plan")
    found = make_job(result.plan, tmp_path / "plan")
    for name in {field.name for field in fields(JobSpec)} - {"cost"}:
        assert attrgetter(name)(found) == attrgetter(name)(planned.job)
    assert found.cost.source == planned.job.cost.source
    data = read_plan_data(result.plan, tmp_path / "plan")
    packs, _ = PlanFiles(plan=result.plan, job=found, data=data).steps
    assert packs.sha256 == planned.data.schedule(planned.job)[0].sha256


def test_data_that_cannot_be_planned_is_refused_with_the_request() -> None:
    """Prevents constructing a request that no plan can satisfy."""
    few = partial(alter, alter(request(epochs=1), packs_per_step=2))
    for asked, message in (
        (partial(few, packs_per_step=2_000_002), "at most 1,000,000"),
        (partial(request, lengths=None, packs_per_step=2_000_002), "at most 1,000,000"),
        (partial(few, epochs=1_000_000), "fewer --epochs"),
    ):
        with pytest.raises(UserError, match=message):
            asked()
