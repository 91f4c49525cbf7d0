"""Resume a run of verl's trainer `sync` bit for bit, by keys that verl reads; nothing of it is replaced.

    trainer.checkpoint_callback_class=verl_plugin.resume.checkpoint_callback.CompleteCheckpoint
    trainer.v1.sampler.custom_sampler.path=pkg://verl_plugin.resume.replay_buffer
    trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer
    actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_plugin.resume.agent_loops.SeededAgentLoopManager
    actor_rollout_ref.model.external_lib=[verl_plugin.resume.engines,...]

docs/checkpoints.md says what each is for.
"""
