"""Configs of stages: their fields, groups of flags, recipes and the command line.

Face: parser.parse, recipes.read_recipe, flags, stages. hints serves the parser.
"""
