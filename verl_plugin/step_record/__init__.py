"""Records the inputs and results of a step of verl's trainer, and replays the step on other dies: docs/replay.md.

    trainer.v1.trainer_mode=sync_recorded          or sync_onpolicy, which records too
    +trainer.record_steps=[3]

`scripts/replay.py` reads the folder that such a run writes.
"""
