"""GLM-4.5V and 4.6V (arXiv 2507.01006): gated projector, and GLM-4.5-Air as language model."""

from typing import Any

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.deepseek import SharedExpertsText
from omnibal.families.hub_table import NoDropout
from omnibal.families.vision import Side, VisionTable


class GlmVision(VisionTable):
    reads_video = False
    output_key = "out_hidden_size"

    attention_dropout: NoDropout = 0.0
    image_size: Side = 336
    rms_norm_eps: PositiveFloat = 1e-5
    out_hidden_size: PositiveInt = 4096

    @property
    def parts(self) -> dict[str, Any]:
        side = self.image_size // self.patch_size
        return super().parts | {"learned_positions": side**2}


class GlmText(SharedExpertsText):
    inner_ties_too = True
    states_head_size = True

    num_key_value_heads: PositiveInt = 8
    attention_bias: bool = True
