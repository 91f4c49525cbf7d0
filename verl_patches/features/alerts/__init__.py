"""Alerts on anomalous metrics, reported once, at the step that confirms them."""
