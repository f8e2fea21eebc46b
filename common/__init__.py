"""What the five stages share; a module imports lower layers only (see the README)."""
