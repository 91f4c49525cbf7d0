"""The learning rate as a function of the step only."""
