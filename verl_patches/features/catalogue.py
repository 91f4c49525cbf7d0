"""All features: those declared in the folders `features` of the patch packages."""

from overlay import Feature
from overlay.discovery import load_features
from overlay.pins import Pins

FEATURES: tuple[Feature, ...] = tuple(load_features(Pins.read().patch_packages()))
"""In the order of their files."""
