"""Records every key of a Hydra configuration that a process reads, and the file that reads it.

Python imports a module of this name at startup, so every process with this folder on PYTHONPATH records, however
it was started. Each writes lines `key<TAB>file` to its own file in the folder CONFIGURATION_READS.
"""

import os
import sys

from omegaconf import DictConfig

_FOLDER = os.environ["CONFIGURATION_READS"]
_seen: set[tuple[str, str]] = set()


def _record(config, key):
    # Frame 0 is this function and frame 1 the wrapper, which OmegaConf's own methods or the reader called.
    frame = sys._getframe(2)
    while frame is not None and "/omegaconf/" in frame.f_code.co_filename:
        frame = frame.f_back
    reader = frame.f_code.co_filename if frame else ""
    entry = (config._get_full_key(key), reader)
    if entry not in _seen:
        _seen.add(entry)
        with open(os.path.join(_FOLDER, f"{os.getpid()}.tsv"), "a") as file:
            file.write("\t".join(entry) + "\n")


def _recording(method):
    def read(self, key, *default, **options):
        if isinstance(key, str) and not key.startswith("_") and key in (self.__dict__.get("_content") or ()):
            _record(self, key)
        return method(self, key, *default, **options)

    return read


for _name in ("__getattr__", "__getitem__", "get"):
    setattr(DictConfig, _name, _recording(getattr(DictConfig, _name)))
