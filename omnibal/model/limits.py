"""Limits of a micro-batch, a step and a device's memory."""

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Self

import numpy as np
from pydantic import ConfigDict, Field, RootModel, field_validator

from omnibal.base.errors import refuse_if
from omnibal.base.frozen import Count
from omnibal.model.config import ClusterConfig

DEFAULT_MICRO_BATCHES = 8  # packs of a rank per step
SEARCH_SAMPLES = 20_000  # drawn to search caps and sizes, so that data's size costs no time
IMAGE_TOKENS = 1_024  # of an image in synthetic packs: 1,024 x 1,024 pixels, 32 x 32 per token
MAX_PACKS_PER_STEP = 1_000_000  # more is a typo
USABLE_MEMORY_FRACTION = 0.9  # of a device; the rest is for context, libraries, fragmentation
FEATURE_NAME = "[a-z][a-z0-9_]*"  # regular expression
_TOKENS, _LOSS_TOKENS = "tokens", "loss_tokens"
_OPTION_FEATURES = ("tiles", _TOKENS)  # limited by --max-tiles, --max-tokens, others by --limit

_Key = Annotated[str, Field(pattern=f"^max_{FEATURE_NAME}$")]


class Caps(RootModel[dict[_Key, Count]]):
    """Max sum of every limited feature in a micro-batch; JSON keys are `max_` and the name.

    Order: items of encoders by name, then `loss_tokens`, then `tokens`.

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
        refuse_if(_TOKENS not in given, "tokens must be limited: give max_tokens")
        return {f"max_{name}": given[name] for name in in_canonical_order(given)}

    @classmethod
    def of(cls, **limits: int) -> Self:
        """Return these caps; keyword arguments are names of features."""
        return cls({f"max_{name}": cap for name, cap in limits.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the limited features, `tokens` last."""
        return tuple(key.removeprefix("max_") for key in self.root)

    @property
    def values(self) -> np.ndarray:
        """Caps in the order of the names, int64 [limits]."""
        return np.array(list(self.root.values()), np.int64)

    def __getitem__(self, name: str) -> int:
        return self.root[f"max_{name}"]

    def get(self, name: str) -> int | None:
        """Return the cap of a feature, or None if absent."""
        return self.root.get(f"max_{name}")

    def __hash__(self) -> int:
        return hash(tuple(self.root.items()))

    def __str__(self) -> str:
        return self.join("and")

    def join(self, before_last: str) -> str:
        """Return the caps in words, such as "9 tiles or 4096 tokens" with `before_last` "or"."""
        return words([f"{self[name]} {name}" for name in self.names], before_last)

    @property
    def options(self) -> list[str]:
        """Command-line options for these caps, with values."""
        return [_option_with_value(name, self[name]) for name in self.names]


def in_canonical_order(names: Iterable[str]) -> list[str]:
    """Sort names of features: items by name, then `loss_tokens`, then `tokens`."""
    return sorted(names, key=lambda name: (name == _TOKENS, name == _LOSS_TOKENS, name))


def option_of(name: str) -> str:
    """Return the option that limits a feature without its value: --max-tokens, --limit frames."""
    return f"--max-{name}" if name in _OPTION_FEATURES else f"--limit {name}"


def _option_with_value(name: str, cap: int | str) -> str:
    return f"{option_of(name)}{' ' if name in _OPTION_FEATURES else '='}{cap}"


def check_limits(
    names: Collection[str], items: Iterable[str], whose: str, others: Iterable[str] = ()
) -> None:
    """Raise UserError unless `items` and tokens are limited, and no unknown feature is.

    Args:
        names: limited features.
        whose: name of the model or data, for the message.
        others: items with optional limits; `loss_tokens` is always one.
    """
    needed = in_canonical_order([*items, _TOKENS])
    optional = in_canonical_order({*others, _LOSS_TOKENS} - {*needed})
    unknown = [name for name in names if name not in (*needed, *optional)]
    given = f"{whose} cannot have {words(unknown)}: leave out {words([*map(option_of, unknown)])}"
    limits = f"{_options(needed)}, and {_options(optional, 'or')} if wanted"
    refuse_if(unknown, f"{given}: the limits are {limits}")
    missing = [name for name in needed if name not in names]
    message = f"{words(needed)} of {whose} must be limited; give {_options(missing)} too"
    refuse_if(missing, message)


def _options(names: Iterable[str], before_last: str = "and") -> str:
    return words([_option_with_value(name, "MAX") for name in names], before_last)


def words(parts: Sequence[str], before_last: str = "and") -> str:
    """Return `parts` joined by commas, the last by `before_last`."""
    return f" {before_last} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def memory_cap_gib(cluster: ClusterConfig) -> float:
    """Return memory per device that plans may use, in GiB."""
    return USABLE_MEMORY_FRACTION * cluster.memory_gib


def check_packs_per_step(data_parallel: int, micro_batches: int) -> None:
    """Raise UserError if a step has more than `MAX_PACKS_PER_STEP` packs."""
    is_large = data_parallel * micro_batches > MAX_PACKS_PER_STEP
    sizes = f"{data_parallel:,} ranks x {micro_batches:,} micro-batches"
    refuse_if(is_large, f"{sizes}: give at most {MAX_PACKS_PER_STEP:,} packs per step")
