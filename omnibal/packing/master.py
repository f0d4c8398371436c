"""Master problem of column generation: cover a demand by the fewest packs, fractionally.

It is solved again and again, with more columns or another demand each time, and goes on from the
solution before, which takes a fraction of the time of a new start.
"""

from dataclasses import dataclass

import highspy
import numpy as np
from scipy import sparse

_DUAL_SIMPLEX, _PRIMAL_SIMPLEX = 1, 4
"""HiGHS's `simplex_strategy`."""
_ITERATIONS_TIMES_ROWS = 1e8
"""Simplex iterations times rows of one master, over all its solutions, at most: half a minute."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cover:
    """Solution of a covering problem."""

    times: np.ndarray
    """Number of times that every column is used, float64 [columns]."""
    traded: np.ndarray
    """Number of times that every exchange is used, float64 [exchanges]."""
    values: np.ndarray
    """Dual value of every row, float64 [rows]."""
    packs: float
    """Sum of the times."""


class Master:
    """Least sum of x >= 0 with columns.T @ x >= demand.

    Exchanges are columns that cost nothing: the place of one row serves another instead.
    """

    def __init__(self, demand: np.ndarray, exchanges: np.ndarray | None = None):
        """Start without columns.

        Args:
            demand: float64 [rows].
            exchanges: int64 [exchanges, 2], rows that gain and that lose.
        """
        self._solver = highspy.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        rows = len(demand)
        self._iterations_left = int(_ITERATIONS_TIMES_ROWS / max(rows, 1))
        nothing = np.zeros(0, np.int32)
        self._solver.addRows(
            rows, demand.astype(np.float64), np.full(rows, highspy.kHighsInf), 0,
            np.zeros(rows, np.int32), nothing, np.zeros(0),
        )  # fmt: skip
        self._rows, self._exchanges = rows, 0 if exchanges is None else len(exchanges)
        if exchanges is not None and len(exchanges):
            gain = np.tile([1.0, -1.0], len(exchanges))
            at = np.repeat(np.arange(len(exchanges)), 2)
            shape = (len(exchanges), rows)
            self._add(sparse.csr_array((gain, (at, exchanges.ravel())), shape=shape), cost=0.0)
        self._demand_changed = True

    def add(self, columns: sparse.csr_array) -> None:
        """Add columns [columns, rows]."""
        self._add(columns, cost=1.0)

    def _add(self, columns: sparse.csr_array, cost: float) -> None:
        count = columns.shape[0]
        self._solver.addCols(
            count, np.full(count, cost), np.zeros(count), np.full(count, highspy.kHighsInf),
            columns.nnz, columns.indptr[:-1].astype(np.int32), columns.indices.astype(np.int32),
            columns.data.astype(np.float64),
        )  # fmt: skip

    def change_demand(self, demand: np.ndarray) -> None:
        """Replace the demand [rows]."""
        rows = np.arange(self._rows, dtype=np.int32)
        most = np.full(self._rows, highspy.kHighsInf)
        least = demand.astype(np.float64)
        # highspy's stubs leave this one out.
        self._solver.changeRowsBounds(self._rows, rows, least, most)  # type: ignore[attr-defined]
        self._demand_changed = True

    def solve(self) -> Cover | None:
        """Solve for the current columns and demand; None where all solutions take too long.

        Raises:
            RuntimeError: the columns do not cover the demand.
        """
        # The last solution stays feasible when columns come, and its values when the demand moves.
        strategy = _DUAL_SIMPLEX if self._demand_changed else _PRIMAL_SIMPLEX
        self._solver.setOptionValue("simplex_strategy", strategy)
        self._solver.setOptionValue("simplex_iteration_limit", max(self._iterations_left, 0))
        self._solver.run()
        self._iterations_left -= self._solver.getInfo().simplex_iteration_count
        status = self._solver.getModelStatus()
        if status == highspy.HighsModelStatus.kIterationLimit:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"the master problem was not solved: {status}")
        self._demand_changed = False
        solution = self._solver.getSolution()
        times = np.maximum(np.array(solution.col_value), 0)
        return Cover(
            times=times[self._exchanges :],
            traded=times[: self._exchanges],
            values=np.maximum(np.array(solution.row_dual), 0),
            packs=self._solver.getInfo().objective_function_value,
        )
