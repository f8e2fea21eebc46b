"""What a run will take, without running it.

Face: plan.dry_run; footprint, work, activations and memory behind it.
"""
