"""Load of every rank and step, before and after balancing, as a self-contained SVG file.

Both sides are simulated: predicted forward and backward time of the whole model, on the samples
given. "Before" is common practice, which fills micro-batches with a fixed count of samples in
random order and pads them to their longest; "after" is the schedule that was made.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.data.metrics import pad_ratio, rank_sums, straggler_factor
from omnibal.data.packs import Packs, ScheduledPacks
from omnibal.data.steps import DataRequest
from omnibal.files import atomic
from omnibal.job import JobSpec
from omnibal.limits import words
from omnibal.report.svg import Plot, Scale, document, line, polyline, rect, text
from omnibal.report.text import milliseconds, number, percent, shorten, tick

_WIDTH, _MARGIN = 1100, 28
_LEFT, _RIGHT = 92, 1000
"""Ends of the time axis; the end of the last step is printed right of it."""
_STEPS_SHOWN, _RANKS_SHOWN = 24, 16
_ROWS_HEIGHT = 120.0
"""Height of all bars of a panel, unless they are very many or few."""
_FIRST_ROW = 42.0
_LABELLED_ROW = 13.0
"""Least row height at which every row has a label."""
_FIGURE_PITCH = 160
_DIGIT_WIDTH = 7.5
"""Most width of a digit of a step's number."""
_PLOT_HEIGHT, _PLOT_GAP = 220, 24
_QUANTILES = 200
"""Drawn points of a distribution, however long the epoch."""
_NAME_LIMIT = 28
_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfc; --ink: #1d2125; --soft: #565d64; --rule: #dcddda;
  --before: #c2691c; --after: #1c6dab; --wait: #e9eaeb; --stripe: #848b92;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15181b; --ink: #e4e6e8; --soft: #a3abb2; --rule: #363c41;
    --before: #e8995a; --after: #5caae6; --wait: #2a2f34; --stripe: #838b93;
  }
}
svg { background: var(--paper); }
.paper { fill: var(--paper); }
text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; fill: var(--soft); }
text.title { font-size: 20px; font-weight: 600; fill: var(--ink); }
text.heading { font-size: 14px; font-weight: 600; fill: var(--ink); }
text.value { font-size: 15px; font-weight: 600; fill: var(--ink); }
text.mark { font-size: 13px; font-weight: 600; fill: var(--ink); }
.box { fill: none; stroke: var(--ink); stroke-width: 1.2; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
rect.before { fill: var(--before); }
rect.after { fill: var(--after); }
rect.wait { fill: url(#waiting); }
.blank { fill: var(--wait); }
.stripe { stroke: var(--stripe); stroke-width: 1.6; }
line.grid { stroke: var(--rule); stroke-width: 1; }
line.axis { stroke: var(--soft); stroke-width: 1; }
line.cut { stroke: var(--paper); stroke-width: 1.6; }
line.last { stroke: var(--ink); stroke-width: 1.6; }
polyline { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
polyline.before { stroke: var(--before); stroke-dasharray: 7 4; }
polyline.after { stroke: var(--after); }
"""
_WAITING = (
    '<defs><pattern id="waiting" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" class="blank"/>'
    '<line x1="0" y1="0" x2="0" y2="5" class="stripe"/></pattern></defs>'
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadSetting:
    """Settings of the comparison: how samples were packed, and the job that predicts their time."""

    job: JobSpec
    """Job whose data-parallel ranks are shown, and whose costs predict their times."""
    request: DataRequest

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.job.parallel.data

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in a step."""
        return self.request.packs_per_step // self.dp


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankLoads:
    """Steps of an epoch: the compute time of every rank in each, and the samples trained."""

    compute_ms: np.ndarray
    """Compute time, [steps, ranks]; a step ends with its slowest rank."""
    samples: int
    """Samples of all steps together."""
    pad_ratio: float
    """Share of the tokens computed that are padding, mean over micro-batches."""

    @property
    def step_ms(self) -> np.ndarray:
        """Time of every step, that of its slowest rank. [steps]"""
        return self.compute_ms.max(axis=1)

    @property
    def wait_fraction(self) -> float:
        """Share of all ranks' time that passes in waiting for the slowest."""
        return float(1 - self.compute_ms.mean(axis=1).sum() / self.step_ms.sum())

    @property
    def ms_per_sample(self) -> float:
        """Time of all steps per sample trained."""
        return float(self.step_ms.sum() / self.samples)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Panel:
    """One of the two sides as it is drawn."""

    css: str
    heading: str
    loads: RankLoads
    steps: np.ndarray
    """Steps shown, ascending."""
    ranks: np.ndarray
    """Ranks shown, ascending."""

    @property
    def end_ms(self) -> float:
        """End of the last step shown, if the steps shown follow one another."""
        return float(self.loads.step_ms[self.steps].sum())

    @property
    def row_height(self) -> float:
        return min(_ROWS_HEIGHT / len(self.ranks), 32.0)

    @property
    def bottom(self) -> float:
        return _FIRST_ROW + self.row_height * len(self.ranks)


def common_practice(
    lengths: Lengths,
    samples_per_micro_batch: int,
    dp: int,
    micro_batches: int,
    seed: int,
    load: Callable[[Packs, Lengths], np.ndarray],
) -> np.ndarray:
    """Load of every rank and step when nothing is balanced. [steps, dp]

    Samples come in random order, the same count in every micro-batch, where each is padded with
    tokens to the longest of them; tiles need no padding. The last, incomplete step is dropped.

    Padding is counted as if it were text: a trainer that leaves it out of attention, or of the
    head, is a little faster. The caps do not hold here: some micro-batches may fit on no device.

    Args:
        lengths: of all samples.
        samples_per_micro_batch: of every one.
        dp: data-parallel ranks.
        micro_batches: of one rank in a step.
        seed: of the order.
        load: gives the load of every micro-batch [packs] from packs of these lengths.
    """
    micro_batch = _random_micro_batches(lengths, samples_per_micro_batch, dp * micro_batches, seed)
    tokens = lengths.tokens.copy()
    tokens[micro_batch] = lengths.tokens[micro_batch].max(axis=1, keepdims=True)
    packs = Packs(
        samples=micro_batch.ravel(),
        offsets=np.arange(0, micro_batch.size + 1, samples_per_micro_batch),
    )
    return load(packs, replace(lengths, tokens=tokens)).reshape(-1, dp, micro_batches).sum(axis=2)


def _random_micro_batches(
    lengths: Lengths, samples_per_micro_batch: int, per_step: int, seed: int
) -> np.ndarray:
    """Samples of the micro-batches of all complete steps, [micro-batches, samples]."""
    samples_per_step = samples_per_micro_batch * per_step
    complete = len(lengths) // samples_per_step * samples_per_step
    order = np.random.default_rng(seed).permutation(len(lengths))
    return order[:complete].reshape(-1, samples_per_micro_batch)


def write_loads(
    setting: LoadSetting, scheduled: ScheduledPacks, lengths: Lengths, output: Path
) -> None:
    """Write the SVG file of `draw_loads`, and the directories that it lies in."""
    svg = draw_loads(setting, scheduled, lengths)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic(output) as temporary:
        temporary.write_bytes(svg.encode("ascii", "xmlcharrefreplace"))


def draw_loads(setting: LoadSetting, scheduled: ScheduledPacks, lengths: Lengths) -> str:
    """The SVG of a schedule of one epoch, and of common practice on the same samples.

    Equal inputs give equal text.
    """
    count = max(round(len(scheduled.packs.samples) / len(scheduled)), 1)
    each = f"{count:,} sample{_s(count)} per micro-batch"
    before = _loads_before(setting, lengths, count)
    after = _loads_after(setting, scheduled, lengths)
    # Equally many on both sides, so that their ends can be compared.
    steps = min(_STEPS_SHOWN, *(len(side.compute_ms) for side in (before, after) if side))
    shown = [("after", f"After: packed, matched and dealt out ({setting.request.method})", after)]
    note = (
        f"No picture of before: {each} do not make one complete step of "
        f"{setting.request.packs_per_step:,} micro-batches."
    )
    if before:
        heading = f"Before: random order, {each}, padded to the longest"
        shown.insert(0, ("before", heading, before))
        note = (
            f"Before: seed {setting.request.seed}; {each}, the rounded mean of after; padding "
            "costs what text does; the caps do not hold; the last incomplete step is dropped."
        )
    panels = [
        _Panel(
            css=css,
            heading=heading,
            loads=loads,
            steps=_evenly(len(loads.compute_ms), steps),
            ranks=_evenly(setting.dp, _RANKS_SHOWN),
        )
        for css, heading, loads in shown
    ]
    contents = (
        f"{len(lengths):,} sample{_s(len(lengths))} in {len(scheduled):,} pack{_s(len(scheduled))}"
    )
    return _document(setting, contents, panels, note)


def _loads_before(setting: LoadSetting, lengths: Lengths, count: int) -> RankLoads | None:
    """Common practice with `count` samples in a micro-batch; None if they make no step."""
    seed = setting.request.seed
    compute_ms = common_practice(
        lengths, count, setting.dp, setting.micro_batches, seed, setting.job.load_ms
    )
    if not len(compute_ms):
        return None
    micro_batch = _random_micro_batches(lengths, count, setting.request.packs_per_step, seed)
    offsets = np.arange(0, micro_batch.size + 1, count)
    return RankLoads(
        compute_ms=compute_ms,
        samples=micro_batch.size,
        pad_ratio=pad_ratio(lengths.tokens[micro_batch.ravel()], offsets),
    )


def _loads_after(setting: LoadSetting, scheduled: ScheduledPacks, lengths: Lengths) -> RankLoads:
    load_ms = setting.job.load_ms(scheduled.packs, lengths)
    return RankLoads(
        compute_ms=rank_sums(scheduled, load_ms, setting.dp),
        samples=len(scheduled.packs.samples),
        # Samples of a pack follow one another in one row.
        pad_ratio=0.0,
    )


def _evenly(count: int, at_most: int) -> np.ndarray:
    """Up to `at_most` of the numbers below `count`, evenly spread from the first to the last."""
    return np.linspace(0, count - 1, min(count, at_most)).round().astype(np.int64)


def _s(count: int) -> str:
    return "s" if count != 1 else ""


def _time_unit(longest_ms: float) -> tuple[str, float]:
    """The unit for an axis, and its ms."""
    return ("s", 1000.0) if longest_ms >= 5000 else ("ms", 1.0)


def _document(setting: LoadSetting, contents: str, panels: list[_Panel], note: str) -> str:
    job = setting.job
    model, cluster = (shorten(c.name, _NAME_LIMIT) for c in (job.model, job.cluster))
    caps, title = setting.request.caps, f"Predicted load of ranks: {model} on {cluster}"
    subtitle = (
        f"{contents} of at most {words([f'{caps[name]:,} {name}' for name in caps.names])}; "
        f"{setting.dp:,} data-parallel rank{_s(setting.dp)}, up to {setting.micro_batches:,} "
        f"pack{_s(setting.micro_batches)} each per step"
    )
    x = Scale(0, max(panel.end_ms for panel in panels), _LEFT, _RIGHT)
    parts, top = [_heading(title, subtitle)], 112.0
    for panel in panels:
        drawn = _panel(panel, x) + _figures(panel, panels[0])
        parts.append(f'<g class="panel {panel.css}" transform="translate(0 {top:g})">{drawn}</g>')
        top += panel.bottom + 84
    parts.append(_distributions(panels, top))
    top += _PLOT_HEIGHT + 48
    source = (
        f"Simulated from predicted time ({shorten(job.cost.source, 40)}): both passes of the whole "
        "model on every rank. A step ends with its slowest rank."
    )
    parts += [text(_MARGIN, top, source), text(_MARGIN, top + 18, note)]
    height = top + 34
    return document(title, _WIDTH, height, _STYLE, parts, _WAITING)


def _heading(title: str, subtitle: str) -> str:
    box = 250
    return "".join(
        (
            text(_MARGIN, 36, title, "title"),
            text(_MARGIN, 58, subtitle),
            rect(_WIDTH - _MARGIN - box, 66, box, 24, "box"),
            text(_WIDTH - _MARGIN - box / 2, 82, "simulated from predicted time", "mark middle"),
            rect(_MARGIN, 74, 9, 12, "before"),
            rect(_MARGIN + 11, 74, 9, 12, "after"),
            text(_MARGIN + 26, 84, "computing (before, after)"),
            rect(_MARGIN + 200, 74, 20, 12, "wait"),
            text(_MARGIN + 226, 84, "waiting for the slowest rank of the step"),
        )
    )


def _panel(panel: _Panel, x: Scale) -> str:
    """Panel with the steps in a row on the time axis, and in each a bar per rank."""
    unit, unit_ms = _time_unit(x.high)
    parts = [
        text(_MARGIN, 14, panel.heading, "heading"),
        text(_WIDTH - _MARGIN, 14, _what_is_shown(panel), "label end"),
        text(_LEFT - 8, _FIRST_ROW - 8, "step", "label end"),
        text(_LEFT - 18, panel.bottom + 17, f"time, {unit}", "label end"),
    ]
    for value in x.ticks(10):
        parts.append(line(x(value), _FIRST_ROW, x(value), panel.bottom + 4, "grid"))
        parts.append(text(x(value), panel.bottom + 17, tick(value / unit_ms), "label middle"))
    parts += _rank_labels(panel)
    ends = np.concatenate([[0], np.cumsum(panel.loads.step_ms[panel.steps])])
    for step, start_ms in zip(panel.steps, ends, strict=False):
        parts += _step_bars(panel, step, start_ms, x)
    parts += [line(x(end), _FIRST_ROW, x(end), panel.bottom, "cut") for end in ends[1:-1]]
    parts += _step_numbers(panel, x(ends))
    last = x(panel.end_ms)
    parts.append(line(last, _FIRST_ROW - 4, last, panel.bottom + 4, "last"))
    middle = (_FIRST_ROW + panel.bottom) / 2
    parts.append(text(last + 7, middle + 5, f"{number(panel.end_ms / unit_ms)} {unit}", "value"))
    return "".join(parts)


def _what_is_shown(panel: _Panel) -> str:
    steps, ranks = panel.loads.compute_ms.shape
    counts = [
        f"{len(shown)} of {of:,} {what}s" if len(shown) < of else f"{of} {what}{_s(of)}"
        for shown, of, what in ((panel.steps, steps, "step"), (panel.ranks, ranks, "rank"))
    ]
    return f"{', '.join(counts)}; steps end to end"


def _rank_labels(panel: _Panel) -> list[str]:
    rows = list(range(len(panel.ranks)))
    middle = _FIRST_ROW + panel.row_height / 2 + 4
    return [
        text(_LEFT - 8, middle + panel.row_height * row, f"rank {panel.ranks[row]:,}", "label end")
        for row in (rows if panel.row_height >= _LABELLED_ROW else (rows[0], rows[-1]))
    ]


def _step_numbers(panel: _Panel, ends: np.ndarray) -> list[str]:
    """The number of every step that has room for it above its bars, which end at `ends`."""
    parts, free_from = [], 0.0
    for step, middle in zip(panel.steps, (ends[:-1] + ends[1:]) / 2, strict=True):
        half = _DIGIT_WIDTH * len(f"{step:,}") / 2
        if middle - half >= free_from:
            parts.append(text(middle, _FIRST_ROW - 8, f"{step:,}", "label middle"))
            free_from = middle + half
    return parts


def _step_bars(panel: _Panel, step: int, start_ms: float, x: Scale) -> list[str]:
    """One step's bars: the compute time of each rank, and after it the time it waits."""
    parts, end = [], x(start_ms + panel.loads.step_ms[step])
    for row, rank in enumerate(panel.ranks):
        compute_ms = panel.loads.compute_ms[step, rank]
        wait_ms = panel.loads.step_ms[step] - compute_ms
        tip = (
            f"step {step:,}, rank {rank:,}: computes {milliseconds(compute_ms)}, "
            f"waits {milliseconds(wait_ms)}"
        )
        y, height = _FIRST_ROW + panel.row_height * row, panel.row_height - 1
        start, done = x(start_ms), x(start_ms + compute_ms)
        parts.append(rect(start, y, done - start, height, panel.css, tip))
        # Thinner ones would be written as 0.
        if end - done >= 0.05:
            parts.append(rect(done, y, end - done, height, "wait", tip))
    return parts


def _figures(panel: _Panel, first: _Panel) -> str:
    """The key figures of a panel; time per sample also as a share of the first panel's."""
    loads = panel.loads
    share = number(loads.ms_per_sample / first.loads.ms_per_sample)
    entries = (
        (f"{straggler_factor(loads.compute_ms):.4f}", "straggler factor, mean"),
        (percent(loads.wait_fraction), "of rank time waited"),
        (percent(loads.pad_ratio), "of tokens are padding"),
        (number(loads.samples / len(loads.compute_ms), 4), "samples per step, mean"),
        (milliseconds(float(loads.step_ms.mean())), "per step, mean"),
        (
            milliseconds(loads.ms_per_sample),
            "per sample" if panel is first else f"per sample, {share} of before",
        ),
    )
    return "".join(
        text(_LEFT + _FIGURE_PITCH * place, panel.bottom + 42, value, "value")
        + text(_LEFT + _FIGURE_PITCH * place, panel.bottom + 58, label)
        for place, (value, label) in enumerate(entries)
    )


def _distributions(panels: list[_Panel], top: float) -> str:
    """Distributions over the whole epoch: imbalance of steps, and load of ranks."""
    parts = [text(_MARGIN, top + 14, "All steps of the epoch", "heading")]
    for place, panel in enumerate(panels):
        left = _MARGIN + 220 + 100 * place
        parts.append(polyline(np.array([left, left + 34]), np.array([top + 9] * 2), panel.css))
        parts.append(text(left + 41, top + 14, panel.css))
    unit, unit_ms = _time_unit(max(panel.loads.compute_ms.max() for panel in panels))
    loads = {panel.css: panel.loads.compute_ms.ravel() / unit_ms for panel in panels}
    plots = [("load", f"load of a rank in a step, {unit}", "% of loads at or below", loads, 0.0)]
    if panels[0].loads.compute_ms.shape[1] > 1:
        uneven = {p.css: p.loads.step_ms / p.loads.compute_ms.mean(axis=1) for p in panels}
        title = "straggler factor of a step: slowest rank / mean"
        plots.insert(0, ("straggler", title, "% of steps at or below", uneven, 1.0))
    width = (_WIDTH - 2 * _MARGIN - _PLOT_GAP * (len(plots) - 1)) / len(plots)
    for place, (css, x_title, y_title, values, low) in enumerate(plots):
        high = max(1.02 * float(max(v.max() for v in values.values())), low + 0.02)
        plot = Plot.over((low, high), (0, 100), width, _PLOT_HEIGHT)
        drawn = plot.axes(x_title, y_title) + _cumulative_shares(plot, values)
        at = f"{_MARGIN + place * (width + _PLOT_GAP):g} {top + 26:g}"
        parts.append(f'<g class="{css}" transform="translate({at})">{drawn}</g>')
    return "".join(parts)


def _cumulative_shares(plot: Plot, values: dict[str, np.ndarray]) -> str:
    shares = np.linspace(0, 1, _QUANTILES + 1)
    return "".join(
        polyline(
            plot.x(np.quantile(some, shares, method="inverted_cdf")), plot.y(100 * shares), css
        )
        for css, some in values.items()
    )
