"""The pinned upstreams with each other, and on an NPU."""
