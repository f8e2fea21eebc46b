"""Tables, pictures and pages of what was recorded. Nothing here computes a result.

Face: chain (of an evaluation), page, plots, tables; judgements is a command.
"""
