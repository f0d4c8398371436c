"""The trainer: an overlay beside pip's megatron.core that follows an OmniBal plan."""

import warnings

# Megatron-core says, once for each part, that it does without Transformer Engine and Apex, which
# are optional here; and it calls collectives by names that newer torch has renamed.
warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex are not installed")
warnings.filterwarnings(
    "ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning
)
