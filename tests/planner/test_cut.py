"""Cut of context-parallel packs, against a token-by-token count."""

import numpy as np
import pytest

from omnibal.model.levels import CutRule, Level
from omnibal.model.limits import Caps
from omnibal.packing.cut import Pieces, cut_pack, cut_packs, item_bounds

pytestmark = pytest.mark.quick
CONTEXTS = (1, 2, 4, 8)


def level(rule: CutRule, context: int, weight: float = 0.0) -> Level:
    return Level(caps=Caps.of(tokens=1), context=context, cut=rule, attention_weight=weight)


def random_pack(rng: np.random.Generator) -> np.ndarray:
    return (rng.pareto(1.0, rng.integers(1, 12)) * 20).astype(np.int64).clip(0, 3000) + 1


def owners(pieces: Pieces, tokens: np.ndarray) -> list[np.ndarray]:
    """Return the rank of every token of each sample, by iterating over the pieces."""
    ranks = [np.full(count, -1) for count in tokens]
    columns = pieces.rank, pieces.sample, pieces.first, pieces.stop
    for rank, sample, first, stop in zip(*columns, strict=True):
        assert (ranks[sample][first:stop] == -1).all()
        ranks[sample][first:stop] = rank
    return ranks


@pytest.mark.parametrize("rule", CutRule)
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_token_is_on_one_rank(rule: CutRule, context: int) -> None:
    """Prevents tokens trained by no rank or by two."""
    rng = np.random.default_rng(context)
    for _ in range(20):
        tokens = random_pack(rng)
        pieces = cut_pack(tokens, level(rule, context, rng.choice([0.0, 1e-3, 1.0])))
        ranks = np.concatenate(owners(pieces, tokens))
        assert ranks.min() >= 0
        assert ranks.max() < context
        key = np.column_stack([pieces.rank, pieces.sample, pieces.first])
        assert (np.lexsort(key.T[::-1]) == np.arange(len(pieces))).all()


@pytest.mark.parametrize("rule", CutRule)
def test_packs_are_cut_together_as_one_by_one(rule: CutRule) -> None:
    """Prevents cuts that depend on neighbouring packs."""
    rng = np.random.default_rng(5)
    packs = [random_pack(rng) for _ in range(30)]
    offsets = np.concatenate([[0], np.cumsum([len(pack) for pack in packs])])
    cut = level(rule, 4, 0.01)
    together = cut_packs(np.concatenate(packs), offsets, cut)
    for number, pack in enumerate(packs):
        alone, of_pack = cut_pack(pack, cut), together.take(together.pack == number)
        for name in ("rank", "sample", "first", "stop"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(of_pack, name))


@pytest.mark.parametrize("rule", CutRule)
def test_a_sample_is_divided_where_two_ranks_have_tokens_of_it(rule: CutRule) -> None:
    """Prevents keys not sent to a rank that needs them."""
    rng = np.random.default_rng(6)
    for _ in range(20):
        tokens = random_pack(rng)
        pieces = cut_pack(tokens, level(rule, 4))
        several = [len(np.unique(ranks)) > 1 for ranks in owners(pieces, tokens)]
        np.testing.assert_array_equal(pieces.is_divided, np.array(several)[pieces.sample])


def test_ranks_have_equal_tokens_cost_or_attention() -> None:
    """Prevents rules that do not balance tokens, cost or attention as named."""
    rng = np.random.default_rng(7)
    balanced = {
        CutRule.CONTIGUOUS: (1, 0),
        CutRule.COST: (1, 0.01),
        CutRule.ZIGZAG: (0, 1),
        CutRule.WHOLE: (1, 0.01),
    }
    for _ in range(20):
        tokens, loads = random_pack(rng) + 200, {}
        for rule, (linear, square) in balanced.items():
            cut = cut_pack(tokens, level(rule, 4, 0.01))
            cost = linear * cut.tokens + square * (cut.stop**2 - cut.first**2)
            loads[rule] = np.bincount(cut.rank, cost, minlength=4)
        assert np.ptp(loads[CutRule.CONTIGUOUS]) <= 1
        # Half a token per end, at the cost of the longest sample's last token.
        assert np.ptp(loads[CutRule.COST]) <= 2 * (1 + 2 * 0.01 * tokens.max())
        assert loads[CutRule.ZIGZAG].max() <= loads[CutRule.ZIGZAG].mean() * 1.1
        assert loads[CutRule.WHOLE].max() <= 1.27 * loads[CutRule.WHOLE].mean()


def test_items_are_divided_evenly() -> None:
    """Prevents tiles encoded twice or never."""
    for items in range(12):
        for context in CONTEXTS:
            sizes = np.diff(item_bounds(items, context))
            assert sizes.sum() == items
            assert sizes.max() - sizes.min() <= 1
