"""Recording what ranks compute, in the steps that are asked for."""
