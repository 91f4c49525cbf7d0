"""Imported by the process that Ray's workers are forked from, so that each worker can be held at a place."""

from rehearsal.resume_proof.stops import install

install()
