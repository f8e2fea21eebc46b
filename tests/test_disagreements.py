"""Where this repository and TRL 1.16 give different numbers on the same inputs, and why.

One test per disagreement. Each says what TRL does, what the paper says, and shows both numbers:
TRL's from TRL's own code (see `trl_code`), ours equal to the formula worked out in the test without
either. A test that fails here after an update of TRL means that TRL has changed its mind: then the
case moves to test_against_trl.py.
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

from common import losses
from common.advantages import (
    EPSILON,
    group_advantages,
    normalise_globally,
)
from common.config.grpo import GRPOConfig
from common.forward import Policy, RewardModel
from common.grpo import rollouts
from common.model import load
from common.objectives.kinds import PolicyObjective, PreferenceLoss
from common.padding import padded_batch


def close(value: Any, expected: Any, tolerance: float = 1e-6) -> None:
    value = torch.as_tensor(value, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


# ---- models --------------------------------------------------------------------------------------


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


# ---- preference losses ---------------------------------------------------------------------------

# One pair: the chosen completion has two tokens, the rejected one; log pi and log ref of each.
PAIR_MASK = torch.tensor([[True, True], [True, False]])
PAIR_LOGPS = torch.tensor([[-1.0, -2.0], [-4.0, 0.0]], dtype=torch.float64)
PAIR_REF = torch.tensor([[-1.5, -3.0], [-3.0, 0.0]], dtype=torch.float64)
# Log-ratios of the completions: (-3) - (-4.5), (-4) - (-3); their gap D = 2.5
PAIR_LENGTHS = {"chosen_lengths": torch.tensor([2]), "rejected_lengths": torch.tensor([1])}
BETA = 0.4  # beta D = 1


def ours_of_the_pair(**options: Any) -> Tensor:
    sums = [losses.masked_sum(logps, PAIR_MASK, dim=1) for logps in (PAIR_LOGPS, PAIR_REF)]
    pairs = [half for both in sums for half in both.chunk(2)]
    return losses.preference_loss(*pairs, beta=BETA, **options)


def trl_of_the_pair(**settings: Any) -> Tensor:
    return trl_code.dpo_loss(PAIR_LOGPS, PAIR_REF, PAIR_MASK, beta=BETA, **settings)


def test_ipo_sums_over_tokens():
    """IPO regresses log(pi_w / pi_l) - log(ref_w / ref_l) onto 1 / (2 tau) (Azar et al. 2023).

    In eq. 17 these are probabilities of whole completions, so log-probabilities are summed. TRL
    divides each completion's by its length: `ipo_mean` here.
    """
    close(ours_of_the_pair(loss_type="ipo"), [(1.5 + 1.0 - 1 / 0.8) ** 2])
    per_token = (1.5 / 2 + 1.0 - 1 / 0.8) ** 2
    close(trl_of_the_pair(loss_types=["ipo"]), per_token)
    close(ours_of_the_pair(loss_type="ipo_mean", **PAIR_LENGTHS), [per_token])


@pytest.mark.parametrize(
    ("loss_type", "z"), [("sigmoid", 1.0), ("sigmoid_norm", BETA * (1.5 / 2 + 1.0))]
)
def test_sigmoid_and_sigmoid_norm_have_label_smoothing(loss_type: str, z: float):
    """Conservative DPO: -(1 - e) log sigma(z) - e log sigma(-z) (Mitchell 2023), z = beta D.

    Of `sigmoid_norm` log-probabilities are divided by the lengths (Tülu 3, eq. 6). TRL ignores
    `label_smoothing` without a word and trains the plain loss.
    """
    probability = 1 / (1 + math.exp(-z))
    smoothed = -0.8 * math.log(probability) - 0.2 * math.log(1 - probability)
    close(ours_of_the_pair(loss_type=loss_type, label_smoothing=0.2, **PAIR_LENGTHS), [smoothed])
    trl = trl_of_the_pair(loss_types=[loss_type], label_smoothing=0.2)
    close(trl, -math.log(probability))
    close(ours_of_the_pair(loss_type=loss_type, **PAIR_LENGTHS), [-math.log(probability)])


def test_the_sft_term_of_rpo_counts_every_pair_alike():
    """RPO adds -log pi(y_w|x) / |y_w| to the loss of a pair (Pang et al. 2024, eq. 1).

    TRL 1.16 has the loss `sft` in its place, a mean over the tokens of all chosen completions of a
    micro-batch: long ones count for more, and other micro-batches have another loss.
    """
    mask = torch.arange(3) < torch.tensor([3, 1, 2, 2])[:, None]  # two chosen, two rejected
    logps = torch.tensor([[-1.0, -2, -3], [-5, 0, 0], [-1, -1, 0], [-2, -1, 0]]).double()
    expected = math.log(2) + 0.5 * ((1 + 2 + 3) / 3 + 5) / 2  # D is 0
    objective = PreferenceLoss.find(["sigmoid", "sft"], beta=0.1)
    sums, lengths = (values.view(2, 2).T for values in (logps.sum(1), mask.sum(1)))  # (N, 2)
    close(objective(sums, sums, lengths, [1.0, 0.5]).mean(), expected)

    settings = {"beta": BETA, "loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    both = trl_code.dpo_loss(logps, logps, mask, **settings)
    close(both, math.log(2) + 0.5 * (1 + 2 + 3 + 5) / 4)
    alone = [trl_code.dpo_loss(logps[n::2], logps[n::2], mask[n::2], **settings) for n in (0, 1)]
    close(sum(alone) / 2, expected)


# ---- policy losses -------------------------------------------------------------------------------

# Three completions of 3, 1 and 2 tokens with ratio 1: a token's loss is minus its advantage.
MASK = torch.arange(3) < torch.tensor([3, 1, 2])[:, None]
ADVANTAGES = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
MICRO_BATCHES = (slice(0, 1), slice(1, 3))  # 3 tokens each: sums -3 and -2 + 8
UNEVEN = (slice(0, 2), slice(2, 3))  # 4 and 2 tokens: sums -3 - 2 and 8


LOGPS = torch.full(MASK.shape, -2.0, dtype=torch.float64)


def trl_parts(cut: tuple[slice, ...], inputs: dict[str, Tensor], **settings: Any) -> list:
    """TRL's loss of every part of the three completions."""
    trainers = [trl_code.grpo_trainer(LOGPS[part], **settings) for part in cut]
    return [
        trl_code.grpo_loss(stand_in, ADVANTAGES[part], MASK[part], **inputs).item()
        for stand_in, part in zip(trainers, cut, strict=True)
    ]


def our_parts(cut: tuple[slice, ...], **denominators: Any) -> list:
    """Our loss `token` of every part."""
    per_token = losses.policy_loss(LOGPS, LOGPS, ADVANTAGES, MASK)
    options = {"aggregation": "token"} | denominators
    return [losses.aggregate(per_token[part], MASK[part], **options).item() for part in cut]


def test_the_token_mean_does_not_depend_on_the_micro_batches():
    """A mean over the tokens of a step has the step's tokens below the line (DAPO, eq. 8).

    TRL's `bnpo` divides by each micro-batch's own tokens and then averages the micro-batches.
    """
    mean = (-3 - 2 + 8) / 6
    for cut in (MICRO_BATCHES, UNEVEN):
        close(sum(our_parts(cut, num_tokens=MASK.sum())), mean)
    settings = {"loss_type": "bnpo", "current_gradient_accumulation_steps": 2}
    close(sum(trl_parts(MICRO_BATCHES, {}, **settings)), (-3 / 3 + 6 / 3) / 2)
    close(sum(trl_parts(UNEVEN, {}, **settings)), (-5 / 4 + 8 / 2) / 2)  # 1.375, not 0.5


def test_each_of_several_steps_per_rollout_has_its_own_token_mean():
    """DAPO eq. 8 divides by the tokens of the completions that are being optimised.

    TRL's `dapo` divides each of several steps by their average number of tokens. Here: two steps,
    of 4 tokens and of 2, in the place of 3 and 3.
    """
    close(our_parts(UNEVEN), [-5 / 4, 8 / 2])
    settings = {"loss_type": "dapo", "args": {"steps_per_generation": 2}}
    close(trl_parts(UNEVEN, {"num_items_in_batch": MASK.sum()}, **settings), [-5 / 3, 8 / 3])


def test_cispo_bounds_the_ratio_at_one_plus_epsilon_high():
    """-sg(min(rho, 1 + epsilon_high)) A log pi (MiniMax-M1 2025, eq. 4-5).

    TRL's `cispo` takes `epsilon_high` for the bound itself.
    """
    ratios, log_pi = torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64), -2.0
    logps = torch.full_like(ratios, log_pi)
    old, advantages, mask = logps - ratios.log(), torch.tensor([3.0]).double(), MASK[:1]
    objective = PolicyObjective.find(["cispo"], epsilon_high=0.28)
    ours, _ = objective(logps, old, old, advantages, mask)
    close(ours, [[-0.5 * 3 * log_pi, -1.0 * 3 * log_pi, -1.28 * 3 * log_pi]])
    stand_in = trl_code.grpo_trainer(logps, loss_type="cispo", epsilon_high=0.28)
    trl = trl_code.grpo_loss(stand_in, advantages, mask, old_per_token_logps=old)
    close(trl, -0.28 * 3 * log_pi)  # the mean over three equal tokens


# ---- advantages ----------------------------------------------------------------------------------


def test_a_group_of_equal_rewards_has_no_advantage():
    """Equal rewards say nothing: r - mean(r) = 0 for all (DeepSeekMath, section 4.1.2).

    TRL takes the mean in float32, which rounds, and divides the error by a deviation of its size.
    """
    rewards = torch.full((1, 7), 1000.1)
    trl = trl_code.advantages(rewards)
    assert trl.abs().min() > 0.05
    assert (trl.sign() == trl.sign()[0, 0]).all()
    assert (group_advantages(rewards) == 0).all()


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
    objectives = rollouts.objective_rewards(rewards[1], by_function, everything, config)
    summed = config.advantage_function(objectives, [1.0, 1.0])
    ours = normalise_globally(summed, everything, lambda sums: sums)
    close(ours, normalised(statistics.stdev([0.0, 1.0, 2.0])), 1e-4)
    settings = trl_code.by_function(rewards, [1.0, 1.0])
    trl = trl_code.advantages(rewards[1], **settings)
    close(trl, normalised(statistics.stdev([0.0, 2.0])), 1e-4)
    assert (ours - trl).abs().max() > 0.05
