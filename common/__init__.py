"""The code that the five stages share."""
