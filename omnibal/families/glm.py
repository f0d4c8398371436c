"""GLM-4.5V and 4.6V (arXiv 2507.01006): a gated projector, and GLM-4.5-Air."""

from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from omnibal.families.deepseek import SharedExpertsText
from omnibal.families.hub_table import NoDropout
from omnibal.families.text import TextTable
from omnibal.families.vision import Square, VisionTable, WholeTable, square
from omnibal.model.encoders import ImagesEncoder


class GlmVision(VisionTable):
    """Tower of GLM-4.5V; `intermediate_size` is the projector's."""

    reads_video = False

    attention_dropout: NoDropout = 0.0
    image_size: Square = 336
    rms_norm_eps: PositiveFloat = 1e-5
    out_hidden_size: PositiveInt = 4096

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of an ImagesEncoder."""
        return super().sizes | {"ffn_hidden_size": self.out_hidden_size}

    @property
    def fields(self) -> dict[str, Any]:
        """Other fields of an ImagesEncoder that depend on the table."""
        return {
            "norm_eps": self.rms_norm_eps,
            "learned_positions": (square(self.image_size, "image_size") // self.sizes["patch_size"])
            ** 2,
            "projector_hidden_size": self.intermediate_size,
        }

    def encoder(self, whole: WholeTable, path: Path) -> ImagesEncoder:
        """Return the encoder, with the pixel limits of processor files beside a `config.json`."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must divide by {self.num_heads} heads"
            )
        return super().encoder(whole, path)

    def output_size(self, text: TextTable) -> int:
        """Width of the projector's output."""
        return self.out_hidden_size


class GlmText(SharedExpertsText):
    """Language model of GLM-4.5V."""

    inner_ties_too = True
    states_head_size = True

    num_key_value_heads: PositiveInt = 8
    attention_bias: bool = True

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of a LanguageConfig."""
        return super().sizes | {"qkv_bias": self.attention_bias}
