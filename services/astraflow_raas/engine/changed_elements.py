"""Loading into SGLang only what differs between two versions: orders for `astraflow_engine.changed_loader`.

Invariant: an order names every element that differs from the version before, with the values of the mirror, which is
held meanwhile; whatever stands in the way is a reason to load the whole model instead, and the first one ends it for
this engine. One per started engine, used by `http`; SGLang calls the loader by an option of its own, unpatched.
"""

import json
import shutil
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex

import numpy as np

from astraflow_weights.codec.tensors import flat_unsigned
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.mirror.checkpoint import DamagedCheckpoint, map_model
from astraflow_weights.store.layout import WEIGHTS_FILE

# Not imported: it needs torch, which the node has no use for.
_SOURCE = Path(__file__).parents[2] / "astraflow_engine" / "changed_loader.py"
_MODULE = "astraflow_changed_loader"
LOADER = f"{_MODULE}.apply"
"""As SGLang's options name it."""
_NO_TENSORS = b64encode(b"\x80\x04]\x94.").decode()
"""An empty list, pickled: what SGLang hands to the loader besides the model."""


class WholeLoad(Exception):
    """Why the whole model must be loaded. Stays inside the engine's room."""


class ChangedOrders:
    """The orders of one engine, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        """Puts the loader there, for `environment`. Raises OSError."""
        self._folder = folder
        self._nonce = ""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_SOURCE, folder / f"{_MODULE}.py")

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Where SGLang finds the loader."""
        paths = [str(self._folder), inherited.get("PYTHONPATH", "")]
        return {"PYTHONPATH": ":".join(filter(None, paths))}

    def write(self, changes: ChangedElements, *, model_dir: Path) -> None:
        """Write the order for what a mirror changed last; its folder is held. Blocks. Raises WholeLoad."""
        self._nonce, tensors, end = token_hex(8), {}, 0
        try:
            model = map_model(model_dir)
            with (self._folder / "changes.bin").open("wb") as file:
                for name, positions in changes.positions.items():
                    tensors[name] = end, len(positions)
                    end += file.write(positions.astype(np.uint32).data)
                    end += file.write(flat_unsigned(model[name])[positions].data)
            order = {
                "nonce": self._nonce,
                "version": changes.version,
                "mirror": str(model_dir / WEIGHTS_FILE),
                "tensors": tensors,
            }
            (self._folder / "order.json").write_text(json.dumps(order))
        except (OSError, DamagedCheckpoint) as error:
            raise WholeLoad(f"its changes cannot be written: {error}") from error

    def request(self, *, version: int, num_ranks: int) -> dict[str, object]:
        """What to ask of /update_weights_from_tensor on so many tensor-parallel ranks."""
        return {
            "serialized_named_tensors": [_NO_TENSORS] * num_ranks,
            "load_format": LOADER,
            "weight_version": str(version),
            "flush_cache": False,
        }

    def require_done(self, *, num_ranks: int) -> dict[str, object]:
        """What the first of so many ranks did, when all have carried out the order. Raises WholeLoad."""
        outcomes: list[dict[str, object]] = []
        for rank in range(num_ranks):
            try:
                outcome = json.loads((self._folder / f"outcome-{rank}.json").read_text())
            except (OSError, ValueError) as error:
                raise WholeLoad(f"rank {rank} says nothing of its order: {error}") from error
            if outcome.get("nonce") != self._nonce:
                raise WholeLoad(f"rank {rank} did not carry out the order")
            if "error" in outcome:
                raise WholeLoad(f"rank {rank}: {outcome['error']}")
            outcomes.append(outcome)
        return outcomes[0]
