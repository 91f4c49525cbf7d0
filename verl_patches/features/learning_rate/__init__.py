"""The learning rate of a step, as a function of the step alone."""
