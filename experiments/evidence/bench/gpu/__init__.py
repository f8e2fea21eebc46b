"""Speed of every stage on a GPU, compared with TRL: `python -m experiments.evidence.bench.gpu`."""
