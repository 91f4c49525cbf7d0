"""The same tokens through rollout and training, held against each other point by point: where they part first."""
