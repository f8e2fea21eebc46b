"""What a run records and shows while it runs.

Face: glossary (every metric), metrics (RunLogger, Accumulator), terminal, jsonl, tracking (wandb),
profile, output_lock; watch and metric_table are commands.
"""
