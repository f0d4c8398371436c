"""What `omnibal replan` found: what was mispredicted, by kind of unit, stage and rank."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from omnibal.report.formatting import milliseconds, percent
from omnibal.report.table import Column, Facts, Row, Table

if TYPE_CHECKING:  # they import scipy, which `omnibal --help` should not wait for
    from omnibal.runs.refit import RunFit
    from omnibal.runs.replanning import Replanned


def misprediction_table(fit: "RunFit") -> Table:
    """Predicted and measured time of passes by unit kind and stage."""
    kinds = [_row(one.name, one.predicted_ms, one.fitted_ms) for one in fit.kinds]
    stages = [
        _row(f"stage {number}", one.predicted_ms, one.measured_ms)
        for number, one in enumerate(fit.stages)
    ]
    slow = [
        (f"stage {number}, all ranks", "", "", f"{one.slowness:.2f}")
        for number, one in enumerate(fit.stages)
        if one.slowness > 1 and not one.slow_ranks
    ]
    ranks = [
        (f"stage {number}, data-parallel rank {rank}", "", "", f"{factor:.2f}")
        for number, one in enumerate(fit.stages)
        for rank, factor in one.slow_ranks.items()
    ]
    sections: list[Sequence[Row]] = [kinds, stages]
    sections += [[("slow devices", "", "", ""), *slow, *ranks]] if slow or ranks else []
    return Table.of_rows(
        "Mispredicted: passes of a step of the measured ranks, in ms",
        (Column(title="", style="left"), "predicted", "measured", "factor"),
        *sections,
    )


def _row(name: str, predicted_ms: float, measured_ms: float) -> Row:
    factor = measured_ms / predicted_ms if predicted_ms else 1.0
    return name, f"{predicted_ms:,.2f}", f"{measured_ms:,.2f}", f"{factor:.2f}"


def replan_facts(planned: "Replanned") -> Facts:
    entries = [("step, new plan", milliseconds(planned.step_ms))]
    if planned.before_ms is not None:
        entries.insert(0, ("step, earlier plan by the same costs", milliseconds(planned.before_ms)))
        entries.append(("gain", percent(planned.gain)))
    if planned.fit is not None:
        entries.insert(0, ("step, measured median", milliseconds(planned.fit.step_ms)))
    plan = planned.plan
    layers = [
        "+".join(str(stage.number_of_layers(tower)) for tower in plan.pipeline_model.towers)
        for stage in plan.held(plan.stages)
    ]
    return Facts("Planned anew", [*entries, ("layers of each stage", ", ".join(layers))])


def replan_summary(planned: "Replanned") -> dict[str, Any]:
    fit = planned.fit
    summary: dict[str, Any] = {
        "step_ms": planned.step_ms,
        "before_ms": planned.before_ms,
        "gain": planned.gain,
        "parallel": planned.plan.parallel.model_dump(),
    }
    if fit is None:
        return summary
    return summary | {
        "measured_step_ms": fit.step_ms,
        "measured_steps": fit.refit.measured_steps,
        "noise": fit.noise,
        "update_factor": fit.refit.update,
        "kinds": {one.name: one.factor for one in fit.kinds},
        "stages": [asdict(one) for one in fit.stages],
    }
