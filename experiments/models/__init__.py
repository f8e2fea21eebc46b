"""What is right for a model: `cells` compares the stages' functions with plain transformers.

`table` prints what was seen, of a folder (`python -m experiments.models PATH`), and of the tiny
models of all types that `make models` makes (`assets/recipes/models`).
"""
