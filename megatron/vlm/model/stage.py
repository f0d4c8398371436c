"""One part of a language model with any encoders, which a pipeline stage holds: any contiguous run
of its units.

Shapes: V positions of an item (a tile or a clip), B items of an encoder, H its hidden size, K its
tokens, over all items, S packed tokens, E language hidden size, W vocabulary, L loss positions,
A answers. Over tensor-parallel ranks, W is padded and divided; with sequence parallelism so is S
between the language embed and the head. Of a pack that data-parallel ranks share, all are one
rank's, and M are its image tokens, whose features other ranks may make.

Between parts go tensors by tower: of every encoder that is done its features [K, E], of the one
that a cut divides its hidden states [V, B, H], and after the language embed those of the language
model, [S, 1, E]. Deepstack features [K, E] go with them, each by its own name, from the encoder's
layer that they are of to the language layer that takes them.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape
from megatron.vlm.model.adapters import Adapters
from megatron.vlm.model.block import Beside, PlannedBlock
from megatron.vlm.model.configs import encoder_transformer_configs, language_transformer_config
from megatron.vlm.model.deferred_weights import (
    PARALLEL_LINEARS,
    DeferredWeights,
    check_two_parts,
    defer_linear,
)
from megatron.vlm.model.drop_path import branch_scales
from megatron.vlm.model.encoder import EncoderUnits
from megatron.vlm.model.exchange import exchange_rows
from megatron.vlm.model.experts import Experts, Routing, StackedLinear
from megatron.vlm.model.flash_attention import prefer_flash_attention_3
from megatron.vlm.model.fused.cross_entropy import OwnWords, cross_entropy, hide_padding
from megatron.vlm.model.fused.rotary import rotation, sectioned_rotation
from megatron.vlm.model.groups import ContextGroups
from megatron.vlm.model.layers import language_layer_spec
from megatron.vlm.model.providers import check_adapters, check_precision, layer_parts
from megatron.vlm.model.sharded_weights import ShardedWeights
from megatron.vlm.model.shared_attention import shared_attention
from megatron.vlm.model.tensor_parallel import describe_partitions, unpadded_size
from omnibal.job.plan import Plan
from omnibal.model.adapters import AdapterConfig, adapted_linears
from omnibal.model.config import LanguageConfig, ModelConfig, Provider, RopeSections
from omnibal.model.encoders import Encoder, ImagesEncoder
from omnibal.model.fp8 import FP8_MULTIPLE
from omnibal.model.parallel import Parallel
from omnibal.model.units import (
    LANGUAGE,
    UnitKind,
    deepstack_of,
    projector_name,
    projector_unit,
    unit_kinds,
)
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.unit_runs import encoders_stage

ByTower = Mapping[str, torch.Tensor]
"""Tensors by the name of an encoder, or "language", or of deepstack features."""
TIED_NAME = "embedding.word_embeddings.weight"
"""Name of the one matrix of a model whose head is tied to its token embedding."""


class VLMStage(MegatronModule):
    """The units of one stage, named as in the whole model so that checkpoints fit any split.

    Units that the stage does not hold are None.

    Args:
        groups: that the stage is divided over, and copied in; without, Megatron's own of this job.
    """

    def __init__(
        self,
        model: ModelConfig,
        stage: Stage,
        encoder_configs: Mapping[str, TransformerConfig],
        language_config: TransformerConfig,
        drop_path_rate: float = 0.0,
        provider: Provider = "local",
        groups: ProcessGroupCollection | None = None,
    ) -> None:
        # By this configuration core sums gradients over tensor-parallel ranks: of all parameters
        # that say `sequence_parallel`, which norms of q's and k's heads do without it too. By
        # `qk_layernorm` it would sum those of InternViT's q and k norms as well, which are divided.
        config = copy.copy(language_config)
        config.sequence_parallel = language_config.tensor_model_parallel_size > 1
        config.qk_layernorm = False
        super().__init__(config=config)
        self.groups = groups or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = self.groups.tp
        self.model_config = model
        self.drop_path_rate = drop_path_rate
        self.holds_tied_copy = _holds_tied_copy(model, stage)
        # Core asks these of every model when it reduces gradients of shared embeddings, which is
        # not left to it: it knows copies on the first and the last stage only.
        self.share_embeddings_and_output_weights = False
        self.pre_process, self.post_process = stage.holds("vision embed"), stage.holds("head")
        parts = layer_parts(provider)
        language = model.language
        tensor = language_config.tensor_model_parallel_size
        own_words = language.words_of_rank(tensor)
        vocabulary = own_words * tensor
        self.sequence_parts = tensor if language_config.sequence_parallel else 1
        self.token_multiple = self.sequence_parts * (FP8_MULTIPLE if language_config.fp8 else 1)
        self.encoders = {
            name: EncoderUnits.build(model, name, stage, config, parts, self.groups)
            for name, config in encoder_configs.items()
        }
        for encoder, units in self.encoders.items():
            for name, unit in units.modules(encoder):
                self.add_module(name, unit)
        self.embedding = None
        if stage.holds("language embed"):
            self.embedding = LanguageModelEmbedding(
                language_config,
                vocabulary,
                max_sequence_length=0,
                position_embedding_type="rope",
                # Image features are put in their places before the sequence is divided.
                scatter_to_sequence_parallel=False,
            )
        self.language = None
        if stage.layers("language") or stage.holds("head"):
            self.language = PlannedBlock(
                language_config,
                [language_layer_spec(language_config, parts)] * len(stage.layers("language")),
                recompute_layers=[stage.recomputed("language")],
                final_norm=stage.holds("head"),
            )
            self.rotary_frequencies = _rotary_frequencies(language, language_config.kv_channels)
            self.rotary_axes = _rotary_axes(language.rope_sections)
        self.deepstack_names = tuple(each.name for each in deepstack_of(model))
        self.head = None
        if stage.holds("head"):
            # The sequence is brought together before the head, which takes some positions of it.
            head_config = copy.copy(language_config)
            head_config.sequence_parallel = False
            self.head = tensor_parallel.ColumnParallelLinear(
                language.hidden_size,
                vocabulary,
                config=head_config,
                init_method=head_config.init_method,
                bias=False,
                skip_weight_param_allocation=language.tied_head and stage.holds("language embed"),
            )
            start = parallel_state.get_tensor_model_parallel_rank() * own_words
            self.own_words = OwnWords(
                first=start,
                count=min(max(language.vocab_size - start, 0), own_words),
                group=parallel_state.get_tensor_model_parallel_group() if tensor > 1 else None,
            )
        describe_partitions(self, parts)
        if language.tied_head:
            self._describe_tied_weight()
        self.sharded: ShardedWeights | None = None
        """The weights, where data-parallel ranks divide them."""
        self.deferred: DeferredWeights | None = None
        """Where backwards leave weight gradients for later; None where they make them."""
        self.context_groups: ContextGroups = {}
        self._input: ByTower = {}

    def set_levels(self, stages: Sequence[Stage], context_groups: ContextGroups) -> None:
        """Say what differs by level of packs: recomputed layers, by the stage at every level, and
        the ranks that share a pack."""
        for name, block in self.blocks.items():
            block.set_levels([stage.recomputed(name) for stage in stages])
        self.context_groups = context_groups

    @property
    def blocks(self) -> dict[str, PlannedBlock]:
        """The layers that the stage holds, by tower."""
        encoders = {name: units.layers for name, units in self.encoders.items()}
        held = (encoders | {LANGUAGE: self.language}).items()
        return {name: block for name, block in held if block is not None}

    def _describe_tied_weight(self) -> None:
        """Give the matrix that is embedding and head core's attributes of how it is shared."""
        weight: Any = self.shared_embedding_or_output_weight()
        if self.holds_tied_copy:
            # A bucket of its own: data-parallel ranks then divide both copies alike.
            weight.shared_embedding = True
            # The gradient's norm counts the embedding's copy only.
            weight.shared = self.embedding is None
        elif weight is not None:
            # The head may add its gradient to core's buffer itself, beside the embedding's.
            weight.zero_out_wgrad = True

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter | None:
        """Copy of the tied matrix on this stage (core's name); None where it is not used."""
        if self.embedding is not None:
            return self.embedding.word_embeddings.weight
        return self.head.weight if self.head is not None else None

    @property
    def tied_copy(self) -> torch.nn.Parameter | None:
        """The matrix, where another part of the model has a copy of it too."""
        return self.shared_embedding_or_output_weight() if self.holds_tied_copy else None

    def set_input_tensor(self, input_tensor: ByTower | None) -> None:
        """Set what the previous stage sent for the next `forward` (core's name)."""
        self._input = input_tensor or {}

    def forward(self, batch: MicroBatch) -> ByTower | torch.Tensor:
        """Run the stage; returns what goes to the next one, or the head's summed loss or next
        tokens."""
        # Taken, so that it goes with its micro-batch.
        received, self._input = self._input, {}
        hidden = self.encode(batch, received)
        if self.embedding is not None or self.language is not None:
            hidden_S1E = self.read_text(batch, hidden)
            if self.head is not None:
                return self.head_output(batch, hidden_S1E)
            layers = [] if self.language is None else self.language.layers
            # Of this stage and of all before it.
            numbered = layers[-1].layer_number if len(layers) else 0
            later = self.deepstack_names[numbered:]
            hidden = {name: hidden[name] for name in later} | {LANGUAGE: hidden_S1E}
        # No view of another, so that a tensor's memory can go before its graph does.
        return {
            name: make_viewless_tensor(
                hidden[name], requires_grad=hidden[name].requires_grad, keep_graph=True
            )
            for name in tensor_names(self.model_config, hidden)
        }

    def encode(
        self, batch: MicroBatch, received: ByTower | None = None, only: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the stage's units of all encoders, or of one, on the micro-batch's items or on hidden
        states. What the stage has no units of is passed on.

        Returns:
            By encoder, features [K, E] or hidden states [V, B, H]; deepstack features by name.
        """
        hidden = dict(received or {})
        for name, units in self.encoders.items():
            if units.is_held and only in (None, name):
                given = items_of(batch, units.tower) if units.embedding else hidden[name]
                scales_L2B = self._branch_scales(batch) if name == "vision" else None
                hidden[name], *features = units.run(
                    given, batch.image_grids, branch_scales_L2B=scales_L2B, level=batch.level
                )
                made = [
                    each.name
                    for each in deepstack_of(self.model_config)
                    if each.tower == name and each.layer in units.deepstack_projectors
                ]
                hidden |= dict(zip(made, features, strict=True))
        return hidden

    def read_text(self, batch: MicroBatch, hidden: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the stage's language units on encoders' features, or on hidden states: [S, 1, E].

        Deepstack features are taken out of `hidden`, so that each goes once it is added.
        """
        hidden_S1E = (
            hidden[LANGUAGE] if self.embedding is None else self.embed_tokens(batch, hidden)
        )
        if self.language is not None:
            padding = self._padding(batch)
            hidden_S1E = self.language(
                hidden_S1E,
                None,
                level=batch.level,
                routing=self.routing(batch, padding),
                beside=self._added_features(batch, hidden),
                **self.packing(batch, padding),
            )
        return hidden_S1E

    def _added_features(
        self, batch: MicroBatch, features: dict[str, torch.Tensor]
    ) -> Beside | None:
        """What adds deepstack features to the outputs of the layers that take them."""
        assert self.language is not None
        numbers = [layer.layer_number - 1 for layer in self.language.layers]
        taken = {n: self.deepstack_names[n] for n in numbers if n < len(self.deepstack_names)}
        if not taken:
            return None

        def adder(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda hidden_S1E: self.add_features(batch, features.pop(name), hidden_S1E)

        for name in taken.values():
            features[name] = self._features_of_own_tokens(batch, features[name])
        return Beside(adds={number: adder(name) for number, name in taken.items()})

    def add_features(
        self, batch: MicroBatch, features_KE: torch.Tensor, hidden_S1E: torch.Tensor
    ) -> torch.Tensor:
        """Add features to the hidden states of their tokens, of which there may be this rank's part
        of the sequence alone: [S, 1, E]."""
        places_M = batch.image_positions_M
        assert places_M is not None
        # Put in their places as at the language embed, so that gradients come back whole.
        tokens = len(hidden_S1E) * self.sequence_parts
        whole_S1E = features_KE.new_zeros((tokens, 1, features_KE.shape[1]))
        whole_S1E.index_put_((places_M, torch.zeros_like(places_M)), features_KE)
        if self.sequence_parts > 1:
            whole_S1E = tensor_parallel.scatter_to_sequence_parallel_region(whole_S1E)
        return hidden_S1E + whole_S1E

    def packing(self, batch: MicroBatch, padding: int = 0) -> dict[str, Any]:
        """What language layers need to know of the samples, and of padding after them as one more,
        by core's names, for one micro-batch."""
        device, share = current_device(), batch.share
        packed = batch.packed_seq_params(device, padding)
        first, shared = None, None
        if share is not None:
            firsts = [*share.own_pieces.first.tolist(), 0]
            first = torch.tensor(firsts, dtype=torch.int32).to(device, non_blocking=True)
            shared = shared_attention(share, padding, self.context_groups[share.context], device)
        tokens = batch.tokens + padding
        if self.rotary_axes is None:
            turned_by = rotation(packed.cu_seqlens_q, tokens, self.rotary_frequencies, first)
        else:
            assert batch.rope_positions_3S is not None
            positions_3S = F.pad(batch.rope_positions_3S, (0, padding))
            turned_by = sectioned_rotation(positions_3S, self.rotary_axes, self.rotary_frequencies)
        return {"rotary_pos_emb": turned_by, "packed_seq_params": shared or packed}

    def routing(self, batch: MicroBatch, padding: int = 0) -> Routing | None:
        """What routers need to know of a micro-batch; None where no layer has experts."""
        if self.config.num_moe_experts is None:
            return None
        padding_S = None
        if padding:
            tokens = (batch.tokens + padding) // self.sequence_parts
            first = tokens * (self.tp_group.rank() if self.sequence_parts > 1 else 0)
            places_S = torch.arange(first, first + tokens, device=current_device())
            padding_S = places_S >= batch.tokens
        return Routing(padding_S=padding_S, loss_weight=batch.loss_weight)

    def _padding(self, batch: MicroBatch) -> int:
        return batch.shape.padded_tokens(self.token_multiple) - batch.tokens

    def _branch_scales(self, batch: MicroBatch) -> torch.Tensor | None:
        layers = self.encoders["vision"].layers
        if batch.drop_path_keys_T is None or layers is None:
            return None
        scales_L2T = branch_scales(
            batch.drop_path_keys_T,
            [layer.layer_number - 1 for layer in layers.layers],
            self.model_config.vision.layers,
            self.drop_path_rate,
        )
        return scales_L2T.to(current_device(), non_blocking=True)

    def embed_tokens(self, batch: MicroBatch, features: ByTower) -> torch.Tensor:
        """Embed tokens, with features [K, E] of encoders in the places of their tokens:
        [S, 1, E]."""
        assert self.embedding is not None and batch.token_ids_S is not None
        embedded_S1E = self.embedding(batch.token_ids_S.unsqueeze(0), None)
        places = {"vision": batch.image_positions_M, "audio": batch.audio_positions_N}
        # Of encoders that may be elsewhere; deepstack features have their places in layers.
        for name, places_M in places.items():
            if name not in features:
                continue
            features_KE = features[name]
            if name == "vision":
                features_KE = self._features_of_own_tokens(batch, features_KE)
            assert places_M is not None
            embedded_S1E = embedded_S1E.index_put(
                (places_M, torch.zeros_like(places_M)), features_KE
            )
        padding = self._padding(batch)
        padded_S1E = F.pad(embedded_S1E, (0, 0, 0, 0, 0, padding)) if padding else embedded_S1E
        if self.sequence_parts == 1:
            return padded_S1E
        # The copy lets go of the whole sequence, of which a rank's part would be a view.
        return tensor_parallel.scatter_to_sequence_parallel_region(padded_S1E).clone()

    def _features_of_own_tokens(
        self, batch: MicroBatch, image_features_KE: torch.Tensor
    ) -> torch.Tensor:
        """Give image features to the ranks that have their tokens; returns this rank's, [M, E]."""
        if batch.share is None or batch.sent_features_F is None:
            return image_features_KE
        return exchange_rows(
            image_features_KE.index_select(0, batch.sent_features_F),
            *batch.feature_counts,
            self.context_groups[batch.share.context],
        )

    def head_output(self, batch: MicroBatch, hidden_S1E: torch.Tensor) -> torch.Tensor:
        """Summed loss of the batch's labels, or without labels the likeliest next tokens [A]."""
        if self.sequence_parts > 1:
            # The head's own backward sums the gradient over ranks: it comes back whole.
            hidden_S1E = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_S1E, tensor_parallel_output_grad=False
            )
        # Only positions that are asked for reach the vocabulary: in image-heavy packs, few do.
        wanted = batch.loss_positions_L if batch.labels_L is not None else batch.answer_positions_A
        assert self.head is not None
        weight_WE = self.head.weight
        if weight_WE is None:
            weight_WE = self.shared_embedding_or_output_weight()
        logits_L1W, _ = self.head(hidden_S1E.index_select(0, wanted), weight_WE)
        logits_LW = logits_L1W.squeeze(1)
        if batch.labels_L is None:
            hide_padding(logits_LW, self.own_words)
            whole_AW = tensor_parallel.gather_from_tensor_model_parallel_region(logits_LW)
            return whole_AW.argmax(-1)
        losses_L = cross_entropy(logits_LW, batch.labels_L, self.own_words)
        weights_L = batch.loss_weights_L
        return losses_L.sum() if weights_L is None else torch.dot(losses_L, weights_L)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """State of the stage for a checkpoint, without padding (core's name)."""
        groups = {"tp_group": self.groups.tp, "dp_cp_group": self.groups.dp_cp}
        state = super().sharded_state_dict(prefix, sharded_offsets, {**(metadata or {}), **groups})
        for name, tensor in state.items():
            if unpadded_size(self.model_config, name.removeprefix(prefix)) is not None:
                tensor.allow_shape_mismatch = True
        if self.holds_tied_copy and self.head is not None:
            # One more replica of the embedding, which the embedding's stage saves.
            copy_of_embedding = state[f"{prefix}head.weight"]
            copy_of_embedding.key = f"{prefix}{TIED_NAME}"
            copy_of_embedding.replica_id = (1, *copy_of_embedding.replica_id[1:])
        return state


def _rotary_frequencies(language: LanguageConfig, head_size: int) -> torch.Tensor:
    """RoPE's frequencies as core computes them, float32 [head_size / 2]."""
    rotary = RotaryEmbedding(
        head_size,
        rotary_percent=1.0,
        rotary_base=language.rope_base,
        use_cpu_initialization=not has_cuda(),
    )
    scaling = language.rope_scaling
    if scaling is not None:
        # Core's constructor takes the factor alone.
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=scaling.factor,
            low_freq_factor=scaling.low_frequency_factor,
            high_freq_factor=scaling.high_frequency_factor,
            original_max_position_embeddings=scaling.original_positions,
        )
    return rotary.inv_freq.to(current_device())


def _rotary_axes(sections: RopeSections | None) -> torch.Tensor | None:
    """The axis, of time, row and column, that each frequency turns by, int64 [head_size / 2]; None
    where all turn by the place in the sample."""
    if sections is None:
        return None
    counts = (sections.time, sections.rows, sections.columns)
    # Of numbers alone: a fake device has no values to repeat by.
    axes_F = torch.tensor([axis for axis, count in enumerate(counts) for _ in range(count)])
    if sections.interleaved:
        # Row and column, in turn, take the second and third of every three frequencies.
        axes_F = torch.zeros(sum(counts), dtype=torch.int64)
        for axis in (1, 2):
            axes_F[axis : 3 * counts[axis] : 3] = axis
    return axes_F.to(current_device())


def build_stage(
    plan: Plan,
    part: int,
    drop_path_rate: float = 0.0,
    provider: Provider = "local",
    context_groups: ContextGroups | None = None,
) -> VLMStage:
    """Build a part of the model on this device; its weights are not yet initialized.

    Megatron's parallel state must be initialized with the plan's sizes.

    Args:
        part: index into the plan's stages; where each has one part, the pipeline's stage.
        context_groups: from `create_context_groups`; without, no packs are shared.
    """
    if plan.schedule.in_two:
        check_two_parts(plan, provider)
    check_precision(plan.precision, provider)
    check_adapters(plan.adapters, provider)
    prefer_flash_attention_3()
    arguments = (plan.pipeline_model, plan.stages[part], plan.parallel, plan.precision)
    stage = VLMStage(
        plan.pipeline_model,
        plan.stages[part],
        encoder_transformer_configs(*arguments),
        language_transformer_config(*arguments),
        drop_path_rate,
        provider,
    )
    at_levels = [stages[part] for stages in plan.stages_at_levels]
    stage.set_levels(at_levels, context_groups or {})
    _freeze(stage, plan)
    if plan.schedule.in_two:
        _defer_weight_gradients(stage)
    return stage.to(current_device())


def build_encoders(
    plan: Plan, groups: ProcessGroupCollection, drop_path_rate: float = 0.0
) -> VLMStage:
    """Build the data-parallel encoders: a stage of all of them and nothing else."""
    units = encoders_stage(plan.model)
    arguments = (plan.model, units, Parallel(pipeline=1), plan.precision)
    stage = VLMStage(
        plan.model,
        units,
        encoder_transformer_configs(*arguments),
        language_transformer_config(*arguments),
        drop_path_rate,
        groups=groups,
    )
    _freeze(stage, plan)
    return stage.to(current_device())


def tied_copies(plan: Plan) -> tuple[int, ...]:
    """The two parts that each hold a copy of the tied matrix; empty where no copies are needed."""
    stages = enumerate(plan.stages)
    return tuple(index for index, stage in stages if _holds_tied_copy(plan.model, stage))


def _holds_tied_copy(model: ModelConfig, stage: Stage) -> bool:
    return model.language.tied_head and stage.holds("language embed") != stage.holds("head")


def _freeze(stage: VLMStage, plan: Plan) -> None:
    """Freeze the plan's frozen parts, and those with adapters but for these."""
    modules: dict[str, tuple[torch.nn.Module | None, ...]] = {
        LANGUAGE: (stage.embedding, stage.language, stage.head)
    }
    for name, units in stage.encoders.items():
        modules[name] = (units.embedding, units.layers, units.deepstack)
        modules[projector_name(stage.model_config, name)] = (units.projector,)
    adapted = () if plan.adapters is None else plan.adapters.parts
    for part in (*plan.frozen, *adapted):
        for module in modules.get(part, ()):  # of data-parallel encoders, elsewhere
            if module is not None:
                module.requires_grad_(False)
    if plan.adapters is not None:
        _add_adapters(stage, plan.adapters)


def _add_adapters(stage: VLMStage, adapters: AdapterConfig) -> None:
    """Put adapters beside the linears of the stage's layers and projectors."""
    model = stage.model_config
    for kind in unit_kinds(model):
        linears = adapted_linears(model, kind, adapters)
        for owner in _modules_of(stage, kind) if linears else ():
            groups = 1
            if kind.is_layer:
                groups = owner.self_attention.num_query_groups_per_partition
            owner.adapters = Adapters(owner, owner.config, linears, adapters, groups)


def _defer_weight_gradients(stage: VLMStage) -> None:
    """Have backwards leave the products for weight gradients of trained linears for later."""
    modules = list(stage.modules())
    linears = [one for one in modules if isinstance(one, (*PARALLEL_LINEARS, StackedLinear))]
    # A tied head has the embedding's matrix.
    tied: Any = stage.shared_embedding_or_output_weight()
    weights = {one: tied if one.weight is None else one.weight for one in linears}
    trained = {one: weight for one, weight in weights.items() if weight.requires_grad}
    stage.deferred = DeferredWeights(trained.values())
    for one in trained:
        if isinstance(one, PARALLEL_LINEARS):
            defer_linear(one, stage.deferred)
    for one in modules:
        if isinstance(one, Experts) and one.linear_fc1 in trained:
            one.deferred = stage.deferred


def _modules_of(stage: VLMStage, kind: UnitKind) -> list[Any]:
    """Modules of the units of a kind, of layers or a projector, that the stage holds."""
    if kind.is_layer:
        layers = stage.blocks[kind.tower].layers if kind.tower in stage.blocks else []
        return [layer for layer in layers if kind.has_layer(layer.layer_number - 1)]
    projector = stage.encoders[kind.tower].projector
    return [] if projector is None else [projector]


def items_of(batch: MicroBatch, encoder: Encoder) -> torch.Tensor | None:
    """What an encoder takes of a micro-batch; None where the stage does not embed it."""
    return {
        "tiles": batch.pixels_TCPP,
        "clips": batch.frames_CBF,
        "images": batch.patches_YX,
    }[encoder.kind]


def tensor_names(model: ModelConfig, held: Collection[str]) -> list[str]:
    """Names of tensors between stages, those of `held` in the order in which they are sent: every
    encoder's own and then its deepstack features, and last the language model's."""
    deepstack = deepstack_of(model)
    names = [
        each
        for tower in (*model.encoders_elsewhere, *model.towers)
        for each in (tower, *(one.name for one in deepstack if one.tower == tower))
    ]
    return [name for name in names if name in held]


def boundary_shapes(plan: Plan, cut: int, shape: MicroBatchShape) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors sent from part `cut` to part `cut + 1` for a micro-batch, by name in
    the order of `tensor_names`.

    Of hidden states of the language model, with sequence parallelism, it is each rank's part;
    deepstack features are whole.
    """
    model, before = plan.model, plan.stages[: cut + 1]
    width = model.language.hidden_size

    def are_done(unit: str) -> bool:
        return any(stage.holds(unit) for stage in before)

    shapes: dict[str, tuple[int, ...]] = {}
    for number, each in enumerate(deepstack_of(model)):
        is_made = plan.beside is not None or any(
            each.layer in stage.layers(each.tower) for stage in before
        )
        if is_made and not any(number in stage.layers(LANGUAGE) for stage in before):
            shapes[each.name] = (items_of_shape(shape, model.encoders[each.tower]), width)
    if are_done("language embed"):
        parts = plan.parallel.tensor if plan.parallel.sequence_parallel else 1
        shapes[LANGUAGE] = (shape.padded_tokens(plan.token_multiple) // parts, 1, width)
    else:
        for name, tower in model.encoders.items():
            items = items_of_shape(shape, tower)
            if are_done(projector_unit(model, name)):
                shapes[name] = (items * tower.tokens_per_item, width)
            elif are_done(f"{name} embed"):
                # Items side by side, or images in one sequence.
                sizes = (items * tower.positions_per_item, 1)
                if not isinstance(tower, ImagesEncoder):
                    sizes = (tower.positions_per_item, items)
                shapes[name] = (*sizes, tower.hidden_size)
    return {name: shapes[name] for name in tensor_names(model, shapes)}


def items_of_shape(shape: MicroBatchShape, encoder: Encoder) -> int:
    """Items of a micro-batch that an encoder takes."""
    return {"tiles": shape.tiles, "clips": shape.clips, "images": shape.image_tokens}[encoder.kind]
