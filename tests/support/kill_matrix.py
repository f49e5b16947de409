"""Which process is killed in which window: the table behind `test_kills.py`.

Each run is one long life of the loop with several kills, so that faults meet the leftovers of earlier ones.
A failpoint stands once per run; the numbers say which of its hits counts, spread so that the kills of a run
follow each other. Windows in the words of the protocol: leased, generating, pushed before commit, group half
full, batch bound, after intent, after the optimizer step, parts uploaded, manifest written, published,
checkpoint half written.

CI lives the runs of `IN_CI`: every word above, every process, more than 30 pairs of window and victim, and a Valkey
that loses its last writes. The others cost a minute or more each, repeat what these show, and are lived in soak:
"a batch in hand" and "one kills the other" meet windows of the above with another victim, "everything dies" has the
launcher's death, which "the whole path" ends with, in other windows, "Valkey dies" loses nothing.
"""

from support.chaos import Kill

MATRIX: dict[str, tuple[Kill, ...]] = {
    "the whole path": (
        Kill("dataflow.leased", "dataflow", 3),
        Kill("dataflow.storing", "node", 20),
        Kill("dataflow.committed", "node", 42),
        Kill("raas.generating", "node", 50),
        Kill("raas.pushed", "node", 70),
        Kill("dataflow.bound", "trainer", 2),
        Kill("dataflow.acked", "dataflow", 4),
        Kill("trainer.step_taken", "valkey", 5),
        Kill("engine.before_swap", "engine", 4),
        Kill("weights.publish.parts_uploaded", "launcher", 8),
    ),
    "a group half full": (
        Kill("raas.leased", "node", 5),
        Kill("dataflow.leased", "valkey", 9),
        Kill("dataflow.storing", "dataflow", 26),
        Kill("dataflow.committed", "dataflow", 58),
        Kill("raas.push", "dataflow", 90),
        Kill("trainer.intent_recorded", "trainer", 3),
        Kill("trainer.checkpoint_half_written", "trainer", 2),
        Kill("dataflow.published", "dataflow", 7),
        Kill("trainer.committed", "dataflow", 8),
        Kill("engine.decode_step", "engine", 300),
    ),
    "a batch in hand": (
        Kill("raas.generating", "engine", 70),
        Kill("trainer.step_acked", "trainer", 3),
        Kill("trainer.committed", "trainer", 6),
        Kill("dataflow.leased", "node", 30),
        Kill("trainer.checkpoint_written", "launcher", 5),
    ),
    "a version on its way": (
        Kill("dataflow.bound", "dataflow", 2),
        Kill("trainer.before_publish", "trainer", 2),
        Kill("weights.publish.parts_uploaded", "trainer", 4),
        Kill("weights.publish.before_manifest", "trainer", 6),
        Kill("weights.publish.after_manifest", "trainer", 8),
        Kill("trainer.announced", "trainer", 10),
        Kill("weights.mirror.tile_torn", "node", 3),
        Kill("raas.activate", "node", 6),
        Kill("dataflow.published", "valkey", 9),
    ),
    "one kills the other": (
        Kill("raas.pushed", "engine", 30),
        Kill("trainer.step_taken", "trainer", 4),
        Kill("trainer.checkpoint_written", "trainer", 3),
        Kill("dataflow.published", "trainer", 7),
        Kill("raas.generating", "dataflow", 120),
        Kill("engine.before_swap", "node", 6),
    ),
    "everything dies": (
        Kill("dataflow.committed", "launcher", 20),
        Kill("raas.leased", "launcher", 12),
        Kill("dataflow.bound", "launcher", 3),
        Kill("trainer.step_taken", "launcher", 4),
        Kill("trainer.checkpoint_half_written", "launcher", 4),
        Kill("weights.publish.after_manifest", "launcher", 9),
        Kill("dataflow.published", "launcher", 11),
    ),
    "Valkey dies": (
        Kill("raas.generating", "valkey", 20),
        Kill("dataflow.storing", "valkey", 60),
        Kill("dataflow.bound", "valkey", 2),
        Kill("dataflow.acked", "valkey", 6),
        Kill("weights.publish.after_manifest", "valkey", 6),
        Kill("trainer.checkpoint_half_written", "valkey", 4),
    ),
    "Valkey dies and loses its last writes": (
        Kill("dataflow.committed", "valkey", 30, cut_bytes=1),
        Kill("raas.activated", "node", 5),
        Kill("dataflow.leased", "valkey", 20, cut_bytes=1),
        Kill("dataflow.bound", "valkey", 3, cut_bytes=1),
        Kill("dataflow.acked", "valkey", 9, cut_bytes=1),
        Kill("dataflow.published", "valkey", 7, cut_bytes=1),
        Kill("trainer.step_taken", "valkey", 9, cut_bytes=2000),
    ),
}
IN_CI = (
    "the whole path",
    "a group half full",
    "a version on its way",
    "Valkey dies and loses its last writes",
)
