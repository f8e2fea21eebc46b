"""What a run records and shows while it runs.

Face: glossary (every metric), metrics (Accumulator), logger, terminal, jsonl,
folder (what a run writes where), tracking (wandb, tensorboard), profile, output_lock.
"""
