#!/usr/bin/env bash
# transformers 5.23.0: `register` ignores a class for one of transformers' own configs, without a word.
#
# Expected: after `AutoModelForSequenceClassification.register(GraniteConfig, MyClassifier)` the auto class
#   builds a MyClassifier (Granite has no classifier), or `register` raises an error.
# Seen: nothing is registered and nothing is said. The next line fails with "Unrecognized configuration
#   class". With `exist_ok=True`, although nothing exists, it is registered.
# Why it matters: a plug-in that gives a family a head works for custom configs and not for these.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat > probe.py <<'PY'
from transformers import AutoModelForSequenceClassification as Auto
from transformers import GraniteConfig, GraniteModel

shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
config = GraniteConfig(**shape, num_attention_heads=4, num_key_value_heads=2)


class MyClassifier(GraniteModel):
    pass


def built():
    try:
        return type(Auto.from_config(config)).__name__
    except ValueError as error:
        return str(error).partition(" <")[0]


print("before:", built())
print("register returns", Auto.register(GraniteConfig, MyClassifier), "- then:", built())
Auto.register(GraniteConfig, MyClassifier, exist_ok=True)
print("with exist_ok:", built())
PY
venv/bin/python probe.py 2> log > seen || cat log
cat seen
diff - seen <<'SEEN'
before: Unrecognized configuration class
register returns None - then: Unrecognized configuration class
with exist_ok: MyClassifier
SEEN
