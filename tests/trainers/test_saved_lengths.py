"""Lengths of a dataset saved by `datasets`, as `swift export` writes it."""

from datasets import Dataset, concatenate_datasets
from planned import picture, picture_of, record, run, shows_picture

from omnibal.data.lengths import read_lengths


def test_lengths_of_a_saved_dataset_are_its_column(tmp_path):
    """Prevents rows read out of order or from the wrong Arrow file."""
    path = tmp_path / "0.png"
    path.write_bytes(picture(0))
    images = [{"bytes": None, "path": str(path)}, {"bytes": picture_of(5), "path": None}]
    rows = [
        record(n, images=images[: n % 10 + 1] if shows_picture(n) else None, lengths=[200 + n])
        for n in range(1_000)
    ]
    # Several parts with an index selection, as ms-swift's filtering leaves them.
    saved = concatenate_datasets([Dataset.from_list(rows[:700]), Dataset.from_list(rows[700:])])
    saved.select(range(3, 1_000)).save_to_disk(tmp_path / "made/train", num_shards=3)
    output = tmp_path / "lengths.parquet"
    run(f"lengths {tmp_path / 'made'} --model qwen3-vl-8b -o {output} --json")
    lengths = read_lengths([output])
    assert lengths.tokens.tolist() == [200 + n for n in range(3, 1_000)]
    shown = [len(row["images"] or ()) for row in rows[3:]]
    each = lengths.items["image_tokens"][shown.index(1)]
    assert each > 0 and lengths.items["image_tokens"].tolist() == [each * n for n in shown]
