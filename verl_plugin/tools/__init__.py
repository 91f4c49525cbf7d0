"""Tools that a model may call in verl's agent loops; each file is for `rollout.multi_turn.function_tool_path`."""
