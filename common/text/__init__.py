"""Data sets: rows are read, brought to one schema, rendered to text and tokenised.

Face: tokenise (splits as token ids), reading (files, the hub), rows (`Row`, `Example`,
`Vocabulary`), chat (templates), truncate (cues), synthetic (the embedded task), overlap (ROUGE),
hub; schemas, files, data_report and shared_rows behind them.
"""
