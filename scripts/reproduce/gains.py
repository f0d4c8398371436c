"""What the joint search gains over BMP with the paper's recomputation, at 40 and 80 GB.

    python scripts/reproduce/gains.py [--samples 60000] [--cluster mine.toml]

Simulated, on ISF's packs for both and on costs that are calibrated on one published figure
(`calibration.py`). Where BMP with recomputation from the front does not fit, nothing can be gained.
"""

from paper import (
    TABLE_9,
    Data,
    Predicted,
    arguments,
    cluster_of,
    described,
    print_table,
)

from omnibal.base.errors import DoesNotFit
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule

MEMORIES_GIB = (40.0, 80.0)


def main() -> None:
    given = arguments(__doc__)
    data = Data(given.samples, given.seed)
    rows = []
    for job in TABLE_9:
        for memory_gib in MEMORIES_GIB:
            cluster = cluster_of(given).model_copy(update={"memory_gib": memory_gib})
            predicted = Predicted(job, cluster)
            step_ms: list[float | None] = []
            stages = ""
            for method, rule in (
                (PartitionMethod.BMP, RecomputeRule.FRONT),
                (PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST),
            ):
                try:
                    chosen = predicted.stages(method, rule, data.isf)
                except DoesNotFit:
                    step_ms.append(None)
                    continue
                step_ms.append(predicted.step_ms(chosen, data.isf))
                stages = described(chosen)
            bmp_ms, joint_ms = step_ms
            gain = f"{bmp_ms / joint_ms - 1:.1%}" if bmp_ms and joint_ms else ""
            cells = ["does not fit" if ms is None else f"{ms / 1e3:.2f} s" for ms in step_ms]
            rows.append([job.model, f"{memory_gib:g} GiB", *cells, gain, stages])
    columns = (
        "model",
        "device",
        "bmp, front",
        "omnibal",
        "faster by",
        "vision+language (recomputed)",
    )
    print_table("The joint search over BMP", columns, rows)


if __name__ == "__main__":
    main()
