"""Packs of an OmniBal plan, read by Megatron-Energon as planned and in the plan's order.

packs.jsonl has a pack per line in loading order, meta.yaml its datasets. Put `PlannedPacks` before
your TaskEncoder with `encode_sample` and `pack_selected_samples`, as for Energon's own packing:

    from omnibal_packs import PlannedPacks, planned_dataset

    class Encoder(PlannedPacks, MyTaskEncoder):
        @stateless
        def sample_of(self, members):
            return MySample(__key__=members["__key__"], ..., image=members["0.jpg"])

    dataset = planned_dataset(Encoder(), worker_config)   # in place of get_train_dataset

A pack is one sample of a batch of 1: do not set `packing_buffer_size`. Tested with Energon 7.4.1,
in training and validation mode, on 1 and 2 ranks with 0 and 2 workers.
"""

import json
from pathlib import Path
from typing import Any

from megatron.energon import (
    Cooker,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_train_dataset,
    stateless,
)

PACKS_FOLDER = Path(__file__).parent
IN_ORDER: dict[str, Any] = {
    "shuffle_buffer_size": None,
    "max_samples_per_sequence": None,
    "shuffle_over_epochs_multiplier": None,
    "parallel_shard_iters": 1,
}
"""Arguments of `get_train_dataset` that keep line order."""


@edataclass
class Pack(Sample):
    """Decoded members of the samples of a pack."""

    number: int  # in reading order, from 0; -1 for an untrained repeat that pads the last round
    samples: list[dict[str, Any]]  # by member, such as "json" or "0.jpg"; and "__key__"


@stateless
@cooker(need_cache=False)
def cook_pack(line: dict[str, Any], **stores: Any) -> Pack:
    """Return the pack of a line, with samples read from their datasets (`stores`)."""
    described = line["json"]
    samples = [
        {"__key__": key} | {part: stores[store].get(f"{key}.{part}", line) for part in parts}
        for store, key, parts in described["samples"]
    ]
    return Pack(**basic_sample_keys(line), number=described["pack"], samples=samples)


class PlannedPacks:
    """Mixin for a TaskEncoder, to encode a pack as one sample."""

    cookers = [Cooker(cook_pack)]  # noqa: RUF012, as Energon declares them

    @stateless
    def sample_of(self, members: dict[str, Any]) -> Any:
        """Return a sample's members as the input of your `encode_sample`."""
        raise NotImplementedError("sample_of must make a sample of its members")

    @stateless
    def encode_sample(self, pack: Pack) -> Any:
        """Return the encoded samples of a pack, joined by `pack_selected_samples`."""
        encode = super().encode_sample  # type: ignore[misc]
        encoded = [encode(self.sample_of(members)) for members in pack.samples]
        return self.pack_selected_samples(encoded)  # type: ignore[attr-defined]


def planned_dataset(task_encoder: Any, worker_config: WorkerConfig, **more: Any) -> Any:
    """Return an Energon dataset of the packs in the plan's order, one pack per batch.

    Raises:
        ValueError: packs.jsonl is for other numbers of data-parallel ranks or loader processes.
    """
    written = json.loads((PACKS_FOLDER / "packs.json").read_text())
    given = worker_config.world_size, max(worker_config.num_workers, 1)
    if given != (written["ranks"], written["workers"]):
        raise ValueError(
            f"{PACKS_FOLDER}: packs.jsonl is for {written['ranks']} ranks of {written['workers']} "
            f"workers, and there are {given[0]} of {given[1]}; export a plan for these"
        )
    return get_train_dataset(
        str(PACKS_FOLDER / "meta.yaml"),
        worker_config=worker_config,
        batch_size=1,
        task_encoder=task_encoder,
        **IN_ORDER,
        **more,
    )
