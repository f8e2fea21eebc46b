"""Records of a run, and what it shows while it runs.

Face: glossary (every metric), metrics (Accumulator), logger, terminal, jsonl, run_folder (file
names and readers), tracking (wandb), output_lock.
"""
