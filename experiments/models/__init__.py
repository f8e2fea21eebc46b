"""Which models are right: every causal type of transformers as a tiny model, or a user's folder.

`shrink` makes the tiny models, `cells` compares the stages' functions with plain transformers,
`table` prints what was seen; `python -m experiments.models` runs them.
"""
