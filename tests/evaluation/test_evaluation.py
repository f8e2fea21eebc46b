"""Claim: evaluation scores every row once, in order, whatever the batches and ranks.

Targets: plain loops over single rows. Reward models used as reward functions give the rewards of
the reward model itself, of the policy's ids where vocabularies agree and of the text where not.
About `common.evaluation.accuracy`, `common.evaluation.pair_scores` and
`common.evaluation.scoring`.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from common import distributed
from common.batch import padded_batch
from common.checkpoint import export
from common.data import PromptGroup
from common.errors import UserError
from common.evaluation import pair_scores, runs, scoring
from common.forward import Policy, RewardModel
from common.model import fsdp
from common.record.metrics import Accumulator
from common.rewards.models import RewardModelFunction
from common.rewards.score import short_names
from common.sampling.sampler import Rollouts
from common.text import synthetic
from common.text.example import Example

pytestmark = pytest.mark.usefixtures("process_group")

PAD = 1
PAIRS = tiny.ragged_examples([(9, 4, 2), (1, 1, 7), (14, 3, 3), (4, 8, 1), (6, 2, 5), (3, 5, 4)])
PAIRS.append(replace(PAIRS[0], completions=[PAIRS[3].completions[0], PAIRS[0].completions[1]]))
# 7: a prime, so that no batch size divides it; two of a prompt share a completion


@pytest.fixture(scope="module", params=["policy", "reward_model"])
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "policy":
        return Policy(tiny.causal_lm("gpt2"))
    return RewardModel(tiny.classifier("llama"))


@torch.no_grad()
def plain_scores(model: Any, examples: list[Example]) -> Tensor:
    """Scores (N, K), one unpadded row at a time."""
    scores = []
    for example in examples:
        for ids in example.completions:
            batch = padded_batch([example.prompt_ids], [[ids]], PAD).to(distributed.device())
            output = model(batch)
            scores.append(output.token_logps.sum() if isinstance(model, Policy) else output[0])
    return torch.stack(scores).view(len(examples), -1).double().cpu()


def score(model: Any, examples: list[Example], micro_batch_size: int = 4, **fields: Any) -> Tensor:
    config = tiny.train_config(micro_batch_size=micro_batch_size, **fields)
    return scoring.score_examples(model, examples, config, tiny.vocabulary(), "scoring")


# ---- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
@pytest.mark.parametrize(
    ("micro_batch_size", "micro_batch_tokens"), [(1, 4096), (3, 4096), (7, 40), (64, 4096), (64, 1)]
)
@pytest.mark.parametrize("num_completions", [1, 2])
def test_scores_are_those_of_a_plain_loop_in_order(
    model, micro_batch_size, micro_batch_tokens, num_completions, layout
):
    examples = [
        Example(e.row, e.prompt, e.prompt_ids, e.completions[:num_completions], {}) for e in PAIRS
    ]
    limits = {"micro_batch_tokens": micro_batch_tokens, "layout": layout}
    scores = score(model, examples, micro_batch_size, **limits)
    assert scores.shape == (7, num_completions)
    assert scores.dtype == torch.float64
    assert not scores.requires_grad
    torch.testing.assert_close(scores, plain_scores(model, examples), rtol=0, atol=1e-4)


@pytest.mark.parametrize("world_size", [2, 3, 16])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_ranks_score_each_row_once(model, monkeypatch, world_size, micro_batch_size):
    """Each rank's part before the sum: disjoint rows that add up, in as many forward passes."""
    parts, num_forwards, own_packs = [], [], []
    handle = model.register_forward_pre_hook(lambda *_: num_forwards.append(len(parts)))
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda tensor: tensor)
    most = 1

    def largest(tensor: Tensor) -> Tensor:
        own_packs.append(int(tensor))
        return torch.tensor(most)

    monkeypatch.setattr(distributed, "all_reduce_max", largest)
    for is_rehearsal in (True, False):  # in which every rank says how many packs it needs
        parts, num_forwards = [], []
        for rank in range(world_size):
            monkeypatch.setattr(distributed, "rank", lambda r=rank: r)
            parts.append(score(model, PAIRS, micro_batch_size))
        most = max(own_packs)
        if is_rehearsal:
            assert [num_forwards.count(rank) for rank in range(world_size)] == [
                max(1, n) for n in own_packs
            ]
    handle.remove()
    scored = torch.stack([(part != 0).sum(-1) for part in parts])  # (ranks, N) completions scored
    assert (scored.sum(0) == 2).all()
    assert num_forwards.count(0) == most
    assert len({num_forwards.count(rank) for rank in range(world_size)}) == 1
    torch.testing.assert_close(sum(parts), plain_scores(model, PAIRS), rtol=0, atol=1e-4)


def test_scoring_leaves_a_policy_sharded():
    config = tiny.train_config(bf16=True)
    policy = tiny.shard_with_fsdp(Policy(tiny.causal_lm("gpt2")), config, distributed.mesh())
    score(policy, PAIRS)
    assert all(isinstance(p, DTensor) for p in policy.parameters())
    assert not any(p.grad is not None for p in policy.parameters())


def test_sft_loss_is_the_mean_over_tokens_not_over_rows():
    policy = Policy(tiny.causal_lm("qwen2"))
    examples = [Example(e.row, "", e.prompt_ids, e.completions[:1], {}) for e in PAIRS]
    logps = plain_scores(policy, examples)[:, 0]
    lengths = torch.tensor([len(e.completions[0]) for e in examples])
    loss = scoring.mean_sft_loss(policy, examples, tiny.train_config(), tiny.vocabulary())
    assert loss == pytest.approx(float(-logps.sum() / lengths.sum()), abs=1e-5)
    assert abs(loss - float((-logps / lengths).mean())) > 1e-2


# ---- preferences ---------------------------------------------------------------------------------


def test_held_out_metrics_by_hand():
    """A loss and a tie, which counts one half."""
    scores, losses = torch.tensor([[1.0, 3.5], [2.0, 2.0]]), torch.tensor([0.25, 0.5])
    metrics = pair_scores.held_out_metrics(scores, losses)
    assert metrics["eval_accuracy"] == 0.25
    assert metrics["eval_reward_margin"] == -1.25
    assert metrics["eval_loss"] == 0.375


def test_pair_metrics_by_hand():
    """Two wins, a tie, a loss; a row of filler counts nowhere."""
    rewards = torch.tensor([[3.0, 1.0], [2.0, 2.0], [0.0, 4.0], [1.0, -1.0], [99.0, -99.0]])
    real = torch.tensor([True, True, True, True, False])
    metrics = Accumulator(torch.device("cpu"))
    pair_scores.add_pair_metrics(metrics, rewards.requires_grad_(), real)
    assert metrics.reduce() == pytest.approx(
        {
            "chosen_reward": 6 / 4,
            "rejected_reward": 6 / 4,
            "reward_margin": 0.0,
            "accuracy": 2.5 / 4,
        }
    )


def test_the_pair_table_shows_both_texts_and_scores():
    tokenizer = tiny.tokenizer()
    words = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" a key", " a dog")
    ]
    pairs = [Example(i, f"prompt {i}", [5], [[*ids, 0] for ids in words], {}) for i in range(3)]
    scores = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    config = tiny.train_config(num_sample_prompts=2)
    table = pair_scores.pair_table(pairs, scores, tiny.vocabulary(), config)
    assert len(table) == 2
    assert table[1] == {
        "prompt": "prompt 1",
        "chosen": " a key",
        "rejected": " a dog",
        "chosen score": 3.0,
        "rejected score": 4.0,
    }


def test_a_run_s_cost_is_read_from_its_metrics(tmp_path):
    assert runs.run_cost(tmp_path) == {}
    records = [
        {"step": 1, "loss": 2.0, "elapsed_minutes": 0.5, "peak_memory_gb": 1.0},
        {"step": 2, "elapsed_minutes": 1.5, "peak_memory_gb": 2.0},
        {"step": 2, "eval_loss": 2.0},
    ]
    tiny.write_rows(tmp_path / "metrics.jsonl", records)
    assert runs.run_cost(tmp_path) == {"elapsed_minutes": 1.5, "peak_memory_gb": 2.0}
    assert runs.folder_of_run("a/sft/model") == (Path("a/sft"), math.inf)
    found = runs.folder_of_run("a/sft/checkpoints/step_00000012/model")
    assert found == (Path("a/sft"), 12)
    assert runs.run_cost(tmp_path, 1) == {"elapsed_minutes": 0.5, "peak_memory_gb": 1.0}


# ---- reward models as reward functions -----------------------------------------------------------

STOP = 0


def text_example(row: int, prompt: str, **columns: Any) -> Example:
    ids = tiny.tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    return Example(row, prompt, ids, [], columns)


PROMPTS = [text_example(0, "my key is lost\n\nTL;DR:"), text_example(1, "a dog\n\nTL;DR:")]
TEXTS = [" lost the key", " key", " the dog is lost", " dog"]
HAS_STOP = [True, False, True, True]
ENCODED = tiny.tokenizer()(TEXTS, add_special_tokens=False)["input_ids"]
IDS = [ids + [STOP] * stop for ids, stop in zip(ENCODED, HAS_STOP, strict=True)]
ROLLOUTS = Rollouts.of(IDS, [[0.0] * len(ids) for ids in IDS], HAS_STOP)  # two for each prompt


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the policy's tokenizer, and a shift."""
    lm = tiny.classifier("llama", vocab_size=300, pad_id=PAD)
    config = tiny.train_config()
    model = fsdp.shard(RewardModel(lm), config, distributed.mesh())
    folder = tmp_path_factory.mktemp("run") / "model"
    export.save_pretrained(model, tiny.vocabulary(), folder, reward_shift=0.75)
    return folder


def loaded_function(folder: Path, policy_tokenizer: Any, **fields: Any) -> RewardModelFunction:
    lengths = {"max_prompt_length": 40, "max_completion_length": 20, "micro_batch_size": 3}
    config = tiny.train_config(**(lengths | fields))
    function = RewardModelFunction(str(folder), policy_tokenizer, config)
    function.load(distributed.mesh())
    return function


def plain_rewards(prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
    """Rewards (B,) by transformers' classifier on single rows, and the shift of `reward_folder`."""
    lm = tiny.classifier("llama", vocab_size=300, pad_id=PAD)
    rewards = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        ids = torch.tensor([prompt + completion], device=distributed.device())
        with torch.no_grad():
            rewards.append(float(lm(ids).logits[0, 0]) + 0.75)
    return rewards


@pytest.mark.parametrize("layout", ["shared_prefix", "padded"])
@pytest.mark.parametrize(
    ("micro_batch_size", "micro_batch_tokens"), [(64, 4096), (3, 4096), (64, 25)]
)
def test_a_reward_model_scores_the_policy_s_ids(
    reward_folder, layout, micro_batch_size, micro_batch_tokens
):
    """Also ids that the tokenizer would not give for their text."""
    key = ROLLOUTS.completion_ids[0]
    letters = [tiny.tokenizer().convert_tokens_to_ids(c) for c in "Ġlost"]
    assert letters != tiny.tokenizer()(" lost")["input_ids"]
    ids = [key, letters, [*letters, STOP], key[:1]]
    prompt_ids = [PROMPTS[i].prompt_ids for i in (1, 0, 0, 0)]  # the longer last, scored first
    fields = {"layout": layout, "micro_batch_tokens": micro_batch_tokens}
    fields |= {"micro_batch_size": micro_batch_size}
    function = loaded_function(reward_folder, tiny.tokenizer(), **fields)
    assert function.same_ids
    found = function(["?"] * 4, ["?"] * 4, ids, prompt_ids=prompt_ids, has_stop=[True] * 4)
    assert found == pytest.approx(plain_rewards(prompt_ids, ids), abs=1e-5)
    assert len({round(reward, 3) for reward in found}) == 4


def test_a_reward_model_with_another_vocabulary_reads_the_text(reward_folder):
    """The policy's ids mean nothing to it; a completion that stopped ends in its own eos."""
    other = synthetic.train_tokenizer(400)
    function = loaded_function(reward_folder, other)
    assert not function.same_ids
    prompts = [PROMPTS[i].prompt for i in (0, 0, 1, 1)]
    nonsense = [[399]] * 4
    found = function(prompts, TEXTS, nonsense, prompt_ids=nonsense, has_stop=HAS_STOP)
    prompt_ids = [PROMPTS[i].prompt_ids for i in (0, 0, 1, 1)]
    assert found == pytest.approx(plain_rewards(prompt_ids, IDS), abs=1e-5)


def test_a_text_beyond_the_positions_of_the_judge_is_refused(reward_folder):
    """What was cut to fit the policy may be more tokens of another vocabulary."""
    function = loaded_function(reward_folder, synthetic.train_tokenizer(400))
    limit = function.model_config.max_position_embeddings
    prompt = [1] * (limit - 2)
    assert len(function.rewards([PromptGroup(prompt, [[1, 2]], [0])])) == 1
    with pytest.raises(UserError, match=f"is {limit + 1} tokens .* has {limit} positions"):
        function.rewards([PromptGroup(prompt, [[1], [1, 2, 3]], [0, 1])])
    too_long = [" ?" * limit]
    with pytest.raises(UserError, match="positions"):
        function(too_long, [" a"], [[1]], prompt_ids=[[1]], has_stop=[True])


def test_a_pad_token_of_its_own_does_not_make_another_vocabulary(reward_folder):
    backend = tiny.tokenizer().backend_tokenizer
    policy_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    config = tiny.train_config(max_prompt_length=40, max_completion_length=20)
    assert RewardModelFunction(str(reward_folder), policy_tokenizer, config).same_ids


def test_a_scorer_sums_weighted_functions_prompt_by_prompt(reward_folder, tmp_path):
    """Each completion meets its own prompt's columns; nan where a function says None."""
    (tmp_path / "judge.py").write_text(
        "def judge(prompts, completions, completion_ids, bonus, **columns):\n"
        "    rows = zip(prompts, completions, completion_ids, bonus, columns['has_stop'])\n"
        "    return [None if b is None else b + 10 * p.count('dog') + len(c) + 100 * len(i)\n"
        "            + 1000 * s for p, c, i, b, s in rows]\n"
    )
    judge = f"{tmp_path / 'judge.py'}:judge"
    names, lengths = [str(reward_folder), judge], {"max_prompt_length": 40}
    scorer = tiny.reward_functions(names, [2.0, -0.5], max_completion_length=20, **lengths)
    assert list(scorer.reward_models) == [str(reward_folder)]
    scorer.load(distributed.mesh())
    examples = [
        text_example(0, PROMPTS[0].prompt, bonus=0.25),
        text_example(1, PROMPTS[1].prompt, bonus=None),
    ]
    scored = scorer.score(examples, ROLLOUTS)
    total, by_function = scored.total, scored.by_function

    model_name = reward_folder.parent.name
    assert list(scorer.short_names.values()) == list(by_function) == [model_name, "judge"]
    prompt_ids = [PROMPTS[i].prompt_ids for i in (0, 0, 1, 1)]
    rewards = torch.tensor(plain_rewards(prompt_ids, ROLLOUTS.completion_ids)).view(2, 2)
    torch.testing.assert_close(by_function[model_name], rewards, rtol=0, atol=1e-5)
    ids = ROLLOUTS.completion_ids
    judged = [
        0.25 + len(TEXTS[0]) + 100 * len(ids[0]) + 1000,
        0.25 + len(TEXTS[1]) + 100 * len(ids[1]),
    ]
    expected = torch.tensor([judged, [math.nan, math.nan]])
    torch.testing.assert_close(by_function["judge"], expected, equal_nan=True)
    weighted = 2 * rewards - 0.5 * expected.nan_to_num(0.0)
    torch.testing.assert_close(total, weighted, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "expected",
    [
        {"gold": "gold", "output/sft/model": "sft", "rewards/length.py:short": "short"},
        {"output/sft/model/": "sft", "org/name": "name", "model": "model", "/dpo": "dpo"},
        {"seed_0/dpo/model": "seed_0/dpo", "seed_1/dpo/model": "seed_1/dpo", "gold": "gold"},
        {"a.py:length": "a.py:length", "b.py:length": "b.py:length", "output/dpo": "output/dpo"},
        {"dpo": "dpo", "dpo/model": "dpo/model"},
        {"my.py:length": "length"},
        {"gold": "gold", "runs/gold/model": "runs/gold"},
        {},
    ],
)
def test_names_in_tables_are_as_short_as_tells_them_apart(expected):
    assert short_names([*expected, *expected]) == expected
    checkpoint = "a/sft/checkpoints/step_00000120/model"
    assert short_names([checkpoint, "a/sft/model"])[checkpoint] == "sft step 120"
