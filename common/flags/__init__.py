"""From a command line and recipes to a config: `parser.parse`, `recipes.read_recipe`."""
