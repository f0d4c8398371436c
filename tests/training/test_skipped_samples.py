"""A scan that skipped broken samples, and the samples that training then loads."""

import shutil

import numpy as np
from data_cases import MODEL, WHOLE

from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.reader import SampleReader
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.data.scan import scan_lengths
from omnibal.packing.packs import Packs, ScheduledPacks


def test_every_row_loads_its_own_sample(digits, tokenizer, tmp_path):
    """Prevents rows after a skipped sample from loading a neighbour or the skipped sample."""
    shutil.copytree(digits / "heldout", tmp_path / "heldout")
    annotations = Annotations.open(tmp_path / "heldout" / "meta.json")
    gone = annotations[3].images[0]
    gone.path.unlink()
    bad = {k for k in range(len(annotations)) if gone in annotations[k].images}
    scan = scan_lengths(annotations, MODEL, tokenizer, lambda _: None, on_error="skip")
    write_lengths(scan.lengths, tmp_path / "lengths.parquet")
    lengths = read_lengths([tmp_path / "lengths.parquet"])
    good = [k for k in range(len(annotations)) if k not in bad]
    assert bad and len(lengths) == len(good)
    reader, rows = SampleReader(annotations, tokenizer, MODEL), np.arange(len(lengths))
    packs = ScheduledPacks.from_packs(Packs.from_lists([[row] for row in rows]), lengths, rows)
    dataset = PackDataset(reader, packs, lengths, rows, WHOLE)
    for row, index in enumerate(good):
        sample, loaded = annotations[index], dataset[row]
        expected = reader.encode(sample, int(lengths.column("tiles")[row])).token_ids
        assert loaded.token_ids_S.tolist() == expected.tolist()
        assert loaded.pixels_TCPP.equal(reader.pixels(sample))
