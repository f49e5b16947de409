"""Every failpoint of the system, each with the moment it stands for.

One table, which any process can read without a daemon. Names are `<root>.<moment>` or `<root>.<work>.<moment>`.
"""

from collections.abc import Mapping
from types import MappingProxyType

KNOWN: Mapping[str, str] = MappingProxyType(
    {
        # dataflow
        "dataflow.leased": "leases are recorded, the node has not received them",
        "dataflow.storing": "pushed episodes are validated and about to be stored and committed",
        "dataflow.committed": "an episode is committed, its node has no acknowledgement; counted per episode of a push",
        "dataflow.bound": "a batch is bound to its step, its manifest is not sealed and the trainer knows nothing",
        "dataflow.acked": "a stage of a step is recorded, the trainer has no answer",
        "dataflow.run_listed": "a run is listed, nothing else of it is there",
        "dataflow.run_created": "a run is there, its creator has no answer",
        "dataflow.deleting": "a run is marked as deleted, it is still listed and its keys are there",
        "dataflow.deleted": "a run is marked and listed as deleted, its keys are still there",
        "dataflow.keys_removed": "a deleted run has no keys, it is still listed as being deleted",
        "dataflow.archive_sealed": "trajectories are about to be written to the archive, nothing of them is there",
        "dataflow.payloads_stored": "payloads are outside Redis, nothing refers to them yet",
        "dataflow.archive_stored": "trajectories are in the archive, Redis still holds them",
        "dataflow.published": "a version is announced, the trainer has no answer",
        # raas
        "raas.joined": "the server counts on the node, nothing of it runs yet",
        "raas.leased": "a lease arrived and is about to be run",
        "raas.generating": "an episode is about to call its engine",
        "raas.spooled": "a finished episode is in the node's spool, nothing of it is sent",
        "raas.push": "an episode is about to be written to the push stream, counted per episode of a push",
        "raas.pushed": "an episode is written and its acknowledgement is not read yet; counted per episode of a push",
        "raas.draining": "a drain began: no new leases are taken, those held still run",
        "raas.activate": "a version is fetched and verified, the engine still serves the old one",
        "raas.activated": "the engine serves the new version, the server does not know it yet",
        # trainer
        "trainer.read_ahead": "the next step's batch is bound beside the step in hand, nothing of it is fetched",
        "trainer.intent_recorded": "the server knows what the step will train on, nothing is trained",
        "trainer.micro_batch": "a micro-batch is about to be computed, by every rank",
        "trainer.step_taken": "the optimizer step is taken, neither the ledger nor the server knows",
        "trainer.step_acked": "the step is acknowledged, its version is not published",
        "trainer.before_publish": "a version is about to be encoded, its step is acknowledged",
        "trainer.committed": "a version is committed in the store, it is not announced",
        "trainer.announced": "a version is announced, the loop does not know it yet",
        "trainer.checkpoint_half_written": "a checkpoint's tensors are on disk, it has no position and no name yet",
        "trainer.checkpoint_written": "a checkpoint is durable, the server still keeps its payloads",
        # weights
        "weights.publish.uploading": "a part is about to be stored; parts before it, and other ranks', may be",
        "weights.publish.parts_uploaded": "all parts and assets of a version are stored, its manifest is not",
        "weights.publish.before_manifest": "the manifest is about to be created, which commits the version",
        "weights.publish.after_manifest": "the version is committed and not announced",
        "weights.compaction.parts_uploaded": "a merged delta's or snapshot's parts are stored, nothing names them",
        "weights.compaction.visible": "a merged delta or snapshot is offered, nobody has taken it",
        "weights.log_checkpoint.stored": "a checkpoint of the log is stored, superseded ones are still there",
        "weights.collection.tombstoned": "a round of collection names its parts, nothing is decided",
        "weights.collection.deleting": "an added way or a part is about to be deleted; others may be",
        "weights.mirror.fetched": "all that a version is made of lies in the journal, the mirror is untouched",
        "weights.mirror.applying": "the mirror's state says that a version is being applied, no tile is written",
        "weights.mirror.tile": "a tile's new content lies in a slot of the journal, the mirror has the old one",
        "weights.mirror.tile_torn": "half of a tile of the mirror is written over",
        "weights.mirror.applied": "all tensors of the mirror are new and verified, its state is not",
        "weights.mirror.replaced": "a new weights file stands in the place of the old one, the state says neither",
        # engine
        "engine.before_swap": "new weights are loaded and checked, the old ones still serve",
        "engine.decode_step": "the running requests are about to get one token each",
    }
)
