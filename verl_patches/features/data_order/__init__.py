"""The prompts of a step, as a function of how many steps came before it."""
