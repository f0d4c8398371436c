"""The picture of steps under each other, against the timelines it was drawn from."""

import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from omnibal.pipeline.schedules import Pass
from omnibal.pipeline.simulate import simulate_step

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from ablation_picture import ShownStep, before_and_after

pytestmark = pytest.mark.quick

SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT = 92, 1000


def shown_step(title: str, scale: float, recomputed: float) -> ShownStep:
    rng = np.random.default_rng(1)
    forward_ms = scale * rng.uniform(5, 15, (6, 3))
    recompute_ms = recomputed * forward_ms
    links = np.full((6, 2), 0.5)
    timeline = simulate_step(forward_ms, 2 * forward_ms + recompute_ms, links, links)
    return ShownStep(
        title=title, note="<made> & up", timeline=timeline, recompute_ms=recompute_ms, samples=24
    )


STEPS = (shown_step("before", 2.0, 0.5), shown_step("after", 1.0, 0.0))


@pytest.fixture(scope="module")
def panels() -> list[ElementTree.Element]:
    """The groups of the SVG, which must be well-formed."""
    picture = before_and_after("Two <steps>", STEPS)
    assert picture.isascii()
    root = ElementTree.fromstring(picture)
    assert root.find(f"{SVG}title").text == "Two <steps>"
    return root.findall(f"{SVG}g")


def boxes(panel: ElementTree.Element, css: str) -> list[tuple[float, float, float]]:
    """(y, x, width)."""
    return sorted(
        (float(box.get("y")), float(box.get("x")), float(box.get("width")))
        for box in panel.iter(f"{SVG}rect")
        if box.get("class") == css
    )


def test_every_pass_is_drawn_where_it_ran(panels) -> None:
    """Prevents passes that are missing, overlap or stand on another axis than the other step's."""
    per_ms = (RIGHT - LEFT) / float(STEPS[0].timeline.step_ms)
    for panel, step in zip(panels, STEPS, strict=True):
        t = step.timeline
        for css, start, end in (
            ("forward", t.start_ms[Pass.FORWARD], t.end_ms[Pass.FORWARD]),
            ("backward", t.start_ms[Pass.BACKWARD], t.end_ms[Pass.BACKWARD]),
        ):
            found = np.array(boxes(panel, css))
            assert found[:, 1] == pytest.approx(LEFT + per_ms * start.T.ravel(), abs=0.06)
            assert found[:, 2] == pytest.approx(per_ms * (end - start).T.ravel() - 0.6, abs=0.06)
        passes = sorted(boxes(panel, "forward") + boxes(panel, "backward"))
        same_row = [(a, b) for a, b in pairwise(passes) if a[0] == b[0]]
        assert len(same_row) == 3 * (2 * 6 - 1)
        assert all(x + width <= after for (_, x, width), (_, after, _) in same_row)
        for _, x, width in boxes(panel, "wait"):
            assert (x, width) == pytest.approx((LEFT, per_ms * float(t.step_ms)), abs=0.06)


def test_recomputation_is_the_first_part_of_a_backward(panels) -> None:
    """Prevents recomputation that covers the backward, or is drawn where there is none."""
    per_ms = (RIGHT - LEFT) / float(STEPS[0].timeline.step_ms)
    again, backward = boxes(panels[0], "recompute"), boxes(panels[0], "backward")
    assert [box[:2] for box in again] == [box[:2] for box in backward]
    widths = [width for _, _, width in again]
    assert widths == pytest.approx(per_ms * STEPS[0].recompute_ms.T.ravel(), abs=0.06)
    assert boxes(panels[1], "recompute") == []


def test_figures_are_those_of_the_timelines(panels) -> None:
    """Prevents a speed-up of other samples or steps than the ones drawn."""
    texts = [" ".join(text.text for text in panel.iter(f"{SVG}text")) for panel in panels]
    first, second = (float(step.timeline.step_ms) for step in STEPS)
    for shown, step in zip(texts, STEPS, strict=True):
        step_ms = float(step.timeline.step_ms)
        assert f"{24_000 / step_ms:.1f} samples per second" in shown
        wait = 1 - step.timeline.busy_ms.sum() / (3 * step_ms)
        assert f"{100 * wait:.1f} % of device time is waiting" in shown
        assert "<made> & up" in shown
    assert f"samples per second, {first / second:.2f} times the first" in texts[1]
    assert "times the first" not in texts[0]
    # Half a forward again on three forwards' worth: 1/7 of all.
    assert "14.3 % of computing is recomputation" in texts[0]
    assert "0.0 % of computing is recomputation" in texts[1]


def test_no_recomputation_and_many_stages() -> None:
    """Prevents a key of what nothing shows, rows that grow out of the picture, and labels of thin
    rows on top of one another."""
    plain = before_and_after("Plain", STEPS[1:])
    assert "recompute" not in plain.split("</style>")[1]
    ones, links = np.ones((40, 32)), np.zeros((40, 31))
    step = ShownStep(
        title="deep",
        note="32 stages",
        timeline=simulate_step(ones, 2 * ones, links, links),
        recompute_ms=0 * ones,
        samples=40,
    )
    root = ElementTree.fromstring(before_and_after("Deep", [step]))
    assert float(root.get("height")) < 600
    labels = [text.text for text in root.iter(f"{SVG}text") if text.text.startswith("stage")]
    assert labels == ["stage 0", "stage 31"]
