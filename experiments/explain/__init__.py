"""One optimiser step number by number: `python -m experiments.explain SCRIPT ...`.

Face: trace.trace_step, numbers.explain, page.page. The formulas and the functions that are traced
are in `formulas.yaml`, what the page looks like in `page.html`.
"""
