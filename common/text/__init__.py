"""What is read, and how a row becomes text and token ids.

Face: tokenise (splits as token ids), rows (files, the hub, TRL's schemas), chat (templates),
truncate (cues), synthetic (the embedded task), overlap (ROUGE), example; data_report, files, forms,
hub and shared_rows behind them.
"""
