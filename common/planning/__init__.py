"""What a run will take, without running it.

Face: plan.dry_run; footprint, work, activations, memory, host_memory and flops behind it.
"""
