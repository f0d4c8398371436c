"""Leave-one-out errors of measured rates of products.

    python benchmarks/rates.py [b200-180g ...]

Each product is predicted from all others of the table; with its layer left out, from products with
other weights (inner and outer size), at any number of rows. Errors are in percent of the time.
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
    """Return relative errors of products left out in turn, alone or with their layer. [measured]"""
    times_ms = np.array([product.time_ms(tflops) for product in measured])
    keys = [(p.inner, p.outer) if with_layer else place for place, p in enumerate(measured)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    group = np.array([numbers[key] for key in keys])  # products left out together, [measured]
    errors = np.empty(len(measured))
    for number in range(len(numbers)):
        left_out = group == number
        kept = [product for product, is_out in zip(measured, left_out, strict=True) if not is_out]
        tested = [product for product, is_out in zip(measured, left_out, strict=True) if is_out]
        fitted = ScatteredTimes.fit(product_shapes(kept), times_ms[~left_out])
        errors[left_out] = fitted.ms(product_shapes(tested)) / times_ms[left_out] - 1
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clusters", nargs="*", default=["b200-180g", "a100-80g"])
    for name in parser.parse_args().clusters:
        rates = load_cluster(name).rates["bf16"]
        for kind, measured in (("products", rates.products), ("grouped", rates.grouped)):
            for scope, with_layer in (("alone", False), ("with its layer", True)):
                errors = errors_of(measured, rates.tflops, with_layer=with_layer)
                print_errors(f"{name} {kind}, each left out {scope}", measured, errors)


def print_errors(title: str, measured: Sequence[ProductTime], errors: np.ndarray) -> None:
    """Print the distribution of absolute errors, of all and by pass."""
    passes = np.array([f"{product.of} {product.gradient}" for product in measured])
    print(title)
    for name in (None, *dict.fromkeys(passes)):
        sizes = np.abs(errors if name is None else errors[passes == name])
        print(
            f"  {name or 'all':24} {len(sizes):4}  median {100 * np.median(sizes):5.1f} %  "
            f"p90 {100 * np.quantile(sizes, 0.9):5.1f} %"
        )


if __name__ == "__main__":
    main()
