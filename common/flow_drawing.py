"""A graph of nodes as text and as SVG."""

from __future__ import annotations

from html import escape

from rlmq.common.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS
from rlmq.common.graph import Graph

_USUAL = {*(column.name for column in (*PROMPT_COLUMNS, *ROLLOUT_COLUMNS)), "reward", "ref_logprobs", "advantages"}
"""Columns that many flows only record."""
_WIDE, _HIGH, _ACROSS, _DOWN, _MARGIN = 120, 34, 210, 84, 24


def as_text(graph: Graph) -> str:
    """A line per node, in the order of a sample's way, and below it one for each edge that leaves it."""
    lines: list[str] = []
    for name in graph.order:
        lines.append(name)
        for edge in graph.edges:
            if edge.source == name:
                arrow, what = ("~>", "in the next step") if edge.next_step else ("->", ", ".join(edge.columns))
                lines.append(f"  {arrow} {edge.target}: {what}")
    unread = [column for column in graph.unread if column not in _USUAL and not column.startswith("reward.")]
    if unread:
        lines.append(f"read by no node: {', '.join(unread)}")
    return "\n".join(lines)


def as_svg(graph: Graph) -> str:
    """Boxes from left to right, each right of all that it waits for; edges to the next step are dashed."""
    places = _places(graph)
    width = max(x for x, _ in places.values()) + _WIDE + _MARGIN
    height = max(y for _, y in places.values()) + _HIGH + 3 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    for edge in graph.edges:
        x, y = places[edge.source]
        to_x, to_y = places[edge.target]
        if edge.next_step:
            low = height - _MARGIN
            way = f"M{x + _WIDE // 2} {y + _HIGH} V{low} H{to_x + _WIDE // 2} V{to_y + _HIGH}"
            told, dash = "next step", ' stroke-dasharray="5 3"'
        else:
            way = f"M{x + _WIDE} {y + _HIGH // 2} L{to_x} {to_y + _HIGH // 2}"
            told, dash = ", ".join(edge.columns), ""
        parts.append(
            f'<path d="{way}" fill="none" stroke="#555" marker-end="url(#tip)"{dash}>'
            f"<title>{escape(f'{edge.source} to {edge.target}: {told}')}</title></path>"
        )
    for name, (x, y) in places.items():
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="5" fill="#eef3fa" stroke="#345"/>'
            f'<text x="{x + _WIDE // 2}" y="{y + 21}" text-anchor="middle">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _places(graph: Graph) -> dict[str, tuple[int, int]]:
    """Left upper corner of each box: its column is the longest way to it."""
    depth: dict[str, int] = {}
    rows: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for name in graph.order:
        sources = [edge.source for edge in graph.edges if edge.target == name and not edge.next_step]
        column = depth[name] = 1 + max((depth[source] for source in sources), default=-1)
        row = rows[column] = rows.get(column, -1) + 1
        # Neighbouring columns stand a little lower than each other, so that a long edge passes between boxes.
        places[name] = (_MARGIN + column * _ACROSS, _MARGIN + row * _DOWN + column % 2 * _HIGH)
    return places
