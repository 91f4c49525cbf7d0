"""Files of a model or a data set by their name on a hub, as users of verl and transformers write them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


class HubError(ValueError):
    """The files are not on this machine and cannot be downloaded; the message is a clause that says why."""


def is_hub_name(path: str) -> bool:
    """Return whether a path is a name on a hub, OWNER/NAME, and no file of that name exists here."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


def download_commands(name: str, kind: Kind, folder: str, modelscope: str | None = None) -> str:
    """Return two commands, either of which downloads a model or data set into a folder.

    Args:
        name: the name on Hugging Face.
        kind: whether it is a model or a data set.
        folder: where the files go.
        modelscope: the name on ModelScope, if it differs.
    """
    option = "--dataset" if kind == "dataset" else "--model"
    repository = "--repo-type dataset " if kind == "dataset" else ""
    return (
        f"modelscope download {option} {modelscope or name} --local_dir {folder}, or "
        f"hf download {repository}{name} --local-dir {folder}"
    )


def snapshot(name: str, kind: Kind = "model", modelscope: str | None = None) -> Path:
    """Return the folder with the files of a hub, downloading them unless they are in the client's cache.

    If VERL_USE_MODELSCOPE is set, which verl reads too, the hub is ModelScope and `modelscope` is the name there.

    Raises:
        HubError: there is no network, no such name, or no right to it.
    """
    try:
        if os.environ.get("VERL_USE_MODELSCOPE", "False").lower() in ("true", "1"):
            from modelscope import snapshot_download as from_modelscope

            return Path(from_modelscope(modelscope or name, repo_type=kind))
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, repo_type=kind))
    except Exception as error:  # clients raise anything, from requests' errors to their own
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise HubError(
            f"not a folder on this machine, and no hub has it ({type(error).__name__}: {reason[:300]})"
        ) from error
