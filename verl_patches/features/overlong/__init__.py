"""Answers that reach the greatest length: a penalty on the way there, and none of their tokens in the loss."""
