"""`python -m experiments.runs.sweep`: variants of a chain over seeds, and what each changes."""
