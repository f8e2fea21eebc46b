"""Commands that run the stage scripts many times over and sum up what came of it."""
