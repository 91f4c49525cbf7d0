"""How well a model answers problems: estimates with their intervals, and what a page and a table show of them."""
