"""Moves weights from training to the rollout by alltoallv: a die receives only the bytes that its vLLM worker serves.

Stock verl gathers every tensor whole on every rank. Nothing of verl is replaced; two of its keys switch this on:

    actor_rollout_ref.model.external_lib=verl_plugin.alltoallv.engines
    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_plugin.alltoallv.worker.AlltoallvExtension

The first registers training engines (`EngineRegistry`), the second gives vLLM's workers the methods that write arriving
bytes into live weights. Without both verl behaves as upstream. `AlltoallvSettings` has the options.

If training and rollout have dies of their own, the checkpoint engine `alltoallv` joins them (`checkpoint_engine`).

The draft of a pull request that brings it to verl: docs/upstream/verl-alltoallv-engine.md.
"""
