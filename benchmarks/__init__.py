"""Measurements that compare this project with what it replaces. They print; tests hold what must not change."""
