"""Tables of docs/evidence.md, computed from results of evidence.py.

Loss differences are paired: runs of one seed start from the same weights and see the same batches, and all are judged on the
same held-out rows, whose losses are kept in the results. A 95% interval is Student's, from the variance between seeds and over
rows. A recipe with one seed gets the variance between seeds of the others.
"""

from __future__ import annotations

import re
import statistics
from typing import NamedTuple

BASELINE = "bf16"
PUBLISHED = (
    ("nvfp4_4over6", "nvfp4", "4-over-6 better than plain NVFP4"),
    ("nvfp4_4over6+squared", "nvfp4", "4-over-6 by squared errors better than plain NVFP4"),
    ("mxfp8", "mxfp8_floor", "rule ceil better than floor, MXFP8"),
    ("mxfp4", "mxfp4_floor", "rule ceil better than floor, MXFP4"),
)
"""(better, worse, in words), as others have published it."""
PAIRS = (
    ("nvfp4", "mxfp8"),
    ("nvfp4_4over6", "mxfp8"),
    ("nvfp4_4over6", "nvfp4"),
    ("nvfp4_4over6+squared", "nvfp4"),
    ("nvfp4_4over6+squared", "nvfp4_4over6"),
    ("nvfp4+guarded", "nvfp4"),
    ("mxfp8+master_none", "mxfp8"),
)
"""Recipes that people choose between, and variants beside what they vary."""


def by_recipe(results: dict) -> dict[str, dict[int, dict]]:
    """Returns each recipe's runs by seed; bf16 comes first."""
    found: dict[str, dict[int, dict]] = {}
    for run in sorted(results["runs"], key=lambda run: run["recipe"] != BASELINE):
        found.setdefault(run["recipe"], {})[run["seed"]] = run
    return found


def differences(runs: dict[int, dict], others: dict[int, dict]) -> list[float]:
    """Returns the held-out losses of runs minus those of others, for every common seed."""
    return [runs[seed]["held_out_loss"] - others[seed]["held_out_loss"] for seed in sorted(runs) if seed in others]


STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t for 95%, two-sided, of 1 to 30 degrees of freedom; beyond it is 1.96."""


class Interval(NamedTuple):
    """A mean difference of losses, and half the width of its 95% interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.mean) > self.half


def interval(results: dict, recipe: str, other: str) -> Interval | None:
    """Returns the difference of two recipes' held-out losses, paired by seed and row; None if the variance is unknown."""
    found = by_recipe(results)
    change = differences(found.get(recipe, {}), found.get(other, {}))
    if not change:
        return None
    if len(change) > 1:
        freedom, between = len(change) - 1, statistics.variance(change)
    else:
        # That of others, each beside bf16.
        several = [differences(runs, found.get(BASELINE, {})) for name, runs in found.items() if name != BASELINE]
        several = [each for each in several if len(each) > 1]
        freedom = sum(len(each) - 1 for each in several)
        if not freedom:
            return None
        between = sum(statistics.variance(each) * (len(each) - 1) for each in several) / freedom
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96
    variance = between / len(change) + over_rows(found[recipe], found[other])
    return Interval(statistics.mean(change), t * variance**0.5)


def over_rows(runs: dict[int, dict], others: dict[int, dict]) -> float:
    """Returns the variance of the mean difference due to the choice of held-out rows; 0 if their losses weren't kept."""
    pairs = [(runs[seed].get("held_out_rows"), others[seed].get("held_out_rows")) for seed in runs if seed in others]
    if not all(a and b for a, b in pairs):
        return 0.0
    rows = [statistics.mean(a - b for a, b in row) for row in zip(*(zip(*pair, strict=True) for pair in pairs), strict=True)]
    return statistics.variance(rows) / len(rows)


def spread(runs: dict[int, dict]) -> float | None:
    """Returns the standard deviation of held-out losses between seeds; None for fewer than two."""
    losses = [run["held_out_loss"] for run in runs.values()]
    return statistics.stdev(losses) if len(losses) > 1 else None


def table_of_losses(results: dict) -> str:
    """Returns each recipe's held-out loss, its difference from bf16 with the same seeds, and its speed.

    All single runs are compared with the same bf16 run, whose deviation is in each difference, so they decide nothing.
    """
    found = by_recipe(results)
    rows = [
        "| recipe | seeds | held-out loss | std of seeds | minus bf16, same seed | verdict | tokens/s | MFU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe, runs in found.items():
        losses = [run["held_out_loss"] for run in runs.values()]
        above, beside = interval(results, recipe, BASELINE), ""
        alone = differences(runs, found.get(BASELINE, {}))
        if recipe != BASELINE and alone:
            beside = "not decided" if len(alone) < 2 else side(above, "above", "below")
        rates = [run["tokens_per_second"] for run in runs.values() if run["tokens_per_second"]]
        mfu = [run["mfu"] for run in runs.values() if run["mfu"]]
        cells = [
            "bf16" if recipe == BASELINE else f"`{recipe}`",
            str(len(losses)),
            f"{statistics.mean(losses):.4f}",
            f"± {spread(runs):.4f}" if len(losses) > 1 else "",
            "" if recipe == BASELINE else ", ".join(f"{each:+.4f}" for each in alone) if above is None else str(above),
            beside,
            f"{statistics.median(rates):,.0f}" if rates else "",
            f"{statistics.median(mfu):.1%}" if mfu else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def side(found: Interval | None, more: str, less: str) -> str:
    """Returns the word for an interval's side of zero."""
    return "not decided" if found is None or not found.decided else more if found.mean > 0 else less


def table_of_pairs(results: dict) -> str:
    """Returns the differences of recipe pairs with several common seeds."""
    rows = ["| recipe | minus | difference of losses | verdict |", "|---|---|---|---|"]
    found = by_recipe(results)
    for recipe, other in PAIRS:
        if len(differences(found.get(recipe, {}), found.get(other, {}))) > 1:
            change = interval(results, recipe, other)
            rows.append(f"| `{recipe}` | `{other}` | {change} | {side(change, 'higher', 'lower')} |")
    return "\n".join(rows)


OPERANDS = ("input rowwise", "input columnwise", "weight", "gradient rowwise", "gradient columnwise")


def table_of_sqnr(results: dict) -> str:
    """Returns the SQNR of each operand in dB, from the same weights and data."""
    rows = [f"| recipe | {' | '.join(OPERANDS)} |", "|---|" + "---|" * len(OPERANDS)]
    for recipe, sqnr in results["operands"].items():
        cells = [f"{sqnr[operand]:.2f}" if operand in sqnr else "" for operand in OPERANDS]
        rows.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def table_of_order(results: dict) -> str:
    """Compares published findings with those made here."""
    found, operands = by_recipe(results), results["operands"]
    noise = spread(found.get(BASELINE, {}))
    rows = [
        "| published | held-out loss, same seeds | verdict by loss | SQNR, dB: largest and smallest change |",
        "|---|---|---|---|",
    ]
    for better, worse, words in PUBLISHED:
        change = differences(found.get(better, {}), found.get(worse, {}))
        changes = {
            operand: operands[better][operand] - operands[worse][operand]
            for operand in OPERANDS
            if {better, worse} <= operands.keys() and operands[better].get(operand) != operands[worse].get(operand)
        }
        ends = dict.fromkeys((max(changes, key=changes.__getitem__), min(changes, key=changes.__getitem__))) if changes else ()
        most = ", ".join(f"{operand} {changes[operand]:+.2f}" for operand in ends) or "not measured"
        judged = judge(interval(results, better, worse)) or verdict(change, noise)
        cells = [words, ", ".join(f"{each:+.4f}" for each in change) or "not run", judged, most]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def judge(found: Interval | None) -> str | None:
    """Judges by an interval, if there is one."""
    if found is None:
        return None
    return f"{'not decided' if not found.decided else 'confirmed' if found.mean < 0 else 'contradicted'}: {found}"


def verdict(change: list[float], noise: float | None) -> str:
    """Judges differences without an interval by bf16's spread between seeds: twice the spread is significant."""
    if not change or noise is None:
        return "not decided"
    mean = statistics.mean(change)
    # A mean of differences of two runs each.
    limit = 2 * noise * (2 / len(change)) ** 0.5
    if abs(mean) <= limit:
        return f"not decided: {mean:+.4f} is within ± {limit:.4f}"
    return f"{'confirmed' if mean < 0 else 'contradicted'}: {mean:+.4f} is outside ± {limit:.4f}"


TABLES = {"losses": table_of_losses, "pairs": table_of_pairs, "operands": table_of_sqnr, "order": table_of_order}


def page_with(page: str, results: dict, name: str) -> str:
    """Returns a page with the tables of results between "<!-- evidence NAME TABLE -->" and "<!-- end -->"."""
    for table, make in TABLES.items():
        place = rf"(<!-- evidence {re.escape(name)} {table} -->\n).*?(<!-- end -->)"
        page = re.sub(place, lambda at, make=make: f"{at[1]}{make(results)}\n{at[2]}", page, flags=re.DOTALL)
    return page
