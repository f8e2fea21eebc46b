"""Evaluation: preference accuracy and generation quality.

Data flows one way. `measure`, with the models, makes `records` (`pair_scores` of pairs; `judges`
compares completions); `summary`, `win_rates` and `pass_rates` make results of records alone, with
`accuracy` and `intervals` for what may be concluded. `runs` reads the run that wrote a model;
`scoring` has the scores of a whole split.
"""
