"""What the README and docs say of the ablation, against what was measured."""

import sys
from pathlib import Path

import pytest

from omnibal.base.files import read_json_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from ablation import AblationResult, lost_entries, markdown_of, picture

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result() -> AblationResult:
    return read_json_model(AblationResult, REPOSITORY / "docs" / "ablation.json", "measure it")


def test_readme_and_picture_show_what_was_measured(result):
    """Prevents: figures on the front page that no command gave."""
    assert markdown_of(result) in (REPOSITORY / "README.md").read_text()
    drawn = (REPOSITORY / "docs" / "ablation.svg").read_text()
    assert drawn == picture(result.layouts[-1])


def test_lost_time_adds_up(result):
    """Prevents: a table of lost time that hides some."""
    for layout in result.layouts:
        for one in layout.variants:
            total = sum(lost_entries(one).values())
            if one.trained:
                step = one.trained.usual_step_ms + one.trained.logging_ms
            else:
                step = sum(one.replayed.step_ms) / len(one.replayed.step_ms)
            assert total == pytest.approx(step)
            # Rounds of every plan, as they were paired.
            assert len(one.step_ms) == len(one.predicted_ms) == len(one.samples)
