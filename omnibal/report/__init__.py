"""The report: a plan and the measurements of its run, as one self-contained HTML page.

`page.write_report` writes it. Its tables are those that commands print.
"""
