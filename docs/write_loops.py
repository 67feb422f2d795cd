"""Write docs/loops.md from runs of every habit: python docs/write_loops.py, or only some columns: python
docs/write_loops.py FSDP TP
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.loop_sides import PLANS
from tests.support.loop_table import ALLOWED, PAGE, columns_of, page, run_plan


def main(titles: list[str]) -> None:
    columns = columns_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {title: {} for title in PLANS}
    for title in titles:
        columns[title] = run_plan(title)
        faults = {name: outcome for name, outcome in columns[title].items() if outcome.kind not in ALLOWED}
        sys.stderr.write("".join(f"{title}: {name}: {outcome}\n" for name, outcome in faults.items()))
        PAGE.write_text(page(columns), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(PLANS))
