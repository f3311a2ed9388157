"""What every process needs: nouns, messages, recipes, engines, algorithms."""
