#!/usr/bin/env bash
# Iterative GRPO (DeepSeekMath, arXiv 2402.03300, Algorithm 1) on the embedded task:
#   make demo && bash assets/recipes/iterative/grpo.sh
# Each iteration: GRPO from the present policy, which is also the reference, against the present reward
# model; fresh pairs of the new policy; the reward model trained on them and on replayed ones.
# On other data: give the stages' recipes, and as LABELS whatever judges a summary.
set -euo pipefail

PYTHON=${PYTHON:-.venv/bin/python}
RECIPES=${RECIPES:-assets/recipes/demo}
PAIRS=${PAIRS:-assets/recipes/iterative/pairs.yaml}
LABELS=${LABELS:-gold}                   # who labels the pairs: the true reward, file.py:function, a model
ITERATIONS=${ITERATIONS:-2}
STEPS=${STEPS:-30}                       # of GRPO, and of the reward model, in an iteration
PROMPTS=${PROMPTS:-400}                  # whose completions are paired in an iteration
OUTPUT=${OUTPUT:-output/iterative}
START=${START:-output/demo}              # its sft/model and reward/model are where this begins
policy=$START/sft/model
reward=$START/reward/model

mkdir -p "$OUTPUT"
history=$OUTPUT/history.jsonl  # pairs of earlier iterations
: > "$history"
for i in $(seq 1 "$ITERATIONS"); do
    folder=$OUTPUT/$i

    # 1. The policy, tied to what it was at the start of the iteration
    $PYTHON train_grpo.py --config "$RECIPES/grpo.yaml" --model_name_or_path "$policy" \
        --reward_funcs "$reward" "$LABELS" --reward_weights 1 0 \
        --max_steps "$STEPS" --seed "$i" --output_dir "$folder/grpo"
    policy=$folder/grpo/model

    # 2. Fresh pairs of its completions
    $PYTHON -m experiments.sample_pairs --config "$PAIRS" --model_name_or_path "$policy" \
        --pair_method best_worst --reward_funcs "$LABELS" \
        --num_train_rows "$PROMPTS" --dataset_test_split "" --seed "$i" --output_dir "$folder/pairs"

    # 3. The reward model goes on, a tenth of its rows replayed
    fresh=$folder/pairs/train.jsonl
    replayed=$(($(wc -l < "$fresh") / 9))
    cat "$fresh" <(shuf -n "$replayed" --random-source=<(yes "$i") "$history") > "$folder/rows.jsonl"
    cat "$fresh" >> "$history"
    $PYTHON train_reward.py --config "$RECIPES/reward.yaml" --model_name_or_path "$reward" \
        --dataset_name "$folder/rows.jsonl" --dataset_test_split "" --num_train_rows 0 \
        --max_steps "$STEPS" --seed "$i" --output_dir "$folder/reward"
    reward=$folder/reward/model
done

$PYTHON evaluate.py --config "$RECIPES/evaluate.yaml" --output_dir "$OUTPUT/evaluation" \
    --policies "$START/sft/model" "$policy" --ref_model_name_or_path "$START/sft/model" \
    --reward_models "$START/reward/model" "$reward"
