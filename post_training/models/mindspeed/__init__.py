"""The same through MindSpeed-LLM, after that has started."""
