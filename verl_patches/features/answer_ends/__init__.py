"""The ends of answers: one set of end tokens, and masks that end at the token at which the engine stopped."""
