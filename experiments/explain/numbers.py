"""From the trace of a step to the numbers of its page, ready for JSON, in full precision.

What a function of the script returned is taken as it is. Only what no function returns is computed
here, from what was traced: a mean and a standard deviation, sigmoids, sums and differences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import data
from common.batch import MAKERS, AnyBatch, PaddedBatch
from common.errors import UserError
from common.losses import kl_estimate
from common.text.example import Vocabulary
from experiments.explain.trace import Trace, scores_of

Record = dict[str, Any]


def explain(
    trace: Trace, config: Any, stage: str, yours: Mapping[str, str] | None = None
) -> Record:
    """The layouts, and the numbers by level: prompts, completions with tokens, pairs, step.

    `yours` has the names of a user's functions by their flags.
    """
    vocabulary = trace.of("load_vocabulary")[0].result
    numbers_of = {"sft": sft, "reward": reward, "dpo": dpo, "grpo": grpo}[stage]
    result: Record = {"prompts": [], "pairs": [], **numbers_of(trace, config, yours or {})}
    if plans := trace.of("plan_updates"):
        denominator = float(plans[-1].result[0].denominators.num_sequences)
    else:
        denominator = float(trace.of("count_all", "main")[-1].result)
    call, most = trace.of("clip_and_step")[-1], config.max_grad_norm
    norm = float(call.result["grad_norm"])
    result["step"] = {
        "denominator": denominator,
        "loss": float(call.arguments["losses"].sum()),
        "grad_norm": norm,
        "clip_factor": min(1.0, most / (norm + 1e-6)) if most > 0 else 1.0,
        "learning_rate": call.result["learning_rate"],
    }
    groups = [groups_of(trace, batch) for batch in trace.batches]
    result["layouts"] = {}
    for name in MAKERS:
        as_laid_out = replace(config, layout=name)
        batches = [data.collate(each, as_laid_out, vocabulary.pad_id) for each in groups]
        result["layouts"][name] = [layout(batch, vocabulary) for batch in batches]
    ids = {i for views in result["layouts"].values() for view in views for i in view["ids"]}
    ids |= {i for one in result["completions"] for i in one["ids"]}
    result["texts"] = {str(i): vocabulary.tokenizer.decode([i]) for i in sorted(ids)}
    return result


def groups_of(trace: Trace, batch: AnyBatch) -> Any:
    """The prompts with their completions, PromptGroups, that a micro-batch was made of."""
    same = (c for c in trace.of("collate") if torch.equal(c.result.input_ids, batch.input_ids))
    return next(same).arguments["groups"]


def layout(batch: AnyBatch, vocabulary: Vocabulary) -> Record:
    """Ids and positions of a batch, flattened; a letter for the kind of each, - for padding."""
    ids, mask = batch.input_ids.numpy(), batch.completion_mask.numpy()
    kinds = np.full(ids.shape, "p")
    if isinstance(batch, PaddedBatch):
        kinds[~batch.attention_mask.numpy()] = "-"
        kinds[:, -mask.shape[1] :][mask] = "c"
    else:
        for last, length in zip(batch.last.tolist(), mask.sum(1), strict=True):
            kinds[0, last + 1 - length : last + 1] = "c"
    kinds[(kinds == "c") & np.isin(ids, vocabulary.stop_ids)] = "s"
    flat = {"ids": ids.flatten().tolist(), "positions": batch.position_ids.flatten().tolist()}
    return {"shape": [*ids.shape], **flat, "kinds": "".join(kinds.flat)}


# ---- records -------------------------------------------------------------------------------------


def records(columns: Mapping[str, Any]) -> list[Record]:
    """One record for each row of tensors or lists of the same length."""
    values = [v.tolist() if isinstance(v, Tensor) else v for v in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def by_completion(trace: Trace, values: Sequence[Tensor]) -> list[list[Any]]:
    """Values (B, C) of each micro-batch as the lists of each completion's tokens."""
    return [
        row[mask].tolist()
        for each, batch in zip(values, trace.batches, strict=True)
        for row, mask in zip(each.detach(), batch.completion_mask, strict=True)
    ]


def completions(trace: Trace, tokens: Mapping[str, Any], **columns: Any) -> list[Record]:
    """The completions that were trained on, with values (B,) of each, and (B, C) of its tokens."""
    batches = trace.batches
    owners = [g for b in batches for g in groups_of(trace, b) for _ in g.completions]
    lists = {name: by_completion(trace, values) for name, values in tokens.items()}
    about = {
        "slot": torch.cat([batch.slots for batch in batches]),
        "row": [group.row for group in owners],
        "prompt_ids": [group.prompt_ids for group in owners],
        "ids": by_completion(trace, [batch.completion_ids for batch in batches]),
        "tokens": records(lists) if lists else [{} for _ in owners],
    }
    return records(about | columns)


def movement(trace: Trace) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Changes of log-probs in the step: of tokens (B, C), and of completions (B,)."""
    before = [scores_of(call.result).detach().double() for call in trace.forwards]
    after = trace.after
    change = [later - earlier for earlier, later in zip(before, after, strict=True)]
    sums = [torch.cat([each.double().sum(1) for each in logps]) for logps in (before, after)]
    completion = {"completion_logp": sums[0], "completion_logp_after": sums[1]}
    completion["factor"] = (sums[1] - sums[0]).exp()
    return {"logp": before, "logp_after": after, "change": change}, completion


# ---- by stage ------------------------------------------------------------------------------------


def sft(trace: Trace, config: Any, yours: Mapping[str, str]) -> Record:
    """Losses of tokens."""
    tokens, columns = movement(trace)
    tokens["token_loss"] = [-logps for logps in tokens["logp"]]
    results = completions(trace, tokens, **columns)
    for one in results:
        one |= {"label": f"row {one['row'] + 1}", "moved_as_wanted": one["factor"] > 1}
    return {"completions": results}


def with_pairs(results: list[Record], pairs: Mapping[str, Tensor]) -> Record:
    """The record of completions in pairs, chosen first, and of the pairs."""
    for k, one in enumerate(results):
        one["label"] = f"row {one['row'] + 1}, {('chosen', 'rejected')[k % 2]}"
    rows = [chosen["row"] for chosen in results[::2]]
    return {"completions": results, "pairs": records({"row": rows, **pairs})}


def reward(trace: Trace, config: Any, yours: Mapping[str, str]) -> Record:
    """Scores of completions, and differences and losses of pairs."""
    calls, penalties = trace.of("bradley_terry_loss"), trace.of("centering_penalty")
    chosen, rejected, margin = (
        torch.cat([call.arguments[name].detach() for call in calls])
        for name in ("chosen_rewards", "rejected_rewards", "margin")
    )
    scores, after = torch.stack([chosen, rejected], 1), torch.cat(trace.after).view(-1, 2)
    logits, difference_after = chosen - rejected - margin, after[:, 0] - after[:, 1]
    pairs = {
        "difference": chosen - rejected,
        "margin": margin,
        "probability": logits.sigmoid(),
        "gradient_weight": (-logits).sigmoid(),
        "pair_loss": torch.cat([call.result for call in calls]),
        "penalty": torch.cat([call.result for call in penalties]),
        "difference_after": difference_after,
        "moved_as_wanted": difference_after > chosen - rejected,
    }
    results = completions(trace, {}, reward=scores.flatten(), reward_after=after.flatten())
    return with_pairs(results, pairs)


def dpo(trace: Trace, config: Any, yours: Mapping[str, str]) -> Record:
    """Sums of completions, and D and losses of pairs."""
    tokens, columns = movement(trace)
    sums = torch.cat([call.result.detach() for call in trace.of("sequence_scores", "main")])  # (B,)
    refs = torch.cat([call.result for call in trace.of("of_batch")]).flatten()  # (B,)
    losses = trace.of(yours.get("loss_type", "sigmoid"))  # checks before the step call it too
    logits, logits_after = (
        (logps - refs)[::2] - (logps - refs)[1::2]
        for logps in (sums, columns["completion_logp_after"])
    )
    pairs = {
        "logit": logits,
        "pair_loss": torch.cat([call.result for call in losses[-len(trace.forwards) :]]),
        "logit_after": logits_after,
        "moved_as_wanted": logits_after > logits,
    }
    if "loss_type" not in yours:
        pairs["probability"] = (config.beta * logits).sigmoid()
        pairs["gradient_weight"] = config.beta * (-config.beta * logits).sigmoid()
    results = completions(trace, tokens, **columns, sum_logp=sums, sum_ref_logp=refs)
    return with_pairs(results, pairs)


def grpo(trace: Trace, config: Any, yours: Mapping[str, str]) -> Record:
    """Candidates, who was kept, advantages, and the kept ones' tokens on their way to the loss."""
    tokens, columns = movement(trace)
    first = -len(trace.forwards)  # before it, the objective was called on a tiny batch
    results = [call.result for call in trace.of(yours.get("policy_objective", "clip"))[first:]]
    tokens |= {
        "policy_term": [each[0] if isinstance(each, tuple) else each for each in results],
        "token_loss": [call.arguments["per_token"] for call in trace.of("aggregate")],
    }
    if "policy_objective" not in yours:
        ratios = trace.of("probability_ratio", "clip")[first:]
        tokens["ratio"] = [call.result for call in ratios]
        tokens["clipped"] = [call.result for call in trace.of("clipped_tokens")[first:]]
    if kls := trace.of("kl_estimate", "grpo_loss"):
        tokens["ref_logp"] = [call.arguments["ref_token_logps"] for call in kls]
        tokens["kl"] = [call.result for call in kls]
        pairs = zip(trace.after, tokens["ref_logp"], strict=True)
        tokens["kl_after"] = [kl_estimate(*p, estimator=config.kl_estimator) for p in pairs]
    losses = by_completion(trace, tokens["token_loss"])
    columns["mean_loss"] = torch.tensor([sum(each) / max(1, len(each)) for each in losses])
    trained = {one["slot"]: one for one in completions(trace, tokens, **columns)}
    selected, results = trace.of("select")[-1].result, candidates(trace, config)
    advantages = trace.of("compute_advantages")[-1].result.flatten().tolist()
    for slot, candidate in enumerate(selected.candidates.tolist()):
        if slot in trained:
            one, more = results[candidate], trained[slot]
            one |= more | {"tokens": one["tokens"] | more["tokens"]}
            one["advantage"] = advantages[slot]
            one["moved_as_wanted"] = (one["factor"] - 1) * advantages[slot] > 0
    if selected.groups.steps:
        raise UserError(
            "a reward function rewards steps of a completion; the page has no formulas."
        )
    prompts = {"row": selected.groups.rows}
    if "advantages" not in yours:
        call = trace.of("deviations_from_mean", "group")[-1]
        prompts["mean"] = (call.arguments["rewards"].double() - call.result)[:, 0]
        prompts["std"] = call.result.std(1)
    return {"completions": results, "prompts": records(prompts)}


def candidates(trace: Trace, config: Any) -> list[Record]:
    """All K candidates of each prompt; if not all are kept, with what decides who is."""
    selected = trace.of("select")[-1].result
    groups, kept = selected.groups, selected.candidates.tolist()
    rollouts, numbers = groups.rollouts, range(groups.rewards.shape[1])
    examples = [example for example in groups.examples for _ in numbers]
    columns = {
        "label": [f"row {e.row + 1}, candidate {k + 1}" for e in groups.examples for k in numbers],
        "row": [example.row for example in examples],
        "prompt_ids": [example.prompt_ids for example in examples],
        "ids": rollouts.completion_ids,
        "tokens": [{"sampler_logp": logps} for logps in rollouts.as_lists(rollouts.token_logps)],
        "reward": groups.rewards.flatten(),
    }
    if config.candidates_per_prompt == config.num_generations:
        return records(columns)
    scores = groups.rewards.double() / config.rejection_temperature
    if draws := trace.of("uniform", "_keep_gumbel"):
        keys = scores - torch.log(-torch.log(draws[0].result))
    elif draws := trace.of("uniform", "_keep_rso"):  # the first pass
        keys = (scores - scores.amax(1, keepdim=True)).exp()
    if draws:
        columns |= {"draw": draws[0].result.flatten(), "key": keys.flatten()}
    return records(columns | {"kept": [i in kept for i in range(len(examples))]})
