"""What a run will take, without running it: `python -m experiments.plan SCRIPT ...`.

Face: page.make_run, page.page. The models are counted in footprint; the formulas are in work,
activations and memory.
"""
