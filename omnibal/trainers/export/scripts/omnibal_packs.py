"""Packs of an OmniBal plan, read by Megatron-Energon exactly as planned and in the plan's order.

Beside this file are packs.jsonl, a pack a line in the order of loading, and meta.yaml, which names
the datasets that hold the samples. Put `PlannedPacks` before your own TaskEncoder, which must have
`encode_sample`, for one sample, and `pack_selected_samples`, which joins several, as it needs them
for Energon's own packing:

    from omnibal_packs import PlannedPacks, planned_dataset

    class Encoder(PlannedPacks, MyTaskEncoder):
        @stateless
        def sample_of(self, members):
            return MySample(__key__=members["__key__"], ..., image=members["0.jpg"])

    dataset = planned_dataset(Encoder(), worker_config)   # in place of get_train_dataset

A pack arrives as one sample of a batch of 1: `packing_buffer_size` stays unset. Tried with Energon
7.4.1, in training and validation mode, on 1 and 2 ranks with 0 and 2 workers.
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

FOLDER = Path(__file__).parent
IN_ORDER: dict[str, Any] = {
    "shuffle_buffer_size": None,
    "max_samples_per_sequence": None,
    "shuffle_over_epochs_multiplier": None,
    "parallel_shard_iters": 1,
}
"""Arguments of `get_train_dataset` that keep line order."""


@edataclass
class Pack(Sample):
    """A pack, with the decoded members of every sample."""

    number: int
    """Number of the pack in reading order, from 0; -1 for untrained padding of the last round."""
    samples: list[dict[str, Any]]
    """By name behind the key, such as "json" or "0.jpg", and "__key__"."""


@stateless
@cooker(need_cache=False)
def cook_pack(line: dict[str, Any], **stores: Any) -> Pack:
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
        """Convert a sample's members to the input of your `encode_sample`."""
        raise NotImplementedError("say how a sample is made of its members")

    @stateless
    def encode_sample(self, pack: Pack) -> Any:
        """Encode all samples of a pack and join them."""
        encode = super().encode_sample  # type: ignore[misc]
        encoded = [encode(self.sample_of(members)) for members in pack.samples]
        return self.pack_selected_samples(encoded)  # type: ignore[attr-defined]


def planned_dataset(task_encoder: Any, worker_config: WorkerConfig, **more: Any) -> Any:
    """Open the packs for training, in the plan's order.

    Raises:
        ValueError: data-parallel ranks or loader processes differ from those of packs.jsonl.
    """
    written = json.loads((FOLDER / "packs.json").read_text())
    given = worker_config.world_size, max(worker_config.num_workers, 1)
    if given != (written["ranks"], written["workers"]):
        raise ValueError(
            f"{FOLDER}: packs.jsonl is for {written['ranks']} data-parallel ranks with "
            f"{written['workers']} loader process(es) each, and there are {given[0]} with "
            f"{given[1]}; export again with --workers {given[1]}, of a plan for so many ranks"
        )
    return get_train_dataset(
        str(FOLDER / "meta.yaml"),
        worker_config=worker_config,
        batch_size=1,
        task_encoder=task_encoder,
        **IN_ORDER,
        **more,
    )
