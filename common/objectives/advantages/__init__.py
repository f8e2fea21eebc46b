"""Advantages of GRPO, each a file with a function of its name."""
