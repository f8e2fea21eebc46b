"""What a run records and shows while it runs.

Face: glossary (every metric), metrics (Accumulator), logger, terminal, jsonl, tracking (wandb),
profile, output_lock; watch is a command.
"""
