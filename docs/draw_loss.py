"""Draw docs/quickstart.svg from a run of the quickstart: python docs/draw_loss.py runs/quickstart/metrics.jsonl
docs/quickstart.svg
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 300, 50, 40


def main(source: Path, target: Path) -> None:
    records = [json.loads(line) for line in source.read_text().splitlines()]
    train = [(record["step"], record["train/loss"]) for record in records if "train/loss" in record]
    validation = [(record["step"], record["val/loss"]) for record in records if "val/loss" in record]
    last, (low, high) = train[-1][0], (min(loss for _, loss in train) - 0.3, max(loss for _, loss in train) + 0.2)
    change = int(last * 0.9)  # the quickstart resumes on another mesh for the last tenth

    def place(step: float, loss: float) -> str:
        x = LEFT + step / last * (WIDTH - LEFT - 20)
        return f"{x:.1f},{HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - BOTTOM - 20):.1f}"

    def line(points: list[tuple[int, float]], colour: str) -> str:
        return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(place(*point) for point in points)}"/>'

    x = place(change, low).split(",")[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<line x1="{x}" y1="15" x2="{x}" y2="{HEIGHT - BOTTOM}" stroke="#888" stroke-dasharray="4"/>',
        f'<text x="{float(x) - 6}" y="24" text-anchor="end" fill="#555">dp_shard=2</text><text x="{float(x) + 6}" y="24" fill="#555">tp=2</text>',
        line(train, "#1f77b4"),
        *(
            f'<circle cx="{place(*point).split(",")[0]}" cy="{place(*point).split(",")[1]}" r="4" fill="#d62728"/>'
            for point in validation
        ),
    ]
    parts += [
        f'<text x="{LEFT - 8}" y="{float(place(0, loss).split(",")[1]) + 4}" text-anchor="end" fill="#555">{loss}</text>'
        for loss in range(int(low) + 1, int(high) + 1)
    ]
    parts += [
        f'<text x="{place(step, low).split(",")[0]}" y="{HEIGHT - 22}" text-anchor="middle" fill="#555">{step}</text>'
        for step in range(0, last + 1, 100)
    ]
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 5}" text-anchor="middle">step; line: training loss, points: validation loss</text></svg>'
    )
    target.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
