"""Predict each measured rate from all others, and say how far off that is.

    python benchmarks/rates.py [b200-180g ...]

Leave-one-out: each product is predicted from all others of the table. Left out with its layer:
from those of other weights (inner and outer size), at which none of its passes was measured, at any
number of rows. Percent of the time; half of all are nearer than the median, nine tenths than p90.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from omnibal.cost.scattered_rates import ScatteredTimes, product_shapes
from omnibal.model.config import load_cluster
from omnibal.model.rate_tables import ProductTime


def errors_of(
    measured: Sequence[ProductTime], tflops: float | None, *, with_layer: bool
) -> np.ndarray:
    """Relative errors of times of products that are left out in turn, [measured]."""
    times_ms = np.array([one.time_ms(tflops) for one in measured])
    layers = [(one.inner, one.outer) if with_layer else place for place, one in enumerate(measured)]
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
    of_layer = np.array([numbers[layer] for layer in layers])
    errors = np.empty(len(measured))
    for number in range(len(numbers)):
        left = of_layer == number
        others = [one for one, is_left in zip(measured, left, strict=True) if not is_left]
        fitted = ScatteredTimes.fit(product_shapes(others), times_ms[~left])
        out = [one for one, is_left in zip(measured, left, strict=True) if is_left]
        errors[left] = fitted.ms(product_shapes(out)) / times_ms[left] - 1
    return errors


def main() -> None:
    """Print errors by table and pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clusters", nargs="*", default=["b200-180g", "a100-80g"])
    for name in parser.parse_args().clusters:
        rates = load_cluster(name).rates["bf16"]
        for kind, measured in (("products", rates.products), ("grouped", rates.grouped)):
            for left, with_layer in (("alone", False), ("with its layer", True)):
                errors = errors_of(measured, rates.tflops, with_layer=with_layer)
                _print(f"{name} {kind}, each left out {left}", measured, errors)


def _print(title: str, measured: Sequence[ProductTime], errors: np.ndarray) -> None:
    passes = np.array([f"{one.of} {one.gradient}" for one in measured])
    print(title)
    for of in (None, *dict.fromkeys(passes)):
        some = np.abs(errors if of is None else errors[passes == of])
        print(
            f"  {of or 'all':24} {len(some):4}  median {100 * np.median(some):5.1f} %  "
            f"p90 {100 * np.quantile(some, 0.9):5.1f} %"
        )


if __name__ == "__main__":
    main()
