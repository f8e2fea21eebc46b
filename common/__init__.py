"""What the five stages share: the modules that every stage is made of, and rooms beside them."""
