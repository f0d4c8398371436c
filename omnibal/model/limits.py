"""Limits of one micro-batch, one step and one device."""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Self

import numpy as np
from pydantic import ConfigDict, Field, RootModel, field_validator

from omnibal.base.errors import UserError
from omnibal.base.frozen import Count
from omnibal.model.config import ClusterConfig

DEFAULT_MICRO_BATCHES = 8
"""Packs of a rank in a step, where a plan is not told."""
SEARCH_SAMPLES = 20_000
"""Samples drawn to try caps and sizes on: a search takes about as long for any more."""
IMAGE_TOKENS = 1_024
"""Tokens of an image at its native resolution in packs of shapes: 1,024 x 1,024 pixels where a
token is of 32 x 32, as in Qwen3-VL."""
MAX_PACKS_PER_STEP = 1_000_000  # a step of more is a mistake in a number
USABLE_MEMORY_FRACTION = 0.9
"""Share of device memory to plan with; the rest is for context, communication and fragmentation."""
FEATURE_NAME = "[a-z][a-z0-9_]*"
"""Pattern of what a feature may be called."""
_TOKENS, _LOSS_TOKENS = "tokens", "loss_tokens"
_OWN_OPTIONS = ("tiles", _TOKENS)
"""Features whose limits have command-line options of their own."""

_Key = Annotated[str, Field(pattern=f"^max_{FEATURE_NAME}$")]


class Caps(RootModel[dict[_Key, Count]]):
    """Largest sum of each limited feature in one micro-batch.

    Features come in one order, however they were given: items that encoders take, by name, then
    `loss_tokens`, and `tokens` last. In JSON, a cap is `max_` and the name.

    Example:
        >>> caps = Caps.of(tokens=4096, tiles=9)
        >>> caps.names, caps["tiles"], str(caps)
        (('tiles', 'tokens'), 9, '9 tiles and 4096 tokens')
        >>> caps.model_dump(mode="json")
        {'max_tiles': 9, 'max_tokens': 4096}
    """

    model_config = ConfigDict(frozen=True)

    @field_validator("root")
    @classmethod
    def _in_order(cls, root: dict[str, int]) -> dict[str, int]:
        given = {key.removeprefix("max_"): cap for key, cap in root.items()}
        if _TOKENS not in given:
            raise ValueError("tokens must be limited: give max_tokens")
        return {f"max_{name}": given[name] for name in in_canonical_order(given)}

    @classmethod
    def of(cls, **limits: int) -> Self:
        """Make caps of counts by feature name."""
        return cls({f"max_{name}": cap for name, cap in limits.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the limited features; the last is `tokens`."""
        return tuple(key.removeprefix("max_") for key in self.root)

    @property
    def values(self) -> np.ndarray:
        """Caps in the order of the names, int64 [limits]."""
        return np.array(list(self.root.values()), np.int64)

    def __getitem__(self, name: str) -> int:
        return self.root[f"max_{name}"]

    def get(self, name: str) -> int | None:
        """Return the cap of a feature; None where it has none."""
        return self.root.get(f"max_{name}")

    def __hash__(self) -> int:
        return hash(tuple(self.root.items()))

    def __str__(self) -> str:
        return self.words()

    def words(self, before_last: str = "and") -> str:
        """Every cap and its feature: "9 tiles and 4096 tokens"."""
        return words([f"{self[name]} {name}" for name in self.names], before_last)

    @property
    def options(self) -> list[str]:
        """The command-line options that give these caps, each with its value."""
        return [_with_value(name, self[name]) for name in self.names]


def in_canonical_order(names: Iterable[str]) -> list[str]:
    """Sort names of features: items by name, then `loss_tokens`, then `tokens`."""
    return sorted(names, key=lambda name: (name == _TOKENS, name == _LOSS_TOKENS, name))


def option_of(name: str) -> str:
    """The command-line option that limits a feature, without its value."""
    return f"--max-{name}" if name in _OWN_OPTIONS else f"--limit {name}"


def _with_value(name: str, cap: int | str) -> str:
    return f"{option_of(name)}{' ' if name in _OWN_OPTIONS else '='}{cap}"


def check_limits(
    names: Collection[str], items: Iterable[str], whose: str, others: Iterable[str] = ()
) -> None:
    """Refuse limits of unknown features, and items or tokens without a limit.

    Args:
        items: that there are; they and tokens must be limited, and loss_tokens may be.
        whose: these are, for the message.
        others: items that may be limited and need not be.
    """
    needed = in_canonical_order([*items, _TOKENS])
    optional = in_canonical_order({*others, _LOSS_TOKENS} - {*needed})
    unknown = [name for name in names if name not in (*needed, *optional)]
    if unknown:
        given = words([option_of(name) for name in unknown])
        raise UserError(
            f"a limit is given for {words(unknown)}, which {whose} cannot have; leave out {given}: "
            f"the limits are {words([_with_value(name, 'MAX') for name in needed])}, and "
            f"{words([_with_value(name, 'MAX') for name in optional], 'or')} if wanted"
        )
    missing = [name for name in needed if name not in names]
    if missing:
        options = words([_with_value(name, "MAX") for name in missing])
        raise UserError(
            f"{words(needed)} of {whose} must be limited, and {words(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not; give {options}"
        )


def words(parts: Sequence[str], before_last: str = "and") -> str:
    """Join parts of a sentence by commas, the last by a word."""
    return f" {before_last} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def memory_cap_gib(cluster: ClusterConfig) -> float:
    """Memory that a stage may fill of one device, in GiB."""
    return USABLE_MEMORY_FRACTION * cluster.memory_gib


def check_packs_per_step(data_parallel: int, micro_batches: int) -> None:
    """Refuse a step of more than `MAX_PACKS_PER_STEP` packs."""
    count = data_parallel * micro_batches
    if count > MAX_PACKS_PER_STEP:
        raise UserError(
            f"a step of {data_parallel:,} ranks with {micro_batches:,} micro-batches each has "
            f"{count:,} packs; it may have at most {MAX_PACKS_PER_STEP:,}: give fewer "
            "micro-batches or ranks"
        )
