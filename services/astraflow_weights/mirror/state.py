"""What a mirror's folder says about itself: which version it holds, and what is being done to it.

Invariant: the state is replaced atomically and names everything by content: version and manifest of what is held, and
while another version is applied, also that one and every part that leads to it. Whoever opens the folder can therefore
finish, undo or repair, whatever died in it. `mirror` writes it; whoever loads reads it.

    <root>/checkpoint/    model.safetensors and assets: what an engine loads
    <root>/state.json     CLEAN(v), or APPLYING(v→w)
    <root>/meta/          per version: its manifest, its schema, and the digests of its tiles
    <root>/journal/       what a version that is applied next is made from
    <root>/model.partial  a first version that is being fetched
    <root>/lock, puller   held by whoever loads or applies; by whoever advances
"""

import secrets
from pathlib import Path

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from astraflow.errors import IncompatibleError
from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.schema import Schema
from astraflow_weights.durable import replace_synced
from astraflow_weights.errors import CorruptManifest, Edge
from astraflow_weights.mirror.tile_grid import DIGEST_BYTES, TileDigests, TileGrid
from astraflow_weights.store.layout import WEIGHTS_FILE
from astraflow_weights.versions.manifest import (
    Manifest,
    ManifestEntry,
    PartRef,
    decode_entry,
    encode_entry,
    resolved,
)
from astraflow_weights.versions.planner import PullStep

SCHEMA_VERSION = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SEAL_BYTES = 16


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Holding(_Record):
    """A version, by its number and by the sha256 of its log entry (hexadecimal)."""

    version: int
    manifest_sha256: str


class PartRecord(_Record):
    """A `PartRef`."""

    key: str
    size_bytes: int
    sha256: str


class StepRecord(_Record):
    """A `PullStep`."""

    version: int
    base_version: int | None
    parts: tuple[PartRecord, ...]


class Applying(_Record):
    """APPLYING: what is being made of what is held; without steps a whole file takes its place."""

    to: Holding
    steps: tuple[StepRecord, ...]


class MirrorState(_Record):
    """Content of `state.json`. CLEAN when nothing is being applied."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    policy_id: str
    held: Holding | None
    applying: Applying | None = None
    whole: bool = True
    """False while damage is known that is not repaired yet: nobody loads."""
    boot_id: str
    """Boot of the machine in which this was written: after another one, unsynced bytes are gone."""
    written_by: str
    """Drawn anew at every write, so a reader sees that another process has been here."""


def new_state(
    *,
    run_id: str,
    policy_id: str,
    held: Holding | None,
    applying: Applying | None = None,
    whole: bool = True,
) -> MirrorState:
    """A state written now, in this boot."""
    return MirrorState(
        run_id=run_id,
        policy_id=policy_id,
        held=held,
        applying=applying,
        whole=whole,
        boot_id=boot_id(),
        written_by=secrets.token_hex(8),
    )


def boot_id() -> str:
    """Which boot of the machine this is; empty where the system does not say."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def applying(to: Holding, steps: tuple[PullStep, ...]) -> Applying:
    """The record of a plan."""
    return Applying(to=to, steps=tuple(_step_record(step) for step in steps))


def steps_in(record: Applying) -> tuple[PullStep, ...]:
    """The plan in a record."""
    return tuple(
        PullStep(
            edge=Edge(version=step.version, base_version=step.base_version),
            parts=tuple(
                PartRef(key=part.key, size_bytes=part.size_bytes, sha256=bytes.fromhex(part.sha256))
                for part in step.parts
            ),
        )
        for step in record.steps
    )


class MirrorFiles:
    """The files of one mirror's folder. Knows nothing of what they mean together."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoint = root / "checkpoint"
        self.weights = self.checkpoint / WEIGHTS_FILE
        self.partial = root / "model.partial"
        self.journal = root / "journal"
        self._state = root / "state.json"
        self._meta = root / "meta"

    def make_folders(self) -> None:
        """Create what is missing."""
        for folder in (self.checkpoint, self.journal, self._meta):
            folder.mkdir(parents=True, exist_ok=True)

    def read_state(self) -> MirrorState | None:
        """The state; None when there is none that this release can read: then nothing is held."""
        try:
            state = MirrorState.model_validate_json(self._state.read_bytes())
        except (OSError, ValidationError):
            return None
        return state if state.schema_version == SCHEMA_VERSION else None

    def write_state(self, state: MirrorState) -> None:
        """Replace the state."""
        replace_synced(self._state, state.model_dump_json(indent=1).encode())

    def write_manifest(self, holding: Holding, manifest: Manifest) -> None:
        """Keep what a version must be."""
        replace_synced(self._meta_path(holding, "schema"), manifest.schema.content)
        replace_synced(self._meta_path(holding, "manifest"), encode_entry(manifest.entry()))

    def read_manifest(self, holding: Holding) -> Manifest | None:
        """What a version must be; None when that is missing or damaged."""
        try:
            entry = decode_entry(self._meta_path(holding, "manifest").read_bytes())
            schema = Schema.decode(self._meta_path(holding, "schema").read_bytes())
            assert isinstance(entry, ManifestEntry)
            return resolved(entry, schema=schema, key_digests=None)
        except (OSError, ValueError, CorruptManifest, IncompatibleError):
            return None

    def write_digests(self, holding: Holding, digests: TileDigests) -> None:
        """Keep the digests of a version's tiles."""
        content = digests.tobytes()
        replace_synced(self._meta_path(holding, "tiles"), content + xxhash.xxh3_128_digest(content))

    def read_digests(self, holding: Holding, grid: TileGrid) -> TileDigests | None:
        """The digests of a version's tiles; None when they are missing or damaged."""
        path = self._meta_path(holding, "tiles")
        content = path.read_bytes() if path.is_file() else b""
        table, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
        if len(table) != len(grid.tiles) * DIGEST_BYTES or xxhash.xxh3_128_digest(table) != seal:
            return None
        return np.frombuffer(table, np.uint8).reshape(-1, DIGEST_BYTES)

    def forget_but(self, *holdings: Holding | None) -> None:
        """Remove what is kept about other versions."""
        kept = {holding.manifest_sha256 for holding in holdings if holding is not None}
        for path in self._meta.iterdir():
            if path.stem not in kept:
                path.unlink(missing_ok=True)

    def wrong_assets(self, manifest: Manifest) -> list[str]:
        """File names of assets that the checkpoint lacks or has with other content."""
        wrong = []
        for asset in manifest.assets:
            path = self.checkpoint / asset.file_name
            if not path.is_file() or sha256(path.read_bytes()) != asset.blob.sha256:
                wrong.append(asset.file_name)
        return wrong

    def remove_other_assets(self, manifest: Manifest) -> None:
        """Leave nothing in the checkpoint that does not belong to this version."""
        wanted = {WEIGHTS_FILE, *(asset.file_name for asset in manifest.assets)}
        for path in self.checkpoint.iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)

    def _meta_path(self, holding: Holding, kind: str) -> Path:
        return self._meta / f"{holding.manifest_sha256}.{kind}"


def _step_record(step: PullStep) -> StepRecord:
    return StepRecord(
        version=step.edge.version,
        base_version=step.edge.base_version,
        parts=tuple(
            PartRecord(key=part.key, size_bytes=part.size_bytes, sha256=part.sha256.hex())
            for part in step.parts
        ),
    )
