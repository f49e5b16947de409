"""Which process is killed in which window: the table behind `test_kills.py`.

Each run is one long life of the loop with several kills, so that faults meet the leftovers of earlier ones.
A failpoint stands once per run; the numbers say which of its hits counts, spread so that the kills of a run
follow each other. Windows in the words of the protocol: leased, generating, pushed before commit, group half
full, batch bound, after intent, after the optimizer step, parts uploaded, manifest written, published,
checkpoint half written.
"""

from support.chaos import Kill


def _kill(failpoint: str, victim: str, nth: int, *, cut: int = 0) -> Kill:
    return Kill(failpoint=failpoint, victim=victim, nth=nth, cut_bytes=cut)


MATRIX: dict[str, tuple[Kill, ...]] = {
    "the whole path": (
        _kill("dataflow.leased", "dataflow", 3),
        _kill("dataflow.storing", "node", 20),
        _kill("raas.generating", "node", 50),
        _kill("raas.pushed", "node", 70),
        _kill("dataflow.bound", "trainer", 2),
        _kill("trainer.step_taken", "valkey", 5),
        _kill("engine.before_swap", "engine", 4),
        _kill("weights.publish.parts_uploaded", "launcher", 8),
    ),
    "a group half full": (
        _kill("raas.leased", "node", 5),
        _kill("dataflow.leased", "valkey", 9),
        _kill("dataflow.storing", "dataflow", 26),
        _kill("dataflow.committed", "dataflow", 58),
        _kill("raas.push", "dataflow", 90),
        _kill("trainer.intent_recorded", "trainer", 3),
        _kill("trainer.checkpoint_half_written", "trainer", 2),
        _kill("dataflow.published", "dataflow", 7),
        _kill("engine.decode_step", "engine", 300),
    ),
    "a batch in hand": (
        _kill("dataflow.bound", "dataflow", 2),
        _kill("dataflow.committed", "node", 42),
        _kill("raas.generating", "engine", 70),
        _kill("trainer.step_acked", "trainer", 3),
        _kill("trainer.committed", "trainer", 6),
        _kill("raas.activated", "node", 5),
        _kill("dataflow.leased", "node", 30),
        _kill("trainer.checkpoint_written", "launcher", 5),
    ),
    "a version on its way": (
        _kill("trainer.before_publish", "trainer", 2),
        _kill("weights.publish.parts_uploaded", "trainer", 4),
        _kill("weights.publish.before_manifest", "trainer", 6),
        _kill("weights.publish.after_manifest", "trainer", 8),
        _kill("trainer.announced", "trainer", 10),
        _kill("weights.mirror.tile_torn", "node", 3),
        _kill("raas.activate", "node", 6),
        _kill("dataflow.published", "valkey", 9),
    ),
    "one kills the other": (
        _kill("raas.pushed", "engine", 30),
        _kill("dataflow.acked", "dataflow", 4),
        _kill("trainer.step_taken", "trainer", 4),
        _kill("trainer.checkpoint_written", "trainer", 3),
        _kill("dataflow.published", "trainer", 7),
        _kill("raas.generating", "dataflow", 120),
        _kill("engine.before_swap", "node", 6),
        _kill("trainer.committed", "dataflow", 9),
    ),
    "everything dies": (
        _kill("dataflow.committed", "launcher", 20),
        _kill("raas.leased", "launcher", 12),
        _kill("dataflow.bound", "launcher", 3),
        _kill("trainer.step_taken", "launcher", 4),
        _kill("trainer.checkpoint_half_written", "launcher", 4),
        _kill("weights.publish.after_manifest", "launcher", 9),
        _kill("dataflow.published", "launcher", 11),
    ),
    "Valkey dies": (
        _kill("raas.generating", "valkey", 20),
        _kill("dataflow.storing", "valkey", 60),
        _kill("dataflow.bound", "valkey", 2),
        _kill("dataflow.acked", "valkey", 6),
        _kill("weights.publish.after_manifest", "valkey", 6),
        _kill("trainer.checkpoint_half_written", "valkey", 4),
    ),
    "Valkey dies and loses its last writes": (
        _kill("dataflow.committed", "valkey", 30, cut=1),
        _kill("dataflow.leased", "valkey", 20, cut=1),
        _kill("dataflow.bound", "valkey", 3, cut=1),
        _kill("dataflow.acked", "valkey", 9, cut=1),
        _kill("dataflow.published", "valkey", 7, cut=1),
        _kill("trainer.step_taken", "valkey", 9, cut=2000),
    ),
}
