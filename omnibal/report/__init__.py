"""The report: a plan and its run's measurements as one self-contained HTML page."""
