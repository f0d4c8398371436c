"""Plans of forty jobs of all kinds match stored figures."""

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
    """Prevents an unrelated change from altering a plan's packs, stages, times or memory."""
    found = plan_figures(plan_job(JOBS[name], data, tmp_path / "plan"), tmp_path / "plan")
    assert_same(found, FIGURES[name], name)


def test_every_job_has_figures():
    """Prevents stored figures of removed jobs, which nothing would compare."""
    assert list(FIGURES) == list(JOBS)


def assert_same(found, kept, place: str) -> None:
    """Compare floats to 1e-9 and other values exactly; name the figure that differs."""
    if isinstance(kept, dict | list):
        names = range(len(kept)) if isinstance(kept, list) else kept
        assert len(found) == len(kept), place
        for name in names:
            assert_same(found[name], kept[name], f"{place}: {name}")
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-9, abs=1e-12), place
    else:
        assert found == kept, place
