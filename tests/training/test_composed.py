"""Random combinations of features: each plans, trains, loads and exports as one process does."""

import pytest
from composed_cases import compare_composed, draw_combination, kinds
from native_resolution_cases import WORD, rope_positions

FIXED = (1, 2, 5, 7, 9, 10, 11, 15, 17, 19, 21, 22)
"""Seeds of every run; `make compose` draws others."""


def pytest_generate_tests(metafunc):
    """Parametrize `seed` with `--draws` seeds from `--seed` on."""
    if "seed" in metafunc.fixturenames:
        draws, first = (metafunc.config.getoption(name) for name in ("draws", "seed"))
        metafunc.parametrize("seed", FIXED if draws is None else range(first, first + draws))


@pytest.fixture(scope="module", autouse=True)
def cache_rope_positions():
    """Cache the RoPE positions of samples before ranks are forked."""
    for kind in kinds().values():
        if kind.is_native:
            rope_positions(kind.model, [WORD], ())


def test_what_plans_allow_trains_as_one_process(tmp_path, seed):
    """Prevents features that work separately but together hang, train differently, or save a
    checkpoint that another plan cannot load."""
    drawn, other = draw_combination(seed, tmp_path)
    print(f"{drawn.summary}; then {other.parallel}, {other.schedule.name}")
    compare_composed(drawn, other, tmp_path)
