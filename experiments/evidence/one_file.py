"""The whole chain in one file: SFT, reward model, DPO, GRPO and evaluation, in plain PyTorch.

    python -m experiments.evidence.one_file        # trains the demo's chain: 12 minutes of CPU time
    python -m experiments.evidence.one_file --steps 20        # the beginning of every stage

To read from top to bottom: a Hugging Face GPT-2, one process, padded rows, and no more. It computes
what the five scripts compute: `tests/stages/test_one_file.py` compares losses, gradient norms,
accuracies, KL and every sampled token. It shares with them the embedded task, the order of its rows
and the random numbers, so that both draw the same rows and completions, and nothing else. What the
scripts add, and why, is in docs/reading.md.

Shapes: N prompts with K completions each, or the G of K that are kept, are B completions. The
longest prompt has P tokens, the longest completion C, T = P + C; V is the size of the vocabulary, D
the width of the model. Names: `ref` is the frozen reference, `rm` the reward model, `f` the flags.
"""

import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad
from transformers import GPT2Config, HfArgumentParser
from transformers import GPT2ForSequenceClassification as RewardModel
from transformers import GPT2LMHeadModel as Policy

from common import noise
from common.data import BatchOrder
from common.text import synthetic

Rows = list["Row"]
Losses = Iterator[tuple[Tensor, dict[str, float]]]  # of a step's updates, each with its metrics
STOP, PAD = 0, 1  # ids of the tokenizer's <|endoftext|> and <|pad|>
RECIPES = {  # rows, batch size, steps, peak learning rate, warmup steps, AdamW's beta 2, decay
    "sft": (20_000, 32, 500, 3e-3, 20, 0.99, 0.0),
    "reward": (12_800, 32, 360, 1e-3, 20, 0.99, 0.0),
    "dpo": (3_200, 32, 100, 1e-4, 10, 0.999, 0.0),
    "grpo": (4_000, 8, 60, 1e-4, 5, 0.999, 0.0),
}
SHAPE = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 256, "initializer_range": 0.06}


def flag(default: Any, description: str) -> Any:
    """A field of `Flags`, with its text for --help."""
    return field(default=default, metadata={"help": description})


@dataclass
class Flags:
    """The demo's chain in one file. Defaults here and above are those of assets/recipes/demo."""

    seed: int = flag(0, "of rows, weights and sampling")
    steps: int = flag(0, "of every stage, the first ones of the demo's (0: all, 12 minutes)")
    max_completion_length: int = flag(48, "tokens, stop token included")
    dpo_beta: float = flag(0.2, "by how much DPO ties the policy to the reference")
    kl_beta: float = flag(0.1, "weight of GRPO's KL to the reference")
    num_candidates: int = flag(12, "K, completions that are sampled for a prompt")
    num_generations: int = flag(8, "G, those of them that are trained on")
    rejection_temperature: float = flag(1.0, "in units of reward")
    num_iterations: int = flag(1, "updates on the completions of a step")
    normalize_globally: bool = flag(False, "normalise the kept advantages over the whole batch")
    num_prompts: int = flag(256, "held-out prompts that are completed for the evaluation")


# ---- data ----------------------------------------------------------------------------------------
@dataclass
class Row:
    """A prompt with K completions, as token ids."""

    number: int  # of the row in its data set; the noise of sampling is a function of it
    prompt: list[int]
    completions: list[list[int]]  # a person's summary; or chosen and rejected; or samples
    columns: dict[str, Any]  # the row as text


def read_rows(tokenizer: Any, f: Flags, kind: str, split: str, num_rows: int = 0) -> Rows:
    """All rows of the embedded task, or the first ones, of kind `sft`, `preference` or `prompts`.

    Prompt and completion are tokenised apart. A completion ends with the stop token, which is
    trained like its other tokens: so a model learns to stop. One of more tokens than
    `max_completion_length` is cut, and has none. Tokens of prompts are not trained.
    """
    rows = []
    for number, columns in enumerate(synthetic.make_rows(kind, split, num_rows)):
        names = [name for name in ("completion", "chosen", "rejected") if name in columns]
        completions = [[*tokenizer(columns[name]).input_ids, STOP] for name in names]
        completions = [ids[: f.max_completion_length] for ids in completions]
        rows.append(Row(number, tokenizer(columns["prompt"]).input_ids, completions, columns))
    return rows


def collate(rows: Rows) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Pad prompts on the left and completions on the right: every completion starts in column P.

    Returns a model's inputs, (B, T) each; the completions' ids, (B, C); and their mask, (B, C)
    bool, True = a token, the stop token too.
    """
    texts = [(row.prompt, ids) for row in rows for ids in row.completions]  # B
    start = max(len(prompt) for prompt, _ in texts)  # P
    input_ids = torch.full((len(texts), start + max(len(ids) for _, ids in texts)), PAD)  # (B, T)
    is_token = torch.zeros_like(input_ids)
    for i, (prompt, ids) in enumerate(texts):
        span = slice(start - len(prompt), start + len(ids))
        input_ids[i, span], is_token[i, span] = torch.tensor(prompt + ids), 1
    # GPT-2 has a vector for each position: without these numbers padding would count too
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": input_ids, "attention_mask": is_token, "position_ids": positions}
    return inputs, input_ids[:, start:], is_token[:, start:].bool()


# ---- model ---------------------------------------------------------------------------------------
def token_logps(policy: Policy, rows: Rows) -> tuple[Tensor, Tensor]:
    """Log pi(y_t | x, y_<t) in nats of the completions' tokens, (B, C), 0 at padding; the mask."""
    inputs, completion_ids, mask = collate(rows)
    # The logits of a column predict the token of the next: one column more, and not the last
    logits: Tensor = policy(**inputs, logits_to_keep=mask.shape[1] + 1).logits[:, :-1]  # (B, C, V)
    logps = logits.log_softmax(-1).gather(-1, completion_ids[:, :, None]).squeeze(-1)  # (B, C)
    return logps * mask, mask


def completion_logps(policy: Policy, rows: Rows) -> Tensor:
    """Log pi(y | x) of every completion, (B,): the sum over its tokens."""
    return token_logps(policy, rows)[0].sum(1)


def completion_rewards(model: RewardModel, rows: Rows) -> Tensor:
    """Reward of every completion, (B,), at its last token: the stop token, unless it has none."""
    inputs, _, mask = collate(rows)
    hidden = model.transformer(**inputs).last_hidden_state  # (B, T, D)
    last = mask.sum(1) - 1 - mask.shape[1]  # (B,) columns, counted from the end
    rewards: Tensor = model.score(hidden[torch.arange(len(last)), last]).squeeze(1) + model.shift
    return rewards


@torch.no_grad()
def score(function: Callable[[Any, Rows], Tensor], model: Any, rows: Rows) -> Tensor:
    """Log-probabilities or rewards of K completions of each row, (N, K) float64."""
    values = [function(model, rows[i : i + 64]) for i in range(0, len(rows), 64)]
    return torch.cat(values).double().view(len(rows), -1)


def draw(logps: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token (B,) from log-probabilities (B, V) by two uniform numbers (B, 2).

    The first chooses a block of about sqrt(V) ids, the second an id in it, each by inverting a
    cumulative distribution. One over all V ids has more boundaries at which rounding decides.
    """

    def invert(logps: Tensor, uniform: Tensor) -> Tensor:
        cumulative = logps.double().exp().cumsum(-1)
        return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:]).squeeze(-1)

    size = math.isqrt(logps.shape[1] - 1) + 1
    blocks = pad(logps, (0, -logps.shape[1] % size), value=-math.inf)
    blocks = blocks.view(len(logps), -1, size)  # (B, V / size, size)
    block = invert(blocks.logsumexp(-1), uniforms[:, 0])  # (B,)
    return block * size + invert(blocks[torch.arange(len(block)), block], uniforms[:, 1])


@torch.no_grad()
def sample(policy: Policy, rows: Rows, k: int, step: int, f: Flags) -> Rows:
    """The rows with K sampled completions; the noise depends on row, step, sample and position."""
    seed = noise.derive_seed(f.seed, "sampling", step)
    numbers = torch.tensor([[row.number] for row in rows for _ in range(k)])  # (B, 1)
    samples = torch.arange(k).repeat(len(rows))[:, None]  # (B, 1)
    inputs, drawn, _ = collate([replace(row, completions=[[]] * k) for row in rows])
    cache = None  # keys and values of the tokens before `input_ids`
    for position in range(f.max_completion_length):
        output = policy(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        uniforms = noise.uniform(seed, numbers, samples, position, torch.arange(2))  # (B, 2)
        tokens = draw(output.logits[:, -1].log_softmax(-1), uniforms)[:, None]  # (B, 1)
        drawn, cache = torch.cat([drawn, tokens], 1), output.past_key_values  # (B, position + 1)
        if (drawn == STOP).any(1).all():
            break
        inputs["input_ids"], inputs["position_ids"] = tokens, inputs["position_ids"][:, -1:] + 1
        inputs["attention_mask"] = pad(inputs["attention_mask"], (0, 1), value=1)
    texts = [ids[: (ids + [STOP]).index(STOP) + 1] for ids in drawn.tolist()]  # B
    return [replace(row, completions=texts[i * k : (i + 1) * k]) for i, row in enumerate(rows)]


def train(
    name: str, model: Any, rows: Rows, f: Flags, losses: Callable[[Rows, int], Losses]
) -> list[dict[str, float]]:
    """Make an update by every loss that a stage yields for the rows of a step; returns metrics."""
    num_rows, batch_size, num_steps, peak, warmup, beta2, decay = RECIPES[name]
    order = BatchOrder([1] * num_rows, batch_size, f.seed)  # a new permutation in each epoch
    parameters, log, began = list(model.parameters()), [], time.perf_counter()
    matrices = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay}
    biases_and_norms = {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, biases_and_norms], betas=(0.9, beta2), fused=True)
    last = min(f.steps or num_steps, num_steps)
    for step in range(last):
        share = (1 + math.cos(math.pi * (step - warmup) / (num_steps - warmup))) / 2  # of the peak
        for group in optimizer.param_groups:
            group["lr"] = peak * ((step + 1) / (warmup + 1) if step < warmup else share)
        # Behind its `yield` a stage goes on with the updated model
        for loss, metrics in losses([rows[i] for i in order.rows(step) if i is not None], step):
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # returns the norm before
            optimizer.step()
            optimizer.zero_grad()
            log.append({"loss": loss.item(), "grad_norm": norm.item(), **metrics})
        if (step + 1) % 20 == 0 or step + 1 == last:
            shown = log[-1] | {"minutes": (time.perf_counter() - began) / 60}
            print(name, step + 1, *(f" {key} {x:.3f}" for key, x in shown.items()), flush=True)
    return log


# ---- SFT -----------------------------------------------------------------------------------------
def sft(policy: Policy, rows: Rows) -> Losses:
    """Maximise the likelihood of people's summaries (Stiennon et al. 2020, section 3.1).

    loss = - sum_t m_t log pi(y_t | x, y_<t) / sum_t m_t, sums over all tokens of the step's rows
    """
    logps, mask = token_logps(policy, rows)  # (B, C)
    yield -logps.sum() / mask.sum(), {}


# ---- reward model --------------------------------------------------------------------------------
def new_reward_model(policy: Policy, seed: int) -> RewardModel:
    """A copy of the policy whose head is new: (1, D), with a variance of 1 / (D + 1)."""
    config = deepcopy(policy.config)
    config.num_labels, config.pad_token_id = 1, PAD
    model = RewardModel(config)
    model.transformer = deepcopy(policy.transformer)
    torch.manual_seed(noise.derive_seed(seed, "reward head"))
    model.score.weight.data = torch.randn(1, config.n_embd) * (config.n_embd + 1) ** -0.5
    model.shift = 0.0  # is added to all rewards; see `main`
    return model


def reward(model: RewardModel, pairs: Rows) -> Losses:
    """Learn which of two summaries people prefer (Stiennon et al. 2020, section 3.4).

    loss = - mean log sigma(r(x, y_chosen) - r(x, y_rejected))
    """
    rewards = completion_rewards(model, pairs).view(-1, 2)  # (N, 2): chosen, rejected
    margins = rewards[:, 0] - rewards[:, 1]  # (N,)
    yield -logsigmoid(margins).mean(), {"accuracy": (margins > 0).double().mean().item()}


# ---- DPO -----------------------------------------------------------------------------------------
def dpo(policy: Policy, ref: Policy, pairs: Rows, f: Flags) -> Losses:
    """Learn from pairs without a reward model and without sampling (Rafailov et al. 2023, eq. 7).

    loss = - mean log sigma(r(x, y_chosen) - r(x, y_rejected)),  r = beta log [pi(y|x) / ref(y|x)]
    """
    logps = completion_logps(policy, pairs).view(-1, 2)  # (N, 2): chosen, rejected
    ref_logps = score(completion_logps, ref, pairs)  # (N, 2)
    rewards = f.dpo_beta * (logps - ref_logps)  # (N, 2), the implicit rewards
    margins = rewards[:, 0] - rewards[:, 1]  # (N,)
    yield -logsigmoid(margins).mean(), {"accuracy": (margins > 0).double().mean().item()}


# ---- GRPO ----------------------------------------------------------------------------------------
def grpo(policy: Policy, ref: Policy, rm: RewardModel, rows: Rows, step: int, f: Flags) -> Losses:
    """Sample a group of completions for each prompt, and push up those above their group.

    A_i    = (r_i - mean_K r) / (std_K r + 1e-4)                 DeepSeekMath (2024), section 4.1.2
    rho_it = pi(y_it | x, y_i,<t) / old(y_it | x, y_i,<t)
    loss   = mean_i mean_t [- min(rho A, clip(rho, 0.8, 1.2) A) + beta KL], i of the kept     eq. 3
    KL     = ref / pi - log (ref / pi) - 1, at the sampled tokens                             eq. 4
    """
    # 1. Sample K candidates of each prompt, and score them; one that did not stop has reward -1
    sampled = sample(policy, rows, f.num_candidates, step, f)
    has_stop = torch.tensor([[ids[-1] == STOP for ids in row.completions] for row in sampled])
    rewards = score(completion_rewards, rm, sampled).where(has_stop, -1.0)  # (N, K)
    # 2. Keep G of them by statistical rejection sampling: one draw after another from those left,
    # with probabilities proportional to exp(reward / temperature). The G largest sums of reward /
    # temperature and Gumbel noise are such draws (Kool et al. 2019, section 2)
    seed = noise.derive_seed(f.seed, "selection", step)
    seeds = noise.hash_counters(seed, torch.tensor([[row.number] for row in rows]))  # (N, 1)
    salt = noise.derive_seed(0, "rejection_sample", "gumbel")
    uniforms = noise.uniform(salt, seeds, torch.arange(f.num_candidates))  # (N, K)
    perturbed = rewards / f.rejection_temperature - (-uniforms.log()).log()
    kept = perturbed.topk(f.num_generations).indices  # (N, G)
    # 3. Advantages. The baseline is the mean of all K candidates: high rewards are kept more often,
    # so the advantages of the kept tend to be positive
    std, mean = torch.std_mean(rewards, 1, keepdim=True)  # (N, 1)
    advantages = ((rewards - mean) / (std + 1e-4)).gather(1, kept)  # (N, G)
    if f.normalize_globally:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)
    advantages = advantages.float().view(-1, 1)  # (B, 1): one for all tokens of a completion
    # 4. Log-probs under the reference, and under the policy before the updates
    both = zip(sampled, kept.tolist(), strict=True)
    rows = [replace(row, completions=[row.completions[i] for i in chosen]) for row, chosen in both]
    with torch.no_grad():
        ref_logps, old_logps = (token_logps(lm, rows)[0] for lm in (ref, policy))  # (B, C)
    # 5. Updates: `train` makes one after each yield. In the first one rho is 1
    for _ in range(f.num_iterations):
        logps, mask = token_logps(policy, rows)  # (B, C)
        ratio = (logps - old_logps).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = torch.expm1(ref_logps - logps) - (ref_logps - logps)  # expm1(d) is exp(d) - 1
        loss = ((f.kl_beta * kl - gain) * mask).sum(1) / mask.sum(1)  # (B,)
        yield loss.mean(), {"kl": kl.sum(1).mean().item(), "reward": rewards.mean().item()}


# ---- evaluation ----------------------------------------------------------------------------------
def evaluate(
    lm: Policy, ref: Policy, rm: RewardModel, pairs: Rows, prompts: Rows, tokenizer: Any, f: Flags
) -> dict[str, Tensor]:
    """Outcomes of held-out pairs by two scores, and measures of one sample of each prompt."""
    logps, ref_logps = (score(completion_logps, policy, pairs) for policy in (lm, ref))  # (N, 2)
    rewards = logps if lm is ref else logps - ref_logps  # that of the reference is 0
    lengths = torch.tensor([[len(ids) for ids in row.completions] for row in pairs])  # (N, 2)
    sampled = sample(lm, prompts, 1, 0, f)
    ids = [row.completions[0] for row in sampled]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    golds = map(synthetic.gold_reward, texts, [row.columns["facts"] for row in prompts])
    return {
        "accuracy": rewards[:, 0] > rewards[:, 1],
        "by logp/token": (logps / lengths)[:, 0] > (logps / lengths)[:, 1],
        "gold reward": torch.tensor([*golds]),
        "reward": score(completion_rewards, rm, sampled),  # without the -1 of `grpo`
        "KL": score(completion_logps, lm, sampled) - score(completion_logps, ref, sampled),
        "length": torch.tensor([len(i) for i in ids]),
        "stop": torch.tensor([i[-1] == STOP for i in ids]),
    }


# ---- main ----------------------------------------------------------------------------------------
def main() -> None:
    """Train the demo's chain, and print its table: means, ± half of their 95% intervals."""
    f = Flags(**vars(HfArgumentParser(Flags, allow_abbrev=False).parse_args()))
    tokenizer = synthetic.train_tokenizer()
    kinds = ("sft", "preference", "prompts")
    summaries, pairs, prompts = (read_rows(tokenizer, f, kind, "train") for kind in kinds)
    config = GPT2Config(**SHAPE, vocab_size=len(tokenizer), bos_token_id=STOP, eos_token_id=STOP)
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})  # Huang et al. 2024
    torch.manual_seed(noise.derive_seed(f.seed, "model initialisation"))
    start = Policy(config)
    train("sft", start, summaries, f, lambda rows, _: sft(start, rows))
    rm, by_dpo, by_grpo = new_reward_model(start, f.seed), deepcopy(start), deepcopy(start)
    train("reward", rm, pairs, f, lambda rows, _: reward(rm, rows))
    # The mean reward of people's summaries becomes 0 (Huang et al. 2024)
    rm.shift = -float(score(completion_rewards, rm, summaries[:512]).mean())
    train("dpo", by_dpo, pairs, f, lambda rows, _: dpo(by_dpo, start, rows, f))
    train("grpo", by_grpo, prompts, f, lambda rows, n: grpo(by_grpo, start, rm, rows, n, f))
    pairs = read_rows(tokenizer, f, "preference", "validation")
    prompts = read_rows(tokenizer, f, "prompts", "validation", f.num_prompts)
    rewards = score(completion_rewards, rm, pairs)  # (N, 2)
    table = {"reward": {"accuracy": rewards[:, 0] > rewards[:, 1]}}
    for name, lm in {"sft": start, "dpo": by_dpo, "grpo": by_grpo}.items():
        table[name] = evaluate(lm, start, rm, pairs, prompts, tokenizer, f)
    print("\nstage ", *(f"{measure:>15}" for measure in table["sft"]))
    for name in RECIPES:
        columns = [values.double() for values in table[name].values()]
        cells = (f"{x.mean():8.3f} ±{1.96 * x.std() / len(x) ** 0.5:.3f}" for x in columns)
        print(f"{name:6}", *cells)


if __name__ == "__main__":
    main()
