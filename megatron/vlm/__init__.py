"""The trainer: an overlay on pip's megatron.core that follows an OmniBal plan."""

import warnings

# Megatron-core warns, once for each part, that it does without Transformer Engine and Apex, which
# are optional here, and calls functions of torch.distributed by names that torch has renamed.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", module=r"torch\.distributed", category=FutureWarning)
# Conversion reads and writes checkpoints in one process, on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# Before anything of the trainer imports Megatron-core.
from megatron.vlm import installed as installed  # noqa: E402
