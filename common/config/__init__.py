"""Configs of stages: their fields, groups of flags, recipes and the command line.

Face: parser.parse, recipes.read_recipe, flags; stages (shared flags, SFT), reward, dpo, grpo and
evaluate, a config each, and engine, of those that sample what they score. hints serves the parser.
"""
