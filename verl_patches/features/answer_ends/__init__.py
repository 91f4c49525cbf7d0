"""Where answers end: one set of end tokens, and masks that end where the engine stopped."""
