"""Models built through MindSpeed-LLM, after it has started."""
