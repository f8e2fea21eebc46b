"""How a run ends before its last step.

Face: signals (requests to stop), failures (where a rank failed, and whether another is the cause),
processes (under torchrun).
"""
