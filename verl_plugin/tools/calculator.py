"""The tool `calculate`, which verl's agent loop `tool_agent` offers to the model.

actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
actor_rollout_ref.rollout.multi_turn.function_tool_path=verl_plugin/tools/calculator.py

verl executes this file in each of its agent loop workers. It registers a function once, so nothing imports this file.
"""

from verl.tools.function_tool import function_tool

from post_training.calculator import calculate

function_tool(calculate)
