"""The allowed values of a patch's `upstream`: a thread or commit that deals with it, a draft, or why there is none."""

import re

from overlay.documentation import DRAFTS
from tests.overlay.conftest import REPOSITORY

SECTIONS = ("# ", "| Package |", "## Reproduction\n", "## Proposed change\n")
"""The sections of a draft: title, affected release and function, a reproduction with its output, the change."""
_LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/((pull|issues)/\d+|commit/[0-9a-f]{40})")
_SOME_RELEASE = re.compile(r"\b(later|newer|recent|next|future|since|meanwhile)\b")
_NAMED_RELEASE = re.compile(r"\b\d+\.\d+|https://")


def complaint(upstream: str) -> str | None:
    """Return the fault of the text; None if there is none."""
    if upstream.startswith(DRAFTS):
        return _complaint_of_draft(upstream)
    if not upstream.startswith("not forwarded: "):
        return None if _LINK.fullmatch(upstream) else "neither a link to a thread or commit, a draft nor a reason"
    reason = upstream.removeprefix("not forwarded: ").strip()
    if not reason:
        return "no reason"
    if _SOME_RELEASE.search(reason) and not _NAMED_RELEASE.search(reason):
        return "other releases have it, but which?"
    return None


def _complaint_of_draft(path: str) -> str | None:
    file = REPOSITORY / path
    if not file.is_file():
        return "the draft does not exist"
    missing = [section.strip() for section in SECTIONS if section not in file.read_text()]
    return f"the draft lacks {', '.join(missing)}" if missing else None
