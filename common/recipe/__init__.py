"""Recipes: typed fields, YAML, overrides, differences."""
