"""Error messages of one sentence for overrides and files that Hydra rejects while it composes a configuration."""

from __future__ import annotations

import re

from hydra.errors import OverrideParseException

from verl_patches.trainer.configuration_checks.names import known_keys, nearest, only_back_end, unknown_key

_UNKNOWN = re.compile(r"Could not override '([^']+)'")
_ABSENT = re.compile(r"Could not delete from config\. '([^']+)' does not exist")
_NO_FILE = re.compile(r"Could not find '([^']+)'|Cannot find primary config '([^']+)'")
_CHOICES = re.compile(r"Available options in '[^']*':\n((?:\t.*(?:\n|$))+)")


def sentence_of(error: Exception) -> str:
    """Condense Hydra's error into one sentence, and suggest the nearest key for an unknown one."""
    if isinstance(error, OverrideParseException):
        cause = [line for line in error.message.splitlines() if "Error parsing" not in line and line.strip()]
        return (
            f"the override {error.override} cannot be read ({cause[0] if cause else 'it is none'}). Write KEY=VALUE, "
            "with quotes around special characters"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, text = lines[0] if lines else type(error).__name__, str(error)
    if found := _UNKNOWN.search(first):
        return _not_there(found[1], " ".join(lines))
    if found := _ABSENT.search(first):
        meant = nearest(found[1], known_keys())
        return f"~{found[1]} is invalid: no such key to remove" + (f"; did you mean {meant}?" if meant else "")
    if found := _NO_FILE.search(text):
        choices = _CHOICES.search(text)
        listed = ", ".join(choices[1].split()) if choices else ""
        return f"no configuration {found[1] or found[2]}" + (f"; choose one of {listed}" if listed else "")
    return first


def _not_there(key: str, said: str) -> str:
    """Describe a key that the configuration does not have; `said` is Hydra's message, which offers to append it."""
    if key not in known_keys():
        return unknown_key(key)
    named = only_back_end(key)
    if named is None:
        return said
    return (
        f"{key} is not in this configuration and belongs to {named}. Remove it, or, if this configuration trains with "
        f"{named}, write +{key}"
    )
