"""A pipeline stage of the model: any contiguous run of the units of encoders and language model.

Shapes: V positions of an item (a tile or a clip), B items of an encoder, H its hidden size, K its
tokens over all items, S packed tokens, E language hidden size, W vocabulary, L loss positions, A
answers, M image tokens of this rank. Tensor-parallel ranks divide padded W and, with sequence
parallelism, S between the language embed and the head. Sizes of shared packs are of this rank.

Stages send features [K, E] of finished encoders, hidden states [V, B, H] of a divided encoder, or
hidden states [S, 1, E] of the language model, and deepstack features [K, E] until their layer.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_viewless_tensor

from megatron.vlm.backend import current_device, has_cuda
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchShape
from megatron.vlm.model.adapters import Adapters
from megatron.vlm.model.attention import prefer_flash_attention_3
from megatron.vlm.model.block import LayerFeatures, PlannedBlock
from megatron.vlm.model.configs import encoder_transformer_configs, language_transformer_config
from megatron.vlm.model.deferred_weights import PARALLEL_LINEARS, DeferredWeights, defer_linear
from megatron.vlm.model.encoder import EncoderUnits
from megatron.vlm.model.experts import Routing, StackedExperts, StackedLinear, WithLoss
from megatron.vlm.model.fused.cross_entropy import OwnWords, cross_entropy, hide_padding
from megatron.vlm.model.fused.rotary import locate_tokens, rotation, sectioned_rotation
from megatron.vlm.model.groups import ContextGroups
from megatron.vlm.model.layers import language_layer_spec
from megatron.vlm.model.prediction_layer import PredictionLayer
from megatron.vlm.model.providers import OwnParts, check_provider_of
from megatron.vlm.model.sharded_weights import ShardedWeights
from megatron.vlm.model.shared_attention import shared_attention
from megatron.vlm.model.tensor_parallel import describe_partitions, unpadded_size
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig, adapted_linears
from omnibal.model.config import LanguageConfig, ModelConfig, Precision, Provider, RopeSections
from omnibal.model.encoders import ImagesEncoder
from omnibal.model.fp8 import FP8_MULTIPLE
from omnibal.model.parallel import Parallel
from omnibal.model.units import LANGUAGE, deepstack_of, projector_name, projector_unit, unit_kinds
from omnibal.pipeline.stage_units import Stage
from omnibal.pipeline.unit_runs import encoders_stage

ByTower = Mapping[str, torch.Tensor]  # tensors keyed by encoder, "language", or deepstack feature
TIED_NAME = "embedding.word_embeddings.weight"  # the head's name too, if tied


class VLMStage(MegatronModule):
    """Units of one stage under their whole-model names, so that checkpoints fit any split.

    Units of other stages are None.

    Args:
        groups: process groups that divide and copy the stage; Megatron's own by default.
    """

    def __init__(
        self,
        model: ModelConfig,
        stage: Stage,
        parallel: Parallel,
        precision: Precision,
        drop_path_rate: float = 0.0,
        provider: Provider = "local",
        groups: ProcessGroupCollection | None = None,
    ) -> None:
        encoder_configs = encoder_transformer_configs(model, stage, parallel, precision)
        language_config = language_transformer_config(model, stage, parallel, precision)
        # With `config.sequence_parallel` core sums gradients of parameters so marked over
        # tensor-parallel ranks. Norms of q's and k's heads need it without sequence parallelism
        # too. With `qk_layernorm` core would also sum InternViT's q and k norms, which are sharded.
        config = copy.copy(language_config)
        config.sequence_parallel = language_config.tensor_model_parallel_size > 1
        config.qk_layernorm = False
        super().__init__(config=config)
        self.groups = groups or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = self.groups.tp
        self.model_config = model
        self.drop_path_rate = drop_path_rate
        self.holds_tied_copy = _holds_tied_copy(model, stage)
        # Core would reduce copies on the first and last stage only, so `TiedCopies` does.
        self.share_embeddings_and_output_weights = False
        self.pre_process, self.post_process = stage.holds("vision embed"), stage.holds("head")
        parts = TESpecProvider() if provider == "te" else OwnParts()
        language = model.language
        tensor = language_config.tensor_model_parallel_size
        own_words = language.words_of_rank(tensor)
        vocabulary = own_words * tensor
        self.sequence_parts = tensor if language_config.sequence_parallel else 1
        self.token_multiple = self.sequence_parts * (FP8_MULTIPLE if language_config.fp8 else 1)
        self.encoders = {
            name: EncoderUnits(model, name, stage, config, parts, self.groups)
            for name, config in encoder_configs.items()
        }
        for units in self.encoders.values():
            for name, unit in units.modules():
                self.add_module(name, unit)
        self.embedding = None
        if stage.holds("language embed"):
            self.embedding = LanguageModelEmbedding(
                language_config,
                vocabulary,
                max_sequence_length=0,
                position_embedding_type="rope",
                # Features are inserted before the sequence is divided.
                scatter_to_sequence_parallel=False,
            )
        self.language = None
        if stage.layers("language") or stage.holds("head"):
            self.language = PlannedBlock(
                language_config,
                [
                    language_layer_spec(language_config, language.kinds[number], parts)
                    for number in stage.layers("language")
                ],
                final_norm=stage.holds("head"),
            )
            self.rotary_axes = _list_axes(language.rope_sections)
            self.rotary_frequencies = _make_frequencies(language)
        self.deepstack_names = tuple(feature.name for feature in deepstack_of(model))
        self.head = self.prediction = self.word_copy = None
        if stage.holds("head"):
            if language.prediction_layers:
                self.prediction = PredictionLayer(language_config, language, parts, self.groups)
            if language.prediction_layers and self.embedding is None:
                self.word_copy = tensor_parallel.VocabParallelEmbedding(
                    vocabulary,
                    language.hidden_size,
                    init_method=language_config.init_method,
                    config=language_config,
                )
            # The sequence is gathered before the head, which takes loss positions of all of it.
            head_config = copy.copy(language_config)
            head_config.sequence_parallel = False
            self.head = tensor_parallel.ColumnParallelLinear(
                language.hidden_size,
                vocabulary,
                config=head_config,
                init_method=head_config.init_method,
                bias=False,
                skip_weight_param_allocation=language.tied_head
                and (self.embedding is not None or self.word_copy is not None),
            )
            start = parallel_state.get_tensor_model_parallel_rank() * own_words
            self.own_words = OwnWords(
                first=start,
                count=min(max(language.vocab_size - start, 0), own_words),
                group=parallel_state.get_tensor_model_parallel_group() if tensor > 1 else None,
            )
        describe_partitions(self, parts.column_parallel_linear(), parts.row_parallel_linear())
        words: Any = self.shared_embedding_or_output_weight()
        if self.holds_tied_copy:
            # Core's mark for an own bucket: data-parallel ranks then divide both copies alike.
            words.shared_embedding = True
            # Only the embedding's copy counts in the gradient norm.
            words.shared = self.embedding is None
        if self.head is not None and self.head.weight is None:
            # The head's fused product adds to core's buffer, then autograd adds the embedding's.
            words.zero_out_wgrad = True
        self.sharded: ShardedWeights | None = None  # None if replicated over data-parallel ranks
        self.deferred: DeferredWeights | None = None  # None if backward computes weight gradients
        self.context_groups: ContextGroups = {}
        self._input: ByTower = {}
        self._word_embeddings: torch.Tensor | None = None  # of a micro-batch, for `predict`
        self._prediction_losses: list[torch.Tensor] = []  # of micro-batches, weighted sums

    @property
    def blocks(self) -> dict[str, PlannedBlock]:
        """Return this stage's layers by tower."""
        blocks = {name: units.layers for name, units in self.encoders.items()}
        blocks[LANGUAGE] = self.language
        return {name: block for name, block in blocks.items() if block is not None}

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter | None:
        """Return the token embedding's weight or copy, else the head's or None (core's name)."""
        if self.embedding is not None:
            return self.embedding.word_embeddings.weight
        if self.word_copy is not None:
            return self.word_copy.weight
        return self.head.weight if self.head is not None else None

    @property
    def copy_name(self) -> str | None:
        """Name here of a copy of another stage's token embedding, or None without one."""
        if not self.holds_tied_copy or self.head is None:
            return None
        return "head.weight" if self.word_copy is None else "word_copy.weight"

    def set_input_tensor(self, input_tensor: ByTower | None) -> None:
        """Set the inputs of the next `forward` (core's name)."""
        self._input = input_tensor or {}

    def forward(self, batch: MicroBatch) -> ByTower | torch.Tensor:
        """Run the stage; return its outputs by tower, or `head_output` if it has the head."""
        received, self._input = self._input, {}  # not kept longer than the micro-batch
        hidden = self.encode(batch, received)
        if self.embedding is not None or self.language is not None:
            hidden_S1E = self.read_text(batch, hidden)
            if self.head is not None:
                return self.head_output(batch, hidden_S1E)
            layers = [] if self.language is None else self.language.layers
            # Deepstack features of later stages; layer numbers begin at 1.
            later = self.deepstack_names[layers[-1].layer_number if len(layers) else 0 :]
            hidden = {name: hidden[name] for name in later} | {LANGUAGE: hidden_S1E}
        # Not views, so that the memory can be freed before the graph.
        return {
            name: make_viewless_tensor(
                hidden[name], requires_grad=hidden[name].requires_grad, keep_graph=True
            )
            for name in tensor_names(self.model_config, hidden)
        }

    def encode(
        self, batch: MicroBatch, received: ByTower | None = None, only: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Run units of all encoders, or of encoder `only`.

        Returns:
            Features [K, E] or hidden states [V, B, H] by encoder; deepstack features by name. Other
            inputs are returned unchanged.
        """
        hidden = dict(received or {})
        for name, units in self.encoders.items():
            if units.is_held and only in (None, name):
                hidden[name], *features = units.run(batch, hidden.get(name), self.drop_path_rate)
                names = [
                    feature.name
                    for feature in deepstack_of(self.model_config)
                    if feature.tower == name and feature.layer in units.deepstack_projectors
                ]
                hidden |= dict(zip(names, features, strict=True))
        return hidden

    def read_text(self, batch: MicroBatch, hidden: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the language units on features or hidden states; return [S, 1, E].

        Deepstack features are popped from `hidden`.
        """
        hidden_S1E = (
            hidden[LANGUAGE] if self.embedding is None else self.embed_tokens(batch, hidden)
        )
        if self.language is not None:
            hidden_S1E = self.language(
                hidden_S1E,
                None,
                level=batch.level,
                features=self._prepare_deepstack(batch, hidden),
                **self.layer_arguments(batch, self._padding(batch)),
            )
        return hidden_S1E

    def _prepare_deepstack(
        self, batch: MicroBatch, features: dict[str, torch.Tensor]
    ) -> LayerFeatures | None:
        """Return functions that add deepstack features to layer outputs, or None without any."""
        assert self.language is not None
        numbers = [layer.layer_number - 1 for layer in self.language.layers]
        # The first language layers add a feature each.
        names = {n: self.deepstack_names[n] for n in numbers if n < len(self.deepstack_names)}
        if not names:
            return None

        def add_later(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            # Popped, so that features are freed once added.
            return lambda hidden_S1E: self.add_features(batch, features.pop(name), hidden_S1E)

        for name in names.values():
            features[name] = self._exchange_features(batch, features[name])
        return LayerFeatures(additions={number: add_later(name) for number, name in names.items()})

    def add_features(
        self, batch: MicroBatch, features_KE: torch.Tensor, hidden_S1E: torch.Tensor
    ) -> torch.Tensor:
        """Add features to the hidden states of their tokens (this rank's part), [S, 1, E]."""
        places_M = batch.image_positions_M
        assert places_M is not None
        # Placed in the full sequence and then scattered, as at the language embed: backward gathers
        # the gradients of all features.
        tokens = len(hidden_S1E) * self.sequence_parts
        whole_S1E = features_KE.new_zeros((tokens, 1, features_KE.shape[1]))
        whole_S1E.index_put_((places_M, torch.zeros_like(places_M)), features_KE)
        if self.sequence_parts > 1:
            whole_S1E = tensor_parallel.scatter_to_sequence_parallel_region(whole_S1E)
        return hidden_S1E + whole_S1E

    def layer_arguments(self, batch: MicroBatch, padding: int = 0) -> dict[str, Any]:
        """Return language layers' arguments for samples and trailing padding, by core's names."""
        device, share = current_device(), batch.share
        packed = batch.packed_seq_params(device, padding)
        first, shared = None, None
        if share is not None:
            firsts = [*share.own_pieces.first.tolist(), 0]  # padding is a piece
            first = torch.tensor(firsts, dtype=torch.int32).to(device, non_blocking=True)
            shared = shared_attention(share, padding, self.context_groups[share.context], device)
        tokens = batch.tokens + padding
        if self.rotary_axes is None or batch.rope_positions_3S is None:  # text alone
            turns = rotation(packed.cu_seqlens_q, tokens, self.rotary_frequencies, first)
        else:
            positions_3S = F.pad(batch.rope_positions_3S, (0, padding))
            turns = sectioned_rotation(positions_3S, self.rotary_axes, self.rotary_frequencies)
        routing = self._routing(batch, padding)
        return {"rotary_pos_emb": turns, "packed_seq_params": shared or packed, "routing": routing}

    def _routing(self, batch: MicroBatch, padding: int) -> Routing | None:
        """Return the routers' inputs from a micro-batch, or None without experts."""
        if self.config.num_moe_experts is None:
            return None
        padding_S = None
        if padding:
            tokens = (batch.tokens + padding) // self.sequence_parts
            # This rank's part of a divided sequence.
            first = tokens * (self.tp_group.rank() if self.sequence_parts > 1 else 0)
            places_S = torch.arange(first, first + tokens, device=current_device())
            padding_S = places_S >= batch.tokens
        return Routing(padding_S=padding_S, loss_weight=batch.loss_weight)

    def _padding(self, batch: MicroBatch) -> int:
        return batch.shape.padded_tokens(self.token_multiple) - batch.tokens

    def embed_tokens(self, batch: MicroBatch, features: ByTower) -> torch.Tensor:
        """Embed tokens and insert encoder features [K, E] at their positions; return [S, 1, E]."""
        assert self.embedding is not None and batch.token_ids_S is not None
        embedded_S1E = self.embedding(batch.token_ids_S.unsqueeze(0), None)
        if self.prediction is not None and torch.is_grad_enabled():
            self._word_embeddings = embedded_S1E
        places = {"vision": batch.image_positions_M, "audio": batch.audio_positions_N}
        for name, places_M in places.items():
            if name not in features:
                continue
            features_KE = features[name]
            if name == "vision":
                features_KE = self._exchange_features(batch, features_KE)
            assert places_M is not None
            embedded_S1E = embedded_S1E.index_put(
                (places_M, torch.zeros_like(places_M)), features_KE
            )
        padding = self._padding(batch)
        padded_S1E = F.pad(embedded_S1E, (0, 0, 0, 0, 0, padding)) if padding else embedded_S1E
        if self.sequence_parts == 1:
            return padded_S1E
        # The clone frees the whole sequence, which a rank's view would keep.
        return tensor_parallel.scatter_to_sequence_parallel_region(padded_S1E).clone()

    def _exchange_features(self, batch: MicroBatch, features_KE: torch.Tensor) -> torch.Tensor:
        """Return the image features of this rank's tokens, [M, E]; collective in shared packs."""
        if batch.share is None or batch.sent_features_F is None:
            return features_KE
        sent, received = map(list, batch.feature_counts)
        sent_FE = features_KE.index_select(0, batch.sent_features_F)  # sorted by receiving rank
        return all_to_all(self.context_groups[batch.share.context], sent_FE, received, sent)

    def head_output(self, batch: MicroBatch, hidden_S1E: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of losses, or without labels the likeliest next tokens [A].

        The loss of the prediction layer is not in the sum; backward adds its gradients.
        """
        if batch.labels_L is None:
            logits_AW = self.logits(hidden_S1E, batch.answer_positions_A)
            hide_padding(logits_AW, self.own_words)
            whole_AW = tensor_parallel.gather_from_tensor_model_parallel_region(logits_AW)
            return whole_AW.argmax(-1)
        assert batch.loss_positions_L is not None
        if self.prediction is not None and torch.is_grad_enabled():
            further = self.predict(batch, hidden_S1E)
            self._prediction_losses.append(further.detach())
            factor = self.model_config.language.prediction_loss
            hidden_S1E = WithLoss.apply(hidden_S1E, factor * further)
        logits_LW = self.logits(hidden_S1E, batch.loss_positions_L)
        losses_L = cross_entropy(logits_LW, batch.labels_L, self.own_words)
        return torch.dot(losses_L, batch.loss_weights_L)

    def take_prediction_losses(self) -> list[torch.Tensor]:
        """Return the prediction layer's losses of the micro-batches since the last call."""
        taken, self._prediction_losses = self._prediction_losses, []
        return taken

    def logits(self, hidden_S1E: torch.Tensor, positions_L: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits of the words after some positions of the sequence, [L, W]."""
        if self.sequence_parts > 1:
            # The head's column-parallel backward sums the gradient over ranks already.
            hidden_S1E = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_S1E, tensor_parallel_output_grad=False
            )
        assert self.head is not None
        weight_WE = self.head.weight
        if weight_WE is None:
            weight_WE = self.shared_embedding_or_output_weight()
        # Only these positions have logits: few in packs with many images.
        logits_L1W, _ = self.head(hidden_S1E.index_select(0, positions_L), weight_WE)
        return logits_L1W.squeeze(1)

    def predict(self, batch: MicroBatch, hidden_S1E: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the prediction layer's losses on the batch's labels.

        A label at position p + 1 is predicted from p - 1, unless p is the first of its sample.
        """
        assert self.prediction is not None and batch.token_ids_S is not None
        positions_L, padding = batch.loss_positions_L, self._padding(batch)
        assert positions_L is not None
        if self.word_copy is None:
            # Not a second lookup, whose gradient of all words would wait for the first one's.
            embedded_S1E, self._word_embeddings = self._word_embeddings, None
        else:
            embedded_S1E = self.word_copy(batch.token_ids_S.unsqueeze(1))
        assert embedded_S1E is not None
        embedded_S1E = F.pad(embedded_S1E.roll(-1, 0), (0, 0, 0, 0, 0, padding))
        if self.sequence_parts > 1:
            embedded_S1E = tensor_parallel.scatter_to_sequence_parallel_region(embedded_S1E)
        arguments = self.layer_arguments(batch, padding)
        hidden_S1E = self.prediction(hidden_S1E, embedded_S1E, **arguments)
        logits_LW = self.logits(hidden_S1E, (positions_L - 1).clamp(min=0))
        losses_L = cross_entropy(logits_LW, batch.labels_L, self.own_words)
        borders = arguments["packed_seq_params"].cu_seqlens_q
        places_S, _ = locate_tokens(borders, batch.tokens + padding)
        return torch.dot(losses_L, (places_S[positions_L] > 0) * batch.loss_weights_L)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the padded checkpoint state (core's name); other paddings can load it."""
        groups = {"tp_group": self.groups.tp, "dp_cp_group": self.groups.dp_cp}
        state = super().sharded_state_dict(prefix, sharded_offsets, {**(metadata or {}), **groups})
        for name, tensor in state.items():
            if unpadded_size(self.model_config, name.removeprefix(prefix)) is not None:
                tensor.allow_shape_mismatch = True
        if self.copy_name is not None:
            # Saved by the embedding's stage; here it is a replica.
            copy_of_embedding = state[f"{prefix}{self.copy_name}"]
            copy_of_embedding.key = f"{prefix}{TIED_NAME}"
            copy_of_embedding.replica_id = (1, *copy_of_embedding.replica_id[1:])
        return state


def _make_frequencies(language: LanguageConfig) -> torch.Tensor:
    """Return RoPE frequencies as core computes them, float32 [head_size / 2] or less."""
    sections, rotated = language.rope_sections, language.head_width
    if sections is not None:
        rotated = 2 * (sections.time + sections.rows + sections.columns)
    rotary = RotaryEmbedding(
        rotated,
        rotary_percent=1.0,
        rotary_base=language.rope_base,
        use_cpu_initialization=not has_cuda(),
    )
    scaling = language.rope_scaling
    if scaling is not None:
        # Core's constructor takes the factor only.
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq,
            factor=scaling.factor,
            low_freq_factor=scaling.low_frequency_factor,
            high_freq_factor=scaling.high_frequency_factor,
            original_max_position_embeddings=scaling.original_positions,
        )
    return rotary.inv_freq.to(current_device())


def _list_axes(sections: RopeSections | None) -> torch.Tensor | None:
    """Return each frequency's axis (time, row, column), int64 [head_size / 2], or None."""
    if sections is None:
        return None
    counts = (sections.time, sections.rows, sections.columns)
    # Built from Python ints: a fake device has no values to repeat by.
    axes_F = torch.tensor([axis for axis, count in enumerate(counts) for _ in range(count)])
    if sections.interleaved:
        # Of every three frequencies, time has the first, row the second and column the third.
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
    """Build part `part` of the model on this device, without initializing weights.

    Megatron's parallel state must have the plan's sizes.

    Args:
        context_groups: from `create_context_groups`, or None if no packs are shared.
    """
    check_provider_of(plan, provider)
    prefer_flash_attention_3()
    stage = VLMStage(
        plan.pipeline_model,
        plan.stages[part],
        plan.parallel,
        plan.precision,
        drop_path_rate,
        provider,
    )
    for name, block in stage.blocks.items():
        block.set_levels([stages[part].recomputed_in(name) for stages in plan.stages_at_levels])
    stage.context_groups = context_groups or {}
    _freeze(stage, plan)
    if plan.schedule.in_two:
        modules = list(stage.modules())
        linears = [m for m in modules if isinstance(m, (*PARALLEL_LINEARS, StackedLinear))]
        # A tied head uses the embedding's matrix.
        tied: Any = stage.shared_embedding_or_output_weight()
        weights = {linear: tied if linear.weight is None else linear.weight for linear in linears}
        trained = {linear: weight for linear, weight in weights.items() if weight.requires_grad}
        stage.deferred = DeferredWeights(trained.values())
        for linear in trained:
            if isinstance(linear, PARALLEL_LINEARS):
                defer_linear(linear, stage.deferred)
        for module in modules:
            if isinstance(module, StackedExperts) and module.linear_fc1 in trained:
                module.deferred = stage.deferred
    return stage.to(current_device())


def build_encoders(
    plan: Plan, groups: ProcessGroupCollection, drop_path_rate: float = 0.0
) -> VLMStage:
    """Build a stage of all encoders, to run data-parallel, without initializing weights."""
    stage = VLMStage(
        plan.model,
        encoders_stage(plan.model),
        Parallel(pipeline=1),
        plan.precision,
        drop_path_rate,
        groups=groups,
    )
    _freeze(stage, plan)
    return stage.to(current_device())


def tied_copies(plan: Plan) -> tuple[int, ...]:
    """Return the two parts with copies of the token embedding; empty if a part has all uses."""
    stages = enumerate(plan.stages)
    return tuple(index for index, stage in stages if _holds_tied_copy(plan.model, stage))


def _holds_tied_copy(model: ModelConfig, stage: Stage) -> bool:
    # A tied head and a prediction layer use the embedding on the last stage.
    has_uses = model.language.tied_head or model.language.prediction_layers > 0
    return has_uses and stage.holds("language embed") != stage.holds("head")


def _freeze(stage: VLMStage, plan: Plan) -> None:
    """Freeze the plan's frozen parts and the base weights of adapted parts."""
    modules: dict[str, tuple[torch.nn.Module | None, ...]] = {
        LANGUAGE: (
            *(stage.embedding, stage.language, stage.head, stage.prediction, stage.word_copy),
        )
    }
    for name, units in stage.encoders.items():
        modules[name] = (units.embedding, units.layers, *units.deepstack_projectors.values())
        modules[projector_name(stage.model_config, name)] = (units.projector,)
    adapted = () if plan.adapters is None else plan.adapters.parts
    for part in (*plan.frozen, *adapted):
        for module in modules.get(part, ()):  # empty for data-parallel encoders
            if module is not None:
                module.requires_grad_(False)
    if plan.adapters is not None:
        _add_adapters(stage, plan.adapters)


def _add_adapters(stage: VLMStage, adapters: AdapterConfig) -> None:
    for kind in unit_kinds(stage.model_config):
        linears = adapted_linears(stage.model_config, kind, adapters)
        if not linears:
            continue
        block, owners = stage.blocks.get(kind.tower), list[Any]()
        if not kind.is_layer:
            owners = [stage.encoders[kind.tower].projector]
        elif block is not None:
            owners = [x for x in block.layers if kind.has_layer(x.layer_number - 1)]
        for owner in (owner for owner in owners if owner is not None):
            groups = 1
            if kind.is_layer:
                groups = owner.self_attention.num_query_groups_per_partition
            owner.adapters = Adapters(owner, owner.config, linears, adapters, groups)


def tensor_names(model: ModelConfig, held: Collection[str]) -> list[str]:
    """Return names in `held` as sent: each encoder and its deepstack features, then language."""
    deepstack = deepstack_of(model)
    names = [
        name
        for tower in (*model.encoders_elsewhere, *model.towers)
        for name in (tower, *(feature.name for feature in deepstack if feature.tower == tower))
    ]
    return [name for name in names if name in held]


def boundary_shapes(plan: Plan, cut: int, shape: MicroBatchShape) -> dict[str, tuple[int, ...]]:
    """Return shapes of tensors sent from part `cut` to `cut + 1`, ordered as `tensor_names`."""
    model, before = plan.model, plan.stages[: cut + 1]
    width = model.language.hidden_size

    def are_done(unit: str) -> bool:
        return any(stage.holds(unit) for stage in before)

    shapes: dict[str, tuple[int, ...]] = {}
    for number, feature in enumerate(deepstack_of(model)):
        is_made = plan.data_parallel_encoders is not None or any(
            feature.layer in stage.layers(feature.tower) for stage in before
        )
        if is_made and not any(number in stage.layers(LANGUAGE) for stage in before):
            shapes[feature.name] = (getattr(shape, model.encoders[feature.tower].feature), width)
    if are_done("language embed"):
        # Hidden states are one rank's part of the sequence; deepstack features are not divided.
        parts = plan.parallel.tensor if plan.parallel.sequence_parallel else 1
        shapes[LANGUAGE] = (shape.padded_tokens(plan.token_multiple) // parts, 1, width)
    else:
        for name, tower in model.encoders.items():
            items = getattr(shape, tower.feature)
            if are_done(projector_unit(model, name)):
                shapes[name] = (items * tower.tokens_per_item, width)
            elif are_done(f"{name} embed"):
                # [V, B, H]: items as a batch, or all images as one sequence.
                sizes = (items * tower.positions_per_item, 1)
                if not isinstance(tower, ImagesEncoder):
                    sizes = (tower.positions_per_item, items)
                shapes[name] = (*sizes, tower.hidden_size)
    return {name: shapes[name] for name in tensor_names(model, shapes)}
