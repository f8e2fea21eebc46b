"""From a command line and recipes to a config: `parser.parse`, `stages.TrainConfig`."""
