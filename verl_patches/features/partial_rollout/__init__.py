"""A rollout ends before its last answers, which go on in later steps with the tokens that they have."""
