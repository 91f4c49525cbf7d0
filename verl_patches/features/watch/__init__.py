"""The hang detector (`post_training.hang_detection`) in verl's training loop and workers."""
