"""This project's jobs for verl 0.9.1: configurations of verl's own keys in `verl_plugin/config`, and their checks."""

from verl_plugin.jobs.checks import check_job
from verl_plugin.jobs.composition import CONFIG_FOLDER, JobError, compose_job

__all__ = ["CONFIG_FOLDER", "JobError", "check_job", "compose_job"]
