"""Tables, pictures and pages of what was recorded. Nothing here computes a result.

Face: blocks and page, evaluation_report and tables, plots.
"""
