"""`python -m experiments.sweep`: variants of a chain over seeds, and what each of them changes."""
