"""Proof of a resume: a training is killed at drawn points, resumed, and compared with an unbroken one."""
