"""Plans of forty jobs of all kinds are those of before, figure by figure."""

import json

import pytest
from kept_job_cases import JOBS, KEPT, plan_figures, plan_job, write_data

FIGURES = json.loads(KEPT.read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    write_data(folder)
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_a_job_gets_the_plan_that_it_had(name, data, tmp_path):
    """Prevents a change elsewhere from moving packs, stages, times or memory of a plan unseen."""
    found = plan_figures(plan_job(JOBS[name], data, tmp_path / "plan"), tmp_path / "plan")
    assert_same(found, FIGURES[name], name)


def test_every_job_has_figures():
    """Prevents figures of jobs that no longer exist, which nothing would compare."""
    assert list(FIGURES) == list(JOBS)


def assert_same(found, kept, place: str) -> None:
    """Compare figures: numbers to 1e-9, all else exactly; say which figure differs."""
    if isinstance(kept, dict | list):
        names = range(len(kept)) if isinstance(kept, list) else kept
        assert len(found) == len(kept), place
        for name in names:
            assert_same(found[name], kept[name], f"{place}: {name}")
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-9, abs=1e-12), place
    else:
        assert found == kept, place
