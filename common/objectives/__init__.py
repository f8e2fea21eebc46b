"""Objectives: a file for each paper, with a function of the file's name, or `mine.py:function`.

    policy/      losses of GRPO's tokens, and behind them files that change such a loss
    preference/  losses of DPO's pairs
    advantages/  GRPO's advantages

    def mine(logps, old_logps, advantages, mask, *, bound=2.0):

A function names what it takes; docs/objectives.md lists it by kind. Keyword-only arguments with a
default are its settings, which stand behind its name as `mine.py:mine:bound=3`; a ValueError
refuses one. Tensors are float32, or float64 in evaluation.

Face: `kinds.PolicyObjective`, `kinds.PreferenceLoss`, `kinds.Advantages`; `implicit_reward`;
`user_files`, which also finds reward functions.
"""
