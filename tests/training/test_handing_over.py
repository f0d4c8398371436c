"""Items sent by loader processes: unpacking restores the packed item."""

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron.vlm.inputs.read_ahead import Parcel, pack_parcel, unpack_parcel

pytestmark = pytest.mark.quick


@dataclass
class Item:
    tensors: dict[str, torch.Tensor]
    texts: tuple[str, ...]
    missing: torch.Tensor | None = None


def send_item(item: object) -> tuple[object, Parcel]:
    """Return the item after pickling, and its parcel."""
    packed = pickle.loads(pickle.dumps(pack_parcel(item)))
    return unpack_parcel(packed), packed


@pytest.mark.parametrize("rows", [0, 3, 5_000])
def test_item_is_the_same_behind_the_pipe(rows):
    """Prevents tensors swapped or truncated if they are large or empty."""
    whole = torch.arange(rows * 64, dtype=torch.float32).view(rows, 64)
    tensors = {
        "pixels": whole, "turned": whole.T, "part": whole[:, 3:7], "ids": torch.arange(7),
        "flag": torch.tensor([True, False, True]), "number": torch.tensor(2.5),
    }  # fmt: skip
    found, _ = send_item(Item(tensors, ("a", "b")))
    assert found.texts == ("a", "b") and found.missing is None
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
        found.tensors[name].zero_()  # the receiver owns its copy
    assert tensors["ids"].any()


def test_values_without_tensors_pass():
    """Prevents an item without tensors from being lost on its way from the loader."""
    found, packed = send_item(("a", 1))
    assert found == ("a", 1) and packed.sizes == ()
    assert np.array_equal(send_item(np.arange(3))[0], np.arange(3))
