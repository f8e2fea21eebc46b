"""What a run will take, without running it: `python -m experiments.plan SCRIPT ...`.

Face: work.make_run, memory.peak. The models are counted in footprint; the formulas are in work,
activations and memory.
"""
