"""Draw docs/styles/*.svg, one picture for each tensor-parallel style: python docs/draw_styles.py"""

from pathlib import Path

BLUE, ORANGE, GREY, TEXT = "#8ab6e6", "#f5b971", "#dddddd", "#333333"
SIDE, GAP, TOP = 64, 14, 30

# A picture is a row of tensors (label, how its elements lie on the two ranks) and of signs between them.
WHOLE, COLUMNS, ROWS, PACKED, PARTIAL = "whole", "columns", "rows", "packed", "partial"
Picture = list[tuple[str, str] | str]
ROWWISE: Picture = [
    ("features", COLUMNS),
    "×",
    ("weight", ROWS),
    "=",
    ("partial sums", PARTIAL),
    "all-reduce",
    ("output", WHOLE),
]
PICTURES: dict[str, Picture] = {
    "colwise": [("input", WHOLE), "×", ("weight", COLUMNS), "=", ("output", COLUMNS)],
    "packed_colwise": [("input", WHOLE), "×", ("q, k, v weights", PACKED), "=", ("q, k, v", PACKED)],
    "colwise_gather": [
        ("input", WHOLE),
        "×",
        ("weight", COLUMNS),
        "=",
        ("features", COLUMNS),
        "all-gather",
        ("output", WHOLE),
    ],
    "head": [("input", WHOLE), "×", ("weight", COLUMNS), "=", ("logits", COLUMNS), "all-gather", ("output", WHOLE)],
    "rowwise": ROWWISE,
    "rowwise_split": [("input", WHOLE), "take part", *ROWWISE],
    "vocab": [
        ("token ids", WHOLE),
        "look up",
        ("table", ROWS),
        "=",
        ("partial sums", PARTIAL),
        "all-reduce",
        ("output", WHOLE),
    ],
    "features": [
        ("token ids", WHOLE),
        "look up",
        ("table", COLUMNS),
        "=",
        ("features", COLUMNS),
        "all-gather",
        ("output", WHOLE),
    ],
    "region": [
        ("input", WHOLE),
        "colwise",
        ("heads", COLUMNS),
        "rowwise",
        ("partial sums", PARTIAL),
        "all-reduce",
        ("output", WHOLE),
    ],
    "sequence": [
        ("positions", ROWS),
        "norm",
        ("positions", ROWS),
        "gradient:",
        ("partial sums", PARTIAL),
        "all-reduce",
        ("of the weight", WHOLE),
    ],
    "grad_sum": [
        ("heads", COLUMNS),
        "norm",
        ("heads", COLUMNS),
        "gradient:",
        ("partial sums", PARTIAL),
        "all-reduce",
        ("of the weight", WHOLE),
    ],
    "per_head": [("heads", COLUMNS), "scale by", ("parameter", COLUMNS), "=", ("heads", COLUMNS)],
}


def tensor(x: float, label: str, how: str) -> list[str]:
    """A square: grey is whole on every rank, blue is on rank 0, orange on rank 1; partial sums are a square of each."""

    def box(dx: float, dy: float, width: float, height: float, colour: str) -> str:
        return f'<rect x="{x + dx:g}" y="{TOP + dy:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="{TEXT}"/>'

    half, sixth = SIDE / 2, SIDE / 6
    parts = {
        WHOLE: [box(0, 0, SIDE, SIDE, GREY)],
        COLUMNS: [box(0, 0, half, SIDE, BLUE), box(half, 0, half, SIDE, ORANGE)],
        ROWS: [box(0, 0, SIDE, half, BLUE), box(0, half, SIDE, half, ORANGE)],
        PACKED: [box(sixth * n, 0, sixth, SIDE, (BLUE, ORANGE)[n % 2]) for n in range(6)],
        PARTIAL: [box(10, 0, SIDE - 10, SIDE - 10, ORANGE), box(0, 10, SIDE - 10, SIDE - 10, BLUE)],
    }[how]
    return [*parts, text(x + SIDE / 2, TOP + SIDE + 18, label)]


def text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="{TEXT}">{words}</text>'


def draw(name: str) -> str:
    x, parts = float(GAP), [text(GAP, 0, "")]
    for item in PICTURES[name]:
        if isinstance(item, str):
            width = max(10, 7 * len(item))
            parts.append(text(x + width / 2, TOP + SIDE / 2 + 4, item))
            if len(item) > 1 and not item.endswith(":"):
                parts.append(
                    f'<path d="M{x:g} {TOP + SIDE / 2 + 12} h{width} m-5 -4 l5 4 l-5 4" fill="none" stroke="{TEXT}"/>'
                )
        else:
            width = SIDE
            parts += tensor(x, *item)
        x += width + GAP
    legend = [
        f'<rect x="{GAP + 120 * n}" y="6" width="12" height="12" fill="{colour}" stroke="{TEXT}"/>'
        f'<text x="{GAP + 18 + 120 * n}" y="16" fill="{TEXT}">{words}</text>'
        for n, (colour, words) in enumerate([(BLUE, "on rank 0"), (ORANGE, "on rank 1"), (GREY, "on every rank")])
    ]
    width, height = max(x, 400), TOP + SIDE + 28
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" font-family="sans-serif" font-size="12">'
    return (
        "\n".join([head, f'<rect width="{width:g}" height="{height}" fill="white"/>', *legend, *parts[1:], "</svg>"])
        + "\n"
    )


if __name__ == "__main__":
    folder = Path(__file__).parent / "styles"
    folder.mkdir(exist_ok=True)
    for style in PICTURES:
        (folder / f"{style}.svg").write_text(draw(style))
