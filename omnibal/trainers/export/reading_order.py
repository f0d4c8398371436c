"""Reading order of a plan's packs (by step, slot, rank), and its file `order.parquet`.

Rank r of R reads packs r, r + R, ...
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from omnibal.base.files import atomic
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.packing.full_steps import size_of_step
from omnibal.packing.packs import ScheduledPacks

ORDER_FILE = "order.parquet"


def reading_order(packs: ScheduledPacks) -> ScheduledPacks:
    """Return the packs sorted by step, then slot, then rank."""
    return packs.take(np.lexsort((packs.dp_rank, packs.slot, packs.step)))


def packs_per_step(plan: Plan) -> int:
    """Return the packs of a full step over all ranks, the trainer's global batch."""
    data, ranks = plan.data, plan.parallel.data
    if data is None:
        return 0 if plan.shapes is None else plan.shapes.micro_batches_per_step * ranks
    # An epoch shorter than a step is one step with equally many packs on all ranks.
    return (
        size_of_step(data.packs // data.epochs, data.packs_per_step, ranks) or data.packs_per_step
    )


def sample_numbers(order: ScheduledPacks, lengths: Lengths) -> np.ndarray:
    """Return the number in all of the data of every sample of `order`, int64 [samples]."""
    rows = order.packs.samples  # rows of the lengths, which leave skipped samples out
    return rows if lengths.sample is None else lengths.sample[rows]


def record_numbers(
    order: ScheduledPacks, lengths: Lengths, annotations: Annotations | None
) -> np.ndarray | None:
    """Return the record number in its file of every sample of `order`, int64 [samples].

    Without data, the index within the source, or None if samples of several sources were skipped.
    """
    numbers = sample_numbers(order, lengths)
    if annotations is not None:
        return annotations.number[numbers]
    if lengths.sample is None:
        source = lengths.source
        by_source = np.argsort(source, kind="stable")  # stable keeps the order within a source
        first = np.searchsorted(source[by_source], source)
        place = np.empty(len(source), np.int64)
        place[by_source] = np.arange(len(source))  # the inverse permutation
        return (place - first)[order.packs.samples]
    return numbers if len(lengths.source_names) == 1 else None


def write_order(
    order: ScheduledPacks, lengths: Lengths, annotations: Annotations | None, path: Path
) -> None:
    rows, pack = order.packs.samples, order.packs.pack_of_sample
    sample = sample_numbers(order, lengths)
    columns = {
        "pack": pa.array(pack),
        "step": pa.array(order.step[pack]),
        "rank": pa.array(order.dp_rank[pack]),
        "slot": pa.array(order.slot[pack]),
        "source": pa.DictionaryArray.from_arrays(
            pa.array(lengths.source[rows]), list(lengths.source_names)
        ),
        "sample": pa.array(sample),
    }
    record = record_numbers(order, lengths, annotations)
    if record is not None:
        columns["record"] = pa.array(record)
    if annotations is not None:
        columns["file"] = pa.DictionaryArray.from_arrays(
            pa.array(annotations.file[sample]), list(map(str, annotations.files))
        )
    columns["tokens"] = pa.array(lengths.tokens[rows])
    columns |= {name: pa.array(lengths.items[name][rows]) for name in lengths.item_names}
    with atomic(path) as temporary:
        pq.write_table(pa.table(columns), temporary)
