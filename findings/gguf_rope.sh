#!/usr/bin/env bash
# transformers 5.23.0: a GGUF file of Llama 3.1 is loaded without its rope scaling, and nothing says so.
#
# Expected: `from_pretrained(folder, gguf_file=...)` takes the scaling of the positions from the file, in either
#   form (the fields `rope.scaling.*`, or the tensor `rope_freqs.weight` of Llama 3.1), or warns.
# Seen: only `rope.freq_base` is read. With linear scaling, YaRN and the tensor the loaded config says "default"
#   and the logits are those of a file without scaling. There is no warning, and no key is missing, unexpected
#   or mismatched.
# Why it matters: a policy, judge or reference loaded from such a file is another model than the one that
#   llama.cpp samples from the same file, the more, the longer the text.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0 numpy==2.4.6
cat > probe.py <<'PY'
import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

width, inner, words, heads, groups = 32, 64, 96, 4, 2
generator = np.random.default_rng(0)


def matrix(*shape):
    return generator.standard_normal(shape).astype(np.float32)


ones = np.ones(width, np.float32)
tensors = {"token_embd": matrix(words, width), "output_norm": ones, "output": matrix(words, width)}
tensors |= {"blk.0.attn_norm": ones, "blk.0.ffn_norm": ones, "blk.0.ffn_down": matrix(width, inner)}
tensors |= {f"blk.0.{name}": matrix(width, width) for name in ("attn_q", "attn_output")}
tensors |= {f"blk.0.{name}": matrix(width // 2, width) for name in ("attn_k", "attn_v")}
tensors |= {f"blk.0.{name}": matrix(inner, width) for name in ("ffn_gate", "ffn_up")}


def loaded(base=10000.0, scaling=None, factors=None):
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(base)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"word{i}" for i in range(words)])
    writer.add_token_scores([0.0] * words)
    writer.add_token_types([1] * words)
    if scaling:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoModelForCausalLM.from_pretrained(
        ".", gguf_file="model.gguf", output_loading_info=True
    )


ids = torch.arange(1, 91)[None]
plain = loaded()[0](input_ids=ids).logits
CASES = {
    "another base": {"base": 500000.0},
    "linear": {"scaling": gguf.RopeScalingType.LINEAR},
    "yarn": {"scaling": gguf.RopeScalingType.YARN},
    "rope_freqs.weight": {"factors": [1.0, 2.0, 8.0, 8.0]},
}
for name, fields in CASES.items():
    lm, info = loaded(**fields)
    logits = lm(input_ids=ids).logits
    print(f"{name}: config {lm.config.rope_parameters}, logits differ from the plain file's "
          f"{not torch.allclose(logits, plain, atol=1e-3)}, keys reported {sum(map(len, info.values()))}")
PY
venv/bin/python probe.py 2> log > seen || cat log
echo "warnings of scaling: $(grep -ciE 'rope|scal|unused|ignored' log || true)" >> seen
cat seen
diff - seen <<'SEEN'
another base: config {'rope_theta': 500000.0, 'rope_type': 'default'}, logits differ from the plain file's True, keys reported 0
linear: config {'rope_theta': 10000.0, 'rope_type': 'default'}, logits differ from the plain file's False, keys reported 0
yarn: config {'rope_theta': 10000.0, 'rope_type': 'default'}, logits differ from the plain file's False, keys reported 0
rope_freqs.weight: config {'rope_theta': 10000.0, 'rope_type': 'default'}, logits differ from the plain file's False, keys reported 0
warnings of scaling: 0
SEEN
