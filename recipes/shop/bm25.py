"""Search by the words of a text, in memory, with nothing but the standard library.

Invariant: equal texts and queries give equal results, in every process. Used by shop.py.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from heapq import nlargest
from math import log


class Bm25:
    """Okapi BM25 over named texts (k1 1.2, b 0.75); equal scores keep the order of the texts."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        counts = {name: Counter(_words(text)) for name, text in texts.items()}
        mean = sum(each.total() for each in counts.values()) / len(counts)
        holders = Counter(word for each in counts.values() for word in each)
        self._weights = defaultdict[str, list[tuple[str, float]]](list)
        for name, words in counts.items():
            norm = 1.2 * (0.25 + 0.75 * words.total() / mean)
            for word, number in words.items():
                rarity = log(1 + (len(counts) - holders[word] + 0.5) / (holders[word] + 0.5))
                self._weights[word].append((name, rarity * 2.2 * number / (number + norm)))

    def search(self, query: str, *, top_k: int) -> list[str]:
        """Names of the best texts that share a word with the query, the best first."""
        scores = defaultdict[str, float](float)
        for word in dict.fromkeys(_words(query)):
            for name, weight in self._weights.get(word, ()):
                scores[name] += weight
        return nlargest(top_k, scores, key=scores.__getitem__)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
