"""Check that ms-swift, with the lengths that it counted, will make the plan's packs.

    swift export ... --to_cached_dataset true --output_dir counted
    python check_packs.py counted/train

Needs only pyarrow, which ms-swift installs. Exit status 1 if packs differ, and 2 if files cannot be
read.
"""

import argparse
import json
import sys
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MAX_LISTED = 3  # rows in a message


def counted_lengths(folder: Path) -> list[int]:
    """Return the tokens of every row of ms-swift's cached dataset."""
    rows: list[int | list[int]] = []
    for entry in json.loads((folder / "state.json").read_text())["_data_files"]:
        with pa.memory_map(str(folder / entry["filename"])) as source:
            table = pa.ipc.open_stream(source).read_all()
        column = "lengths" if "lengths" in table.column_names else "length"
        rows += table[column].to_pylist()
    return [sum(row) if isinstance(row, list) else row for row in rows]


def packs_of(lengths: list[int], packing_length: int) -> list[int]:
    """Return the first row of every pack that next fit makes of rows of these lengths."""
    begins: list[int] = []
    held = packing_length
    for row, length in enumerate(lengths):
        # A full pack ends, even if the next row has no tokens.
        if held >= packing_length or held + length > packing_length:
            begins.append(row)
            held = 0
        held += length
    return begins


def other_lengths(counted: list[int], planned: list[int]) -> str | None:
    """Return a message on rows with other lengths: their number and the first; None if equal."""
    differ = [row for row, tokens in enumerate(planned) if counted[row] != tokens]
    if not differ:
        return None
    named = [f"row {row} has {counted[row]} for {planned[row]}" for row in differ[:MAX_LISTED]]
    more = ", ..." if len(differ) > MAX_LISTED else ""
    return f"{len(differ)} of {len(counted)} lengths differ ({', '.join(named)}{more})"


def verdict(counted: list[int], planned: list[int], packs: list[int]) -> tuple[str, int]:
    """Return the message and the exit status: 1 if packs differ, else 0, even if lengths differ.

    By row: tokens `counted` by ms-swift, tokens `planned`, and number of the plan's pack.
    """
    if len(counted) != len(planned):
        missing = f"{len(counted)} rows were counted, not the plan's {len(planned)}"
        return f"{missing}: rows are missing", 1
    sums: dict[int, int] = {}
    for pack, tokens in zip(packs, planned, strict=True):
        sums[pack] = sums.get(pack, 0) + tokens
    expected = [row for row, pack in enumerate(packs) if not row or packs[row - 1] != pack]
    made = packs_of(counted, max(sums.values()))  # the export's packing_length
    count, lengths = (
        f"{len(expected)} packs of {len(planned)} rows",
        other_lengths(counted, planned),
    )
    if made == expected:
        others = f"packs are as planned: {count}; but times and memory are of other lengths"
        return f"as planned: {count}" if lengths is None else f"{others}: {lengths}", 0
    pairs = zip_longest(made, expected)
    first = next(number for number, (begin, other) in enumerate(pairs) if begin != other)
    reason = f"{lengths}: plan with these lengths"
    if lengths is None:
        reason = "yet all lengths are as planned; train.jsonl is not of this order.parquet"
    return f"pack {first - 1} differs: {reason}", 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("counted", type=Path, help="folder `train` that `swift export` wrote")
    default = Path(__file__).with_name("order.parquet")
    parser.add_argument("--order", type=Path, default=default, help="order.parquet of the export")
    arguments = parser.parse_args()
    unreadable = f"{arguments.counted}: no folder `train` of a cached dataset"
    try:
        counted = counted_lengths(arguments.counted)
        unreadable = f"{arguments.order}: no order.parquet of an export"
        order = pq.read_table(arguments.order, columns=["tokens", "pack"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        print(f"error: {unreadable} ({type(error).__name__}: {reason})", file=sys.stderr)
        return 2
    message, status = verdict(counted, order["tokens"].to_pylist(), order["pack"].to_pylist())
    print(message)
    return status


if __name__ == "__main__":
    sys.exit(main())
