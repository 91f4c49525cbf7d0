"""Trackers that continue their curves after a resume, record how a run ended, and cannot make it fail."""
