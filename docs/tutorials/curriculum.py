"""Two sets of prompts for curriculum.yaml."""

THINGS = ("bird", "boat", "book", "bread", "cloud", "door", "fish", "fox")


def short() -> list[dict[str, str]]:
    """8 prompts of one thing."""
    return [{"prompt": f"Name a {thing}: "} for thing in THINGS]


def long() -> list[dict[str, str]]:
    """56 prompts of two."""
    return [{"prompt": f"Name a {one} and a {other}: "} for one in THINGS for other in THINGS if one != other]
