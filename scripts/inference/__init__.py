"""Answering with a trained model."""
