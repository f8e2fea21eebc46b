"""Configs of stages: their fields, groups of flags, recipes and the command line.

Face: parser.parse, recipes.read_recipe, fields, groups, stages. hints serves the parser.
"""
