"""Tables, pictures and pages of what was recorded. Nothing here computes a result.

Face: blocks and page, chain and figures (of an evaluation), plots, tables; judgements is a command.
"""
