"""Files that run a recipe elsewhere, under systemd or Docker Compose; all rendered from the recipe."""
