"""Training through MindSpeed and MindSpeed-LLM."""
