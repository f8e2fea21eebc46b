"""Drivers of many runs: `replicate`, `sweep` and `overoptimization`, built of one run, `stages`."""
