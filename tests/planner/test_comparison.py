"""The picture that compares two steps' timelines, against those timelines."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from schedule_cases import simulate_1f1b

from omnibal.pipeline.schedules import Pass
from omnibal.report.drawing import COLOURS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from ablation_picture import ShownStep, before_and_after

pytestmark = pytest.mark.quick


def shown_step(title: str, scale: float, recomputed: float, shape=(6, 3)) -> ShownStep:
    """Return a step of `shape[0]` micro-batches on `shape[1]` stages."""
    rng = np.random.default_rng(1)
    forward_ms = scale * rng.uniform(5, 15, shape)
    recompute_ms = recomputed * forward_ms
    links = np.full((shape[0], shape[1] - 1), 0.5)
    timeline = simulate_1f1b(forward_ms, 2 * forward_ms + recompute_ms, links, links)
    return ShownStep(
        title=title, note="<made> & up", timeline=timeline, recompute_ms=recompute_ms, samples=24
    )


STEPS = (shown_step("before", 2.0, 0.5), shown_step("after", 1.0, 0.0))


@pytest.fixture(scope="module")
def panels() -> list[Axes]:
    return before_and_after("Two <steps>", STEPS).axes


def bars(axes: Axes, colour: str) -> np.ndarray:
    """Return (stage, start, end) of all bars of a colour, sorted."""
    found = [
        (round(bar.get_y() + 0.4), bar.get_x(), bar.get_x() + bar.get_width())
        for bar in axes.patches
        if to_hex(bar.get_facecolor()) == COLOURS[colour]
    ]
    return np.array(sorted(found))


def test_every_pass_is_drawn_where_it_ran(panels) -> None:
    """Prevents passes that are missing, overlap or use a different time axis."""
    for axes, step in zip(panels, STEPS, strict=True):
        assert axes.get_xlim() == (0, float(STEPS[0].timeline.step_ms))
        for colour, kind in (("green", Pass.FORWARD), ("purple", Pass.BACKWARD)):
            found = bars(axes, colour)
            start, end = (
                ms[kind].T.ravel() for ms in (step.timeline.start_ms, step.timeline.end_ms)
            )
            np.testing.assert_allclose(found[:, 1], start)
            np.testing.assert_allclose(found[:, 2], end)
        passes = np.concatenate([bars(axes, "green"), bars(axes, "purple")]).tolist()
        same_row = [(a, b) for a, b in pairwise(sorted(passes)) if a[0] == b[0]]
        assert len(same_row) == 3 * (2 * 6 - 1)
        assert all(end <= after + 1e-9 for (_, _, end), (_, after, _) in same_row)


def test_recomputation_is_the_first_part_of_a_backward(panels) -> None:
    """Prevents recomputation drawn over the backward, or drawn without any."""
    again, backward = bars(panels[0], "orange"), bars(panels[0], "purple")
    np.testing.assert_allclose(again[:, :2], backward[:, :2])
    np.testing.assert_allclose(again[:, 2] - again[:, 1], STEPS[0].recompute_ms.T.ravel())
    assert not len(bars(panels[1], "orange"))


def test_figures_are_those_of_the_timelines(panels) -> None:
    """Prevents a speed-up computed from other samples or steps than the drawn timelines."""
    texts = [axes.get_title("left") for axes in panels]
    first, second = (float(step.timeline.step_ms) for step in STEPS)
    for shown, step in zip(texts, STEPS, strict=True):
        step_ms = float(step.timeline.step_ms)
        assert f"{24_000 / step_ms:.1f} per s" in shown
        wait = 1 - step.timeline.busy_ms.sum() / (3 * step_ms)
        assert f"{100 * wait:.1f} % of device time is waiting" in shown
        assert "<made> & up" in shown
    assert f"per s, {first / second:.2f} times the first" in texts[1]
    assert "times the first" not in texts[0]
    # Recomputation is half a forward per three forwards' worth: 1/7 of the total.
    assert "14.3 % of computing is recomputation" in texts[0]
    assert "0.0 % of computing is recomputation" in texts[1]


def test_many_stages() -> None:
    """Prevents a picture that grows with the stages, and overlapping labels of thin rows."""
    figure = before_and_after("Deep", [shown_step("deep", 1.0, 0.0, (40, 32))])
    assert 72 * figure.get_figheight() < 600
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == ["stage 0", "stage 31"]
