"""Draw pipeline-light.svg and pipeline-dark.svg: python docs/images/draw_pipeline.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TITLE = "One batch, many adapters: the way of a token through a MoE layer"
DESCRIPTION = (
    "Four rows of a batch carry the adapters sql, kjv, none and sql. The model's router gives each "
    "row two experts. permute sorts these pairs by expert. gate_up, activation, down and finalize "
    "run once for all rows with the base weights. Beside gate_up and beside down, LoRA adds "
    "scale times B (A x) to the rows that have an adapter, and to no others. Adapter folders are "
    "read and bound to the model, kept in the store, and copied into slots of the bank, whose "
    "table tells LoRA where each factor lies."
)
#: The picture starts here; everything below it is drawn in round numbers.
TOP = 30
FONT = "-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours of one picture; ``rows`` are those of sql, kjv and base rows."""

    page: str
    box: str
    line: str
    text: str
    faint: str
    lora: str
    rows: tuple[str, str, str]


LIGHT = Theme(
    "#ffffff",
    "#f6f8fa",
    "#8c959f",
    "#1f2328",
    "#59636e",
    "#fff8e6",
    ("#0969da", "#bc4c00", "#afb8c1"),
)
DARK = Theme(
    "#0d1117",
    "#161b22",
    "#6e7681",
    "#f0f6fc",
    "#9198a1",
    "#272115",
    ("#58a6ff", "#f0883e", "#6e7681"),
)


class Picture:
    """SVG elements on one theme."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        self.parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, fill: str, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" '
            f'stroke="{self.theme.line}"{dash}/>'
        )

    def text(
        self, x: int, y: int, text: str, size: int = 13, bold: bool = False, faint: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        fill = self.theme.faint if faint else self.theme.text
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="middle" fill="{fill}"{weight}>'
            f"{text}</text>"
        )

    def cell(self, x: int, y: int, colour: int, width: int = 18) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="14" rx="3" '
            f'fill="{self.theme.rows[colour]}"/>'
        )

    def arrow(self, *points: tuple[int, int]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.theme.line}" stroke-width="1.6" '
            'marker-end="url(#head)"/>'
        )

    def svg(self, width: int, height: int) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {TOP} {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-labelledby="title desc" '
            f'font-family="{FONT}">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{self.theme.line}"/>'
            "</marker></defs>"
        )
        page = (
            f'<rect y="{TOP}" width="{width}" height="{height}" rx="12" fill="{self.theme.page}"/>'
        )
        names = f'<title id="title">{TITLE}</title><desc id="desc">{DESCRIPTION}</desc>'
        return "\n".join([head, names, marker, page, *self.parts, "</svg>", ""])


#: Adapter of each batch row: 0 sql, 1 kjv, 2 none.
ROWS = (0, 1, 2, 0)
NAMES = ("sql", "kjv", "none")
#: Rows of each expert after permute.
EXPERTS = ((0, 2, 1), (1, 0), (0, 2, 0))


def draw(theme: Theme) -> str:
    """Return the picture in one theme."""
    p = Picture(theme)
    top, height = 50, 190
    middle = top + height // 2
    p.box(20, top, 104, height, theme.box)
    p.text(72, 74, "batch", bold=True)
    for i, row in enumerate(ROWS):
        p.cell(34, 94 + 34 * i, row)
        p.text(86, 106 + 34 * i, NAMES[row])
    p.box(152, top, 96, height, theme.box, dashed=True)
    p.text(200, 74, "router", bold=True)
    p.text(200, middle - 12, "model's own:", 12, faint=True)
    p.text(200, middle + 4, "K experts", 12, faint=True)
    p.text(200, middle + 20, "per token", 12, faint=True)
    p.box(276, top, 116, height, theme.box)
    p.text(334, 74, "permute", bold=True)
    p.text(334, 92, "pairs by expert", 12, faint=True)
    y = 106
    for e, cells in enumerate(EXPERTS):
        p.text(298, y + 12, f"e{e}", 12, faint=True)
        for i, row in enumerate(cells):
            p.cell(316 + 23 * i, y, row)
        y += 44
    stages = (
        (420, 140, "gate_up", "W[e] x"),
        (588, 100, "activation", "act(g, u)"),
        (716, 140, "down", "W[e] h"),
        (884, 96, "finalize", "sum of w y"),
    )
    for x, width, name, maths in stages:
        p.box(x, top, width, height, theme.box)
        p.text(x + width // 2, 74, name, bold=True)
        p.text(x + width // 2, middle, maths, 14)
    p.text(490, middle + 22, "base weights,", 12, faint=True)
    p.text(490, middle + 38, "touched experts", 12, faint=True)
    p.text(786, middle + 22, "base weights,", 12, faint=True)
    p.text(786, middle + 38, "touched experts", 12, faint=True)
    p.text(932, middle + 22, "back to", 12, faint=True)
    p.text(932, middle + 38, "token order", 12, faint=True)
    for left, right in ((124, 152), (248, 276), (392, 420), (560, 588), (688, 716), (856, 884)):
        p.arrow((left + 2, middle), (right - 2, middle))
    for x in (420, 716):
        p.box(x, 286, 140, 92, theme.lora)
        p.text(x + 70, 310, "LoRA", bold=True)
        p.text(x + 70, 332, f"+ s B (A {'x' if x == 420 else 'h'})", 14)
        p.cell(x + 36, 350, 0)
        p.cell(x + 60, 350, 1)
        p.text(x + 100, 362, "only", 12, faint=True)
        p.arrow((x + 70, 286), (x + 70, 243))
    p.text(638, 330, "rows without", 12, faint=True)
    p.text(638, 346, "an adapter are", 12, faint=True)
    p.text(638, 362, "keep their bits", 12, faint=True)
    lower = (
        (20, 150, "adapter folders", "PEFT, safetensors"),
        (198, 150, "read and bind", "in full, or refused"),
        (376, 150, "store", "names, versions"),
        (716, 140, "bank", "slots, factor table"),
    )
    for x, width, name, what in lower:
        p.box(x, 426, width, 66, theme.box)
        p.text(x + width // 2, 453, name, bold=True)
        p.text(x + width // 2, 473, what, 12, faint=True)
    p.arrow((172, 459), (196, 459))
    p.arrow((350, 459), (374, 459))
    p.arrow((528, 459), (714, 459))
    p.text(621, 451, "slots as needed", 12, faint=True)
    p.arrow((786, 424), (786, 380))
    p.arrow((786, 402), (490, 402), (490, 380))
    return p.svg(1000, 482)


if __name__ == "__main__":
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        Path(__file__).with_name(f"pipeline-{name}.svg").write_text(draw(theme))
