"""Prints how many code lines each room has: `python tests/architecture/size_table.py`.

What counts is said in `tests/support/code_size.py`; `test_size_budgets.py` holds the totals to their budgets.
"""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.code_size import by_room, code_lines, other_languages, product_modules, suite_modules
from support.source_tree import modules, recipe_modules, roots


def main() -> None:
    """Print one line per room, then the totals."""
    everything = [module for folder in roots().values() for module in modules(folder)] + recipe_modules()
    out = sys.stdout
    out.write(f"{'room':52} {'modules':>7} {'lines':>6} {'median':>6} {'longest':>7}\n")
    for room, held in by_room(everything).items():
        sizes = [code_lines(module) for module in held]
        out.write(f"{room:52} {len(held):7} {sum(sizes):6} {median(sizes):6.0f} {max(sizes):7}\n")
    product = [code_lines(module) for module in product_modules()]
    summary = f"{sum(product)} code lines, median {median(product):.0f}"
    out.write(f"\nproduct (without benchmarks and recipes): {summary}\n")
    others = other_languages()
    out.write(", ".join(f"{language} {lines}" for language, lines in others.items()))
    out.write(f"\nproduct in all languages: {sum(product) + sum(others.values())} code lines\n")
    out.write(f"tests: {sum(code_lines(module) for module in suite_modules())} code lines\n")


if __name__ == "__main__":
    main()
