"""One pipeline stage of the vision-language model: any contiguous run of its units.

Shapes: T tiles, C channels, P pixels per side, V positions of a tile (patches and class token),
H vision hidden size, K image tokens over all tiles, S packed tokens, E language hidden size,
W vocabulary, L loss positions, A answers.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.batch import MicroBatch
from megatron.vlm.block import PlannedBlock
from megatron.vlm.configs import language_transformer_config, vision_transformer_config
from megatron.vlm.layers import language_layer_spec, vision_layer_spec
from omnibal.config import ModelConfig
from omnibal.plan import Plan, Stage

IMAGE_CHANNELS = 3


class VisionEmbedding(torch.nn.Module):
    """Tiles to patch embeddings with a class token and learned positions."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        vision = model.vision
        self.patch_size = vision.patch_size
        patch_values = IMAGE_CHANNELS * vision.patch_size**2
        self.patch_projection = torch.nn.Linear(patch_values, vision.hidden_size, dtype=dtype)
        self.class_token = torch.nn.Parameter(torch.zeros(vision.hidden_size, dtype=dtype))
        self.positions = torch.nn.Parameter(
            torch.zeros(vision.positions_per_tile, vision.hidden_size, dtype=dtype)
        )

    def forward(self, pixels_TCPP: torch.Tensor) -> torch.Tensor:
        """[T, C, P, P] to [V, T, H]."""
        patches = rearrange(
            pixels_TCPP.to(self.positions.dtype),
            "t c (row p1) (column p2) -> (row column) t (c p1 p2)",
            p1=self.patch_size,
            p2=self.patch_size,
        )
        embedded = self.patch_projection(patches)
        class_tokens = self.class_token.expand(1, embedded.shape[1], -1)
        return torch.cat([class_tokens, embedded]) + self.positions.unsqueeze(1)


class Projector(torch.nn.Module):
    """Pixel shuffle (`ps_version v2`) and InternVL's MLP: LayerNorm, Linear, GELU, Linear."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.patches_per_side = model.vision.patches_per_side
        self.factor = model.pixel_shuffle_factor
        width = model.language.hidden_size
        self.norm = torch.nn.LayerNorm(model.projector_input_size, dtype=dtype)
        self.linear_fc1 = torch.nn.Linear(model.projector_input_size, width, dtype=dtype)
        self.linear_fc2 = torch.nn.Linear(width, width, dtype=dtype)

    def forward(self, hidden_VTH: torch.Tensor) -> torch.Tensor:
        """[V, T, H] to [K, E]: the class token is dropped, tiles stay in order."""
        folded = rearrange(
            hidden_VTH[1:],
            "(row r column c) t h -> (t row column) (r c h)",
            row=self.patches_per_side // self.factor,
            column=self.patches_per_side // self.factor,
            r=self.factor,
            c=self.factor,
        )
        return self.linear_fc2(F.gelu(self.linear_fc1(self.norm(folded))))


class VLMStage(MegatronModule):
    """The units of one stage, named as in the whole model so that checkpoints fit any split.

    Units that the stage does not hold are None.
    """

    def __init__(
        self,
        model: ModelConfig,
        stage: Stage,
        vision_config: TransformerConfig,
        language_config: TransformerConfig,
    ) -> None:
        super().__init__(config=language_config)
        self.model_config = model
        # Core asks these of every model when it reduces gradients of shared embeddings.
        self.share_embeddings_and_output_weights = False
        self.pre_process, self.post_process = stage.vision_embed, stage.head
        dtype = language_config.params_dtype
        language = model.language
        self.vision_embedding = VisionEmbedding(model, dtype) if stage.vision_embed else None
        self.vision = None
        if stage.vision_layers:
            spec = vision_layer_spec(vision_config, model.vision)
            self.vision = PlannedBlock(
                vision_config,
                [spec] * stage.vision_layers,
                recompute_layers=stage.recompute_vision,
                final_norm=False,
            )
        self.projector = Projector(model, dtype) if stage.projector else None
        self.embedding = None
        if stage.language_embed:
            self.embedding = LanguageModelEmbedding(
                language_config,
                language.vocab_size,
                max_sequence_length=0,
                position_embedding_type="rope",
            )
        self.language = None
        if stage.language_layers or stage.head:
            self.language = PlannedBlock(
                language_config,
                [language_layer_spec()] * stage.language_layers,
                recompute_layers=stage.recompute_language,
                final_norm=stage.head,
            )
            self.rotary = RotaryEmbedding(
                language_config.kv_channels,
                rotary_percent=1.0,
                rotary_base=language.rope_base,
                use_cpu_initialization=not has_cuda(),
            )
        self.head = None
        if stage.head:
            self.head = tensor_parallel.ColumnParallelLinear(
                language.hidden_size,
                language.vocab_size,
                config=language_config,
                init_method=language_config.init_method,
                bias=False,
            )
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, input_tensor: torch.Tensor | None) -> None:
        """The previous stage's output, used by the next `forward`; core's name for it."""
        self._input = input_tensor

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """What the next stage receives; the head gives the summed loss, or answers' next tokens."""
        hidden = self._input
        if self.vision_embedding is not None:
            hidden = self.vision_embedding(batch.pixels_TCPP)
        if self.vision is not None:
            hidden = self.vision(hidden, None)
        if self.projector is not None:
            hidden = self.projector(hidden)
        if self.embedding is not None:
            hidden = self.embed_tokens(batch, hidden)
        if self.language is not None:
            hidden = self.language(
                hidden,
                None,
                rotary_pos_emb=self.rotary(max(batch.segment_tokens)),
                packed_seq_params=batch.packed_seq_params(current_device()),
            )
        if self.head is not None:
            return self.head_output(batch, hidden)
        return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)

    def embed_tokens(self, batch: MicroBatch, image_features_KE: torch.Tensor) -> torch.Tensor:
        """[S, 1, E]: token embeddings, image features in the places of the image tokens."""
        embedded_S1E = self.embedding(batch.token_ids_S.unsqueeze(0), None)
        return embedded_S1E.index_put(
            (batch.image_positions_M, torch.zeros_like(batch.image_positions_M)), image_features_KE
        )

    def head_output(self, batch: MicroBatch, hidden_S1E: torch.Tensor) -> torch.Tensor:
        """Summed loss of the batch's labels, or without labels the likeliest next tokens, [A]."""
        # Only positions that are asked for reach the vocabulary: in image-heavy packs, few do.
        wanted = batch.loss_positions_L if batch.labels_L is not None else batch.answer_positions_A
        logits_L1W, _ = self.head(hidden_S1E.index_select(0, wanted))
        logits_LW = logits_L1W.squeeze(1)
        if batch.labels_L is None:
            return logits_LW.argmax(-1)
        return F.cross_entropy(logits_LW.float(), batch.labels_L, reduction="sum")


def build_stage(plan: Plan, pipeline_rank: int) -> VLMStage:
    """The stage that the plan gives to this pipeline rank, on this device, weights not yet drawn.

    Megatron's parallel state must be initialized with the plan's sizes.
    """
    arguments = (plan.model, plan.stages, plan.parallel, plan.precision)
    stage = VLMStage(
        plan.model,
        plan.stages[pipeline_rank],
        vision_transformer_config(*arguments),
        language_transformer_config(*arguments),
    )
    return stage.to(current_device())


def boundary_shape(plan: Plan, cut: int, tiles: int, tokens: int) -> tuple[int, ...]:
    """Shape of what crosses from stage `cut` to stage `cut + 1` for a pack of these counts.

    [V, T, H] inside the vision encoder, [K, E] between projector and language embed, and [S, 1, E]
    after it.
    """
    model, before = plan.model, plan.stages[: cut + 1]
    if any(stage.language_embed for stage in before):
        return (tokens, 1, model.language.hidden_size)
    if any(stage.projector for stage in before):
        return (tiles * model.tokens_per_tile, model.language.hidden_size)
    return (model.vision.positions_per_tile, tiles, model.vision.hidden_size)
