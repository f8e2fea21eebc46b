"""Data sets: rows are read, brought to one schema, rendered to text and tokenised.

Face: tokenise (splits as token ids), reading (rows of a split), example (token ids and their
vocabulary), rows (`Row`), chat (templates), truncate (cues), synthetic (the embedded task), overlap
(ROUGE), sources (files and the hub); schemas, data_report and shared_rows behind them.
"""
