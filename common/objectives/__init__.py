"""Objectives: a file for each paper, with a function of the file's name, or `mine.py:function`.

    def mine(logps, old_logps, advantages, mask, *, bound=2.0):

It names the tensors that it takes, (B, C) each, in float32, and returns the loss of each token,
(B, C), to be minimised, and 0 where the mask is False; or that and a dict of metrics, (B, C) each,
which are logged as means over the tokens. Keyword-only arguments with a default are its settings,
see `--objective_args`; a ValueError refuses one.

    logps          log-probs of the tokens under the policy: the loss's gradient comes from them
    old_logps      the same before the updates on these tokens
    sampled_logps  the same of the sampler; taken in the place of old_logps, they correct for it
    advantages     of the tokens
    mask           bool, True = the token counts; the loss does not depend on others

Face: `find.find_policy_objective`, `find.PolicyObjective`.
"""
