"""Make XTuner train packs that are shorter than `pack_max_length`, and keep their images.

Import this in XTuner's config file, before the trainer is built. It replaces `PresetPackDataset`
(InternLM/xtuner 5cda4fb, xtuner/v1/datasets/preset_pack.py), which refuses packs shorter than
`pack_max_length`, though the collator pads them, and drops all but token ids and labels. Here
samples are unchanged, and an unplanned token count ends the run.
"""

from typing import Any

from xtuner.v1.datasets import config
from xtuner.v1.datasets.preset_pack import PresetPackDataset


class WholeSamplePacks(PresetPackDataset):
    """Packs of whole samples with all their fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "short_pack_strategy": "padding"})

    def __getitem__(self, pack: int) -> list[dict[str, Any]]:
        rows = self._samples[int(self._boundaries[pack]) : int(self._boundaries[pack + 1])]
        return [self._whole(pack, [int(number) for number in row]) for row in rows]

    def _whole(self, pack: int, row: list[int]) -> dict[str, Any]:
        path, index, _, _, start, end = row
        dataset = self.datasets[self._path_to_ds_idx[self._paths[path]]]
        sample = dataset[index]
        if start or sample["num_tokens"] != end:
            raise ValueError(
                f"pack {pack}: line {index + 1} of {self._paths[path]} has {sample['num_tokens']} "
                f"tokens here, and {end} in the plan; plan with XTuner's own lengths"
            )
        return sample


if not hasattr(config, "PresetPackDataset"):
    raise ImportError(
        "xtuner.v1.datasets.config has no PresetPackDataset: install a version of XTuner with "
        'pack_level="preset"'
    )
config.PresetPackDataset = WholeSamplePacks
