"""Tables, pictures and pages of what was recorded. Nothing here computes a result.

Face: blocks and page, chain and tables (of an evaluation), plots.
"""
