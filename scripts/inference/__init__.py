"""Generate answers with a trained model."""
