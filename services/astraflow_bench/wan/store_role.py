"""The store of the experiment: a radosgw in its namespace, and how fast it answers without any link.

Started by `experiment` as a process; see `messages`.
"""

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from astraflow_bench.wan import messages
from astraflow_bench.wan.radosgw import RadosGateway
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectStore, open_store

_OBJECT_BYTES = 16 * 2**20


def main() -> None:
    """Serve until the orders end."""
    messages.take_stdout()
    orders = messages.orders()
    settings = next(orders)
    folder = Path(settings["folder"])
    folder.mkdir()
    with RadosGateway(folder, host="0.0.0.0") as gateway:
        bucket = gateway.create_bucket(settings["bucket"])
        messages.say("ready", port=gateway.port, credentials_file=str(gateway.credentials_file))
        store = open_store(f"s3://{bucket}/calibration", settings=gateway.settings())
        for order in orders:
            rate = _serving_bytes_per_s(store, num_objects=order["num_objects"])
            messages.say("served", bytes_per_s=rate)


def _serving_bytes_per_s(store: ObjectStore, *, num_objects: int) -> float:
    """Bytes per second that one client reads on loopback, as many objects at a time as a node."""
    keys = [f"object-{number}" for number in range(num_objects)]
    for key in keys:
        store.put_if_absent(key, secrets.token_bytes(_OBJECT_BYTES))
    with ThreadPoolExecutor(StoreSettings().transfer_threads) as pool:
        started = time.monotonic()
        size = sum(pool.map(lambda key: len(store.get(key)), keys))
        seconds = time.monotonic() - started
    for key in keys:
        store.delete(key)
    return size / seconds


if __name__ == "__main__":
    main()
