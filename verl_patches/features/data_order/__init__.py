"""Which prompts a step trains on, as a function of how many steps came before it."""
