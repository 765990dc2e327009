"""`Drawing`: an SVG file made of boxes, arrows and lines of text."""

from __future__ import annotations

from html import escape

COLORS = {"r0": "#3b82f6", "r1": "#f5990b", "r2": "#22c55e", "r3": "#d946ef"}
STYLE = """\
svg{color:#24292f;font:13px system-ui,sans-serif}
@media(prefers-color-scheme:dark){svg{color:#e6edf3}}
text{fill:currentColor}
.b{font-weight:600}.s{font-size:11px}
.l{fill:none;stroke:currentColor}.d{fill:none;stroke:currentColor;stroke-dasharray:4 3}
.r0,.r1,.r2,.r3,.p,.o{stroke:currentColor;stroke-width:.5;fill-opacity:.4}
.r0,.o{fill:#3b82f6}.r1{fill:#f5990b}.r2{fill:#22c55e}.r3{fill:#d946ef}.p{fill:#888}"""


class Drawing:
    """Lines of an SVG file, with text in the page's text colour."""

    def __init__(self, title: str, width: int, height: int):
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}\n</style>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "l") -> None:
        """Adds a rectangle; `kind` is a class of `STYLE`: l and d are outlines, r0 .. r3 ranks, p a peer, o blockfp."""
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>')

    def text(self, x: float, y: float, words: object, kind: str = "", anchor: str = "start") -> None:
        """Adds a line of text whose baseline is at y."""
        kind = f' class="{kind}"' if kind else ""
        anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.lines.append(f'<text x="{x:g}" y="{y:g}"{kind}{anchor}>{escape(str(words))}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Adds a line through the points, with a head at the last."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self.lines.append(f'<path d="M{path}" class="l" marker-end="url(#a)"/>')

    def line(self, points: list[tuple[float, float]], kind: str, dashed: bool = False) -> None:
        """Adds a line through the points in the colour of a class r0 .. r3."""
        path = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
        dashes = ";stroke-dasharray:5 3" if dashed else ""
        self.lines.append(
            f'<path d="M{path}" class="{kind}" style="fill:none;stroke:{COLORS[kind]};stroke-width:1.5{dashes}"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])
