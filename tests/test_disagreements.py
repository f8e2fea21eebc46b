"""Where this repository and TRL 1.16 give different numbers on the same inputs, and why.

One test for each that is not among the golden cases. It says what TRL does, what the paper says,
and shows both numbers: TRL's from TRL's own code, ours equal to the formula worked out in the test
without either. A test that fails here after an update of TRL means that TRL has changed its mind:
then the case moves to test_against_trl.py. About `common.forward` and `common.objectives`.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl_code
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification
from trl.trainer.reward_trainer import DataCollatorForPreference

from assets.recipes.conformance.case import OurCase, compute
from assets.recipes.conformance.trl_case import TrlCase
from common.advantages import EPSILON, normalise_globally
from common.batch import padded_batch
from common.config.grpo import GRPOConfig
from common.forward import Policy, RewardModel
from common.grpo import rollouts
from common.model import load
from common.objectives.kinds import PreferenceLoss


def close(value: Any, expected: Any, tolerance: float = 1e-6) -> None:
    value = torch.as_tensor(value, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


def test_gpt2_under_left_padding():
    """Log-probabilities of GPT-2 must not depend on the length of the other prompts in the batch.

    TRL's GRPO passes no position ids, and GPT-2 then counts the padding as positions. Rotary models
    are not affected. Truth is each row alone, without padding.
    """
    lm = tiny.causal_lm("gpt2", is_plain=True)
    device = next(lm.parameters()).device
    prompts = [tiny.random_ids(n, seed=n) for n in (12, 4, 1)]
    completions = [tiny.random_ids(n, seed=50 + n) for n in (3, 5, 4)]
    batch = padded_batch(prompts, [[completion] for completion in completions], 7).to(device)
    with torch.no_grad():
        rows = zip(prompts, completions, strict=True)
        truth = [tiny.plain_logps(lm, *row) for row in rows]
        ours = tiny.per_row(Policy(lm)(batch).token_logps, batch.completion_mask)
    trl = tiny.per_row(trl_code.scores(lm, batch)[0], batch.completion_mask)
    for row in range(3):
        close(ours[row], truth[row], 1e-4)
    close(trl[0], truth[0], 1e-4)  # the longest prompt has no padding
    for row in (1, 2):
        assert (trl[row] - truth[row]).abs().max() > 0.1  # nats


def test_reward_of_a_gpt2_whose_pad_token_is_its_eos_token():
    """The reward is read at the last token of the response, its eos (Stiennon et al. 2020).

    TRL's `RewardTrainer` pads GPT-2's rows with eos, and transformers reads the score at the last
    token that is not padding: the one before eos. Ours carries masks.
    """
    lm = tiny.classifier("gpt2", is_plain=True)
    device = next(lm.parameters()).device
    eos = lm.config.eos_token_id
    prompt, completions = [5, 6, 7], [[8, 9, eos], [10, eos]]
    rows = [prompt + completion for completion in completions]
    with torch.no_grad():
        per_token = [
            lm.score(lm.base_model(torch.tensor([row], device=device)).last_hidden_state)[0, :, 0]
            for row in rows
        ]  # each (T,): the score after every token
        batch = padded_batch([prompt], [completions], pad_id=eos).to(device)
        ours = RewardModel(lm)(batch)
        lm.config.pad_token_id = eos  # as `RewardTrainer.__init__` does
        collated = DataCollatorForPreference(pad_token_id=eos)(
            [{"chosen_ids": rows[0], "rejected_ids": rows[1]}]
        )
        trl = lm(**{name: ids.to(device) for name, ids in collated.items()}).logits[:, 0]
    close(ours.cpu(), [scores[-1].item() for scores in per_token], 1e-4)
    close(trl.cpu(), [scores[-2].item() for scores in per_token], 1e-4)
    assert (ours - trl).abs().min() > 0.01


def test_initial_reward_head(tmp_path: Path):
    """Its weights are drawn with variance 1/(d + 1) (Stiennon et al. 2020, B.1).

    TRL leaves them to transformers, whose standard deviation is the trunk's `initializer_range`,
    0.02 whatever the width: at GPT-2's width of 768, rewards start 1.8 times smaller.
    """
    width = 1024
    lm = tiny.causal_lm("gpt2", vocab_size=300, width=width, initializer_range=0.02, n_layer=1)
    lm.save_pretrained(tmp_path)
    trl = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    model_config = AutoConfig.from_pretrained(tmp_path)
    ours = load.load_reward_model(
        str(tmp_path), model_config, tiny.tokenizer(), tiny.train_config()
    )
    sampling_error = 4 / math.sqrt(2 * width)  # of a standard deviation, relative, four sigma
    for head, std in ((ours, (width + 1) ** -0.5), (trl, 0.02)):
        assert head.score.weight.std().item() == pytest.approx(std, rel=sampling_error)


def test_the_sft_term_of_rpo_counts_every_pair_alike():
    """RPO adds -log pi(y_w|x) / |y_w| to the loss of a pair (Pang et al. 2024, eq. 1).

    TRL 1.16 has the loss `sft` in its place, a mean over the tokens of all chosen completions of a
    micro-batch: long ones count for more, and other micro-batches have another loss.
    """
    mask = torch.arange(3) < torch.tensor([3, 1, 2, 2])[:, None]  # two chosen, two rejected
    logps = torch.tensor([[-1.0, -2, -3], [-5, 0, 0], [-1, -1, 0], [-2, -1, 0]]).double()
    expected = math.log(2) + 0.5 * ((1 + 2 + 3) / 3 + 5) / 2  # D is 0
    objective = PreferenceLoss.find("sigmoid", "sft")
    sums, lengths = (values.view(2, 2).T for values in (logps.sum(1), mask.sum(1)))  # (N, 2)
    close(objective(sums, sums, lengths, 0.1, [1.0, 0.5]).mean(), expected)

    def trl(rows: slice) -> Tensor:
        case = TrlCase(logps=logps[rows], ref_logps=logps[rows], mask=mask[rows])
        terms = {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
        return case.preference(**terms, beta=0.4)

    close(trl(slice(4)), math.log(2) + 0.5 * (1 + 2 + 3 + 5) / 4)
    close(sum(trl(slice(n, 4, 2)) for n in (0, 1)) / 2, expected)


def test_the_token_mean_does_not_depend_on_the_micro_batches():
    """A mean over the tokens of a step has the step's tokens below the line (DAPO, eq. 8).

    TRL's `bnpo` divides by each micro-batch's own tokens and then averages the micro-batches. Three
    completions of 3, 1 and 2 tokens have ratio 1: a token's loss is minus its advantage.
    """
    mask = torch.arange(3) < torch.tensor([3, 1, 2])[:, None]
    advantages = torch.tensor([[1.0], [2.0], [-4.0]]).double().expand(mask.shape)
    logps = torch.full(mask.shape, -2.0, dtype=torch.float64)
    inputs = {"logps": logps, "old_logps": logps, "mask": mask, "advantages": advantages}
    case = {"family": "policy", "inputs": {name: x.tolist() for name, x in inputs.items()}}
    token = {"this project": {"aggregate": {"aggregation": "token"}}, "TRL": {"loss_type": "bnpo"}}
    for sizes, of_trl in (
        ([1, 2], (-3 / 3 + 6 / 3) / 2),  # 3 tokens each
        ([2, 1], (-5 / 4 + 8 / 2) / 2),  # 4 and 2: 1.375, not 0.5
    ):
        cut = case | {"calls": token, "micro_batches": sizes}
        close(compute(cut, OurCase)[0], (-3 - 2 + 8) / 6)
        close(compute(cut, TrlCase)[0], of_trl)


def test_a_reward_that_applies_to_part_of_a_group():
    """GDPO normalises each reward in its group of G (Liu et al. 2026), and every one applies.

    Where a function returns None for a completion, TRL takes mean and deviation over the others;
    here it counts as their mean, so that the deviation is that of G rewards.
    """
    first, second = [0.0, 2.0, math.nan], [0.0, 1.0, 5.0]
    rewards = torch.tensor([[first], [second]])

    def normalised(deviation: float) -> Tensor:
        second_std = statistics.stdev(second)
        parts = zip((-1.0, 1.0, 0.0), (r - 2.0 for r in second), strict=True)
        sums = [a / (deviation + EPSILON) + b / (second_std + EPSILON) for a, b in parts]
        return torch.tensor([[x / (statistics.stdev(sums) + EPSILON) for x in sums]])

    config = GRPOConfig(
        output_dir="unused",
        model_name_or_path="unused",
        reward_funcs=["gold", "length"],
        advantages="gdpo",
    )
    by_function = {"first": rewards[0], "second": rewards[1]}
    everything = torch.ones(1, 3, dtype=torch.bool)
    _, gdpo = config.find_objective()
    compared = rollouts.advantage_rewards(rewards[1], by_function, everything, gdpo, config)
    summed = gdpo(compared, [1.0, 1.0])
    ours = normalise_globally(summed, everything, lambda sums: sums)
    close(ours, normalised(statistics.stdev([0.0, 1.0, 2.0])), 1e-4)
    trl = TrlCase(rewards=rewards).rollout(**trl_code.by_function([1.0, 1.0]))["advantages"]
    close(trl[None], normalised(statistics.stdev([0.0, 2.0])), 1e-4)
    assert (ours - trl).abs().max() > 0.05
