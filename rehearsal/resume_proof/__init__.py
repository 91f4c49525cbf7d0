"""Proof of a resume: a training is killed at drawn points, gone on with, and held against the unbroken one."""
