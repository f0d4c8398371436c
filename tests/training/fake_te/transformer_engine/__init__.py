"""Stand-in for Transformer Engine 1.8 on a CPU, for Megatron-core's own classes to be built over.

Arguments are those of its documentation; what it computes is plain torch on one device. Newer
releases take these arguments too.
"""

from types import SimpleNamespace

from transformer_engine import pytorch as pytorch

__version__ = "1.8.0"
common = SimpleNamespace(recipe=SimpleNamespace(DelayedScaling=object))
