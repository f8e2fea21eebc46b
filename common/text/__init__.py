"""Data sets: rows are read, brought to one schema, rendered to text and tokenised.

Face: tokenise (splits as token ids), reading (rows of a split), rows (`Row`, `Example`,
`Vocabulary`), chat (templates), truncate (cues), synthetic (the embedded task), overlap (ROUGE),
hub (its ids); schemas, sources, data_report and shared_rows behind them.
"""
