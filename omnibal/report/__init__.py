"""The report: a plan and what its run measured, as one HTML page that needs nothing else."""

from omnibal.report.page import write_report

__all__ = ["write_report"]
