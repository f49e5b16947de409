"""Every Redis key name of the data plane, and nothing else.

A name is `af:{<run>}:<suffix>`, so all keys of a run hash to one slot of a cluster; what servers know of all runs, the
registry, is in a slot of its own. The same table is rendered into the Lua library (`lua_table`), so Python and the
functions can never disagree about a name. Read by the store modules.
"""

SCHEMA_VERSION = 7
"""Version of keys and functions together. Data of another version is refused at start, never guessed."""
READ_AS_IT_IS = (6,)
"""Earlier versions whose data these functions read and continue; such data has this version from then on."""

# No run is named `.`, so the registry's tag is no run's.
RUNS_KEY = "af:{.}:runs"
"""Sorted set of run ids by creation time; those too whose creation was cut off, until a sweep."""
DELETING_KEY = "af:{.}:deleting"
"""Set of run ids whose keys may have to be removed."""
PAYLOADS_KEY = "af:{.}:payloads"
"""Incarnation of the store that holds payloads outside, as it was seen last."""
REVOKED_TOKENS_KEY = "af:{.}:revoked_tokens"
"""Sorted set of ids of revoked tokens by the time they expire."""

TRAIN_LANE = "train"

# kind -> suffix; each `%s` is one part of the name.
_SUFFIXES = {
    # run
    "run": "run",
    "policies": "policies",
    "policy": "policy:%s",
    "counters": "counters",
    "events": "events",
    # tasks
    "known": "known",
    "task": "task:%s",
    "lane": "lane:%s",
    "retry": "retry:%s",
    "leases": "leases",
    "copies": "copies",
    "durations": "durations",
    "open": "open",
    "outstanding": "outstanding:%s",
    "settling": "settling",
    "dead": "dead",
    "failures": "failures",
    "poison": "poison",
    "trace": "trace:%s",
    "traced": "traced",
    # trajectories and groups
    "members": "trajectories:%s",
    "owners": "owners",
    "payload": "payload:%s:%s",
    "pack": "pack:%s",
    "packs": "packs",
    "packs_ending": "packs_ending",
    "packs_ended": "packs_ended",
    "written": "written:%s",
    "group": "group:%s",
    "ready": "ready:%s",
    "recent": "recent:%s",
    "routed": "routed",
    # batches
    "batch": "batch:%s",
    "batch_leases": "batch_leases",
    "steps": "steps:%s",
    "unpublished": "unpublished:%s",
    "staleness": "staleness:%s",
    "consumed": "consumed:%s",
    "replay": "replay:%s",
    "replay_versions": "replay_versions:%s",
    # history
    "series": "series:%s",
    "series_names": "series_names:%s",
    "history": "history",
    # archive
    "archive": "archive",
    "archive_entries": "archive_entries",
    # versions
    "versions": "versions:%s",
    "version_steps": "version_steps:%s",
    "pins": "pins:%s",
    "ratings": "ratings:%s",
    # plug-ins
    "switch": "switch:%s",
    "plugin_state": "plugin_state:%s",
    "plugin_revisions": "plugin_revisions",
    # nodes
    "nodes": "nodes",
    "node": "node:%s",
    "node_leases": "node_leases:%s",
    # evaluations
    "evaluations": "evaluations",
    "evaluation": "evaluation:%s",
    "evaluation_journal": "evaluation_journal:%s",
    "evaluation_tasks": "evaluation_tasks:%s",
    "open_evaluations": "open_evaluations",
    "waiting_evaluations": "waiting_evaluations",
}


def own_key(name: str, tag: str = "") -> str:
    """Name of a key that a Redis keeps of itself: `schema`; `incarnation`, the identity of its data set; `beat`, a
    counter that is written to learn how far the disk, or a replica, has come. `tag` hashes to a slot of a cluster's
    primary.
    """
    return f"af:{name}:{{{tag}}}" if tag else f"af:{name}"


class Keys:
    """Key names of one run."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"af:{{{run_id}}}:"

    def of(self, kind: str, *parts: str) -> str:
        """Return the name of a key; KeyError for an unknown kind, TypeError for a wrong number of parts."""
        return self.prefix + _SUFFIXES[kind] % parts


def lua_table() -> str:
    """Return Lua source of a table `K` with one function per kind: `K.task(P, id)` where P is the run's prefix."""
    lines = ["local K = {}"]
    for kind, suffix in _SUFFIXES.items():
        names = [f"a{index}" for index in range(suffix.count("%s"))]
        pieces = suffix.split("%s")
        parts = [f"'{pieces[0]}'"]
        for name, piece in zip(names, pieces[1:], strict=True):
            parts += [name, f"'{piece}'"] if piece else [name]
        lines.append(f"function K.{kind}({', '.join(['P', *names])}) return P .. {' .. '.join(parts)} end")
    return "\n".join(lines)
