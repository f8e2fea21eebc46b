"""What a run will take, without running it.

Face: plan.dry_run, plan.fit_to_gpu; footprint, work, activations and memory behind it.
"""
