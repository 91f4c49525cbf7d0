"""What this project registers with verl of 2026, through verl's own extension points.

verl imports the modules that VERL_USE_EXTERNAL_MODULES names in each of its processes. Nothing here replaces code of
verl; a run that names none of these modules is upstream alone.
"""
