"""Write docs/loops.md from a run of every habit under every plan: python docs/write_loops.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from loop_sides import PLANS
from loop_table import ALLOWED, PAGE, page, run_plan


def main(titles: list[str]) -> None:
    columns = {title: run_plan(title) for title in titles}
    for title, column in columns.items():
        for name, outcome in column.items():
            if outcome.kind not in ALLOWED:
                sys.stderr.write(f"{title}: {name}: {outcome}\n")
    PAGE.write_text(page(columns), encoding="utf-8")


if __name__ == "__main__":
    main(list(PLANS))
