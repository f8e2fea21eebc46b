"""Speed of every stage on one GPU, compared with TRL: `python -m experiments.bench.gpu`."""
