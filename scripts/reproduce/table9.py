"""Table 9: five models, their stages and recomputed layers, and what balancing gains on each.

    python scripts/reproduce/table9.py [--samples 60000] [--cluster mine.toml]

Simulated, on costs that are calibrated on another figure (`calibration.py`). The baseline is random
data, the parameter partition and full recomputation. "paper" in the second table is the paper's own
split and recomputed layers on ISF's packs, "bmp" what BMP gives here, "omnibal" the joint search,
all simulated on the same packs and with the same memory.
"""

from paper import (
    TABLE_9,
    Data,
    Job,
    Predicted,
    arguments,
    cluster_of,
    described,
    furthest_boundary,
    layer_counts,
    print_table,
)

from omnibal.model.config import ClusterConfig
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.pipeline.stage_memory import stage_memories


def compare(job: Job, data: Data, cluster: ClusterConfig) -> tuple[list[str], list[list[str]]]:
    """The row of speed-ups, and the rows of stages."""
    predicted = Predicted(job, cluster)
    parameter = predicted.stages(
        PartitionMethod.PARAMETER, RecomputeRule.FULL, data.random, capped=False
    )
    stages = {
        "paper": predicted.paper_stages(job.recomputed),
        "bmp": predicted.stages(PartitionMethod.BMP, RecomputeRule.FRONT, data.isf),
        "omnibal": predicted.stages(PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST, data.isf),
    }
    baseline_days = predicted.gpu_days(parameter, data.random)
    days = predicted.gpu_days(stages["paper"], data.isf)
    balanced = data.balanced(predicted.cost, predicted.model, job.parallel.data)
    own = predicted.stages(PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST, balanced)
    own_days = predicted.gpu_days(own, balanced)
    speed_up = baseline_days / days
    row = [
        job.model,
        f"{job.baseline_gpu_days:.1f}",
        f"{baseline_days:.1f}",
        f"{job.gpu_days:.1f}",
        f"{days:.1f}",
        f"{job.speed_up:.2f}",
        f"{speed_up:.2f}",
        f"{speed_up / job.speed_up - 1:+.1%}",
        f"{baseline_days / own_days:.2f}",
    ]
    paper_ms = predicted.step_ms(stages["paper"], data.isf)
    workload = data.isf.workload(job.parallel.data)
    stage_rows = []
    for name, chosen in stages.items():
        memories = stage_memories(predicted.cost, [chosen], workload)
        step_ms = predicted.step_ms(chosen, data.isf)
        stage_rows.append(
            [
                job.model if name == "paper" else "",
                name,
                f"{step_ms / 1e3:.2f}",
                f"{step_ms / paper_ms - 1:+.1%}",
                str(furthest_boundary(layer_counts(chosen), job.stage_layers)),
                f"{max(memory.peak_gib for memory in memories):.0f}",
                described(chosen),
            ]
        )
    return row, stage_rows


def main() -> None:
    given = arguments(__doc__)
    data, cluster = Data(given.samples, given.seed), cluster_of(given)
    compared = [compare(job, data, cluster) for job in TABLE_9]
    columns: tuple[str, ...] = ("model", "baseline: paper", "days", "balanced: paper", "days")
    columns += ("speed-up: paper", "predicted", "error", "this project")
    print_table("Table 9: GPU days and speed-ups", columns, [row for row, _ in compared])
    columns = (
        "model",
        "stages",
        "step, s",
        "to paper's",
        "boundary",
        "GiB",
        "vision+language (recomputed)",
    )
    rows = [row for _, rows in compared for row in rows]
    print_table("Table 9: stages, and by how many layers a boundary differs at most", columns, rows)


if __name__ == "__main__":
    main()
