"""Evaluate how well a model answers problems: estimates with confidence intervals, as a table and as a page."""
