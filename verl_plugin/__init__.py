"""Extensions that this project registers with verl of 2026, through verl's own extension points.

verl imports the modules that VERL_USE_EXTERNAL_MODULES names in each of its processes. No code of verl is replaced;
`patches` holds the few names of Megatron-core and torch that are. A run that names no module of this package is
upstream alone.
"""
