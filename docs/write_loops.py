"""Write docs/loops.md from runs of every habit: python docs/write_loops.py, or only some columns: python
docs/write_loops.py FSDP TP; or the table of other guards: python docs/write_loops.py guards
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.loop_sides import PLANS
from tests.support.loop_table import ALLOWED, KINDS, PAGE, WEAKER, columns_of, page, refused_habits, run_plan, weaker_of


def main(titles: list[str]) -> None:
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    columns, weaker = columns_of(text), weaker_of(text)
    for title, (plan, _) in WEAKER.items() if "guards" in titles else ():
        outcomes = run_plan(title, refused_habits(columns, plan))
        weaker[title] = {name: KINDS[outcome.kind] for name, outcome in outcomes.items()}
        PAGE.write_text(page(columns, weaker), encoding="utf-8")
    for title in [title for title in titles if title in PLANS]:
        columns[title] = run_plan(title)
        faults = {name: outcome for name, outcome in columns[title].items() if outcome.kind not in ALLOWED}
        sys.stderr.write("".join(f"{title}: {name}: {outcome}\n" for name, outcome in faults.items()))
        PAGE.write_text(page(columns, weaker), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or [*PLANS, "guards"])
