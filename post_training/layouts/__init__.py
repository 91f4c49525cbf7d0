"""Where every weight lies, in files, in training and in the rollout, and what has to be moved between them."""
