"""The report: a plan and the measurements of its run, as one self-contained HTML page."""

from omnibal.report.page import write_report

__all__ = ["write_report"]
