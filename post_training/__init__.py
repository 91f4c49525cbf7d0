"""The project's own post-training code: it patches nothing, and imports upstream packages only where they are used."""
