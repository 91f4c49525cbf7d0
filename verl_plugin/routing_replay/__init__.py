"""Routing replay (R3): training sends every token to the experts that the rollout chose for it.

    actor_rollout_ref.rollout.enable_rollout_routing_replay=true
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    actor_rollout_ref.ref.megatron.router_replay.mode=R3
    actor_rollout_ref.model.external_lib=[..., verl_plugin.routing_replay.engines]

The keys are verl's own. verl 0.9.1 replays in the actor's packed batches on Megatron; `engines` adds padded batches,
the reference, FSDP2, expert numbers of one byte, and metrics. docs/routing-replay.md says what each of them does.
"""
