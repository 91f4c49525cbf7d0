"""Trackers that continue their own curves after a resume, tell how a run ended, and cannot end it themselves."""
