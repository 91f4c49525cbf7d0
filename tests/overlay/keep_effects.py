"""Writes every effect test's result with its patch to tests/demonstrations/effects.json; review the changes."""

import json

import torch_npu  # noqa: F401  (patches ask for its device)

import overlay.effective  # noqa: F401  (it stands in for a part of a running overlay)
from overlay.discovery import load
from overlay.pins import Pins
from tests.demonstrations import EFFECTS, all_switched_on, demonstrations
from verl_patches.features import settings

settings._current = all_switched_on()
patches = load(Pins.read().patch_packages())
found = {patch.label: repr(demonstrations()[patch.label](patch.body)) for patch in patches}
EFFECTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
