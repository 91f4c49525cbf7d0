"""Compatibility of the pinned upstreams with each other, and with an NPU."""
