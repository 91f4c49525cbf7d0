"""What post-training needs of its own: it patches nothing, and imports nothing of upstream before that is used."""
