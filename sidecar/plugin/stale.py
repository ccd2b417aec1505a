"""Forgets what this decode worker cached about a prefill worker that changed its role.

A decode worker keeps addresses and parameters of each prefill worker for ever. After P -> D -> P they are wrong. The bootstrap
server never went away, so no heartbeat notices, and every request of the pair would hang. Never touches another worker's entries.
"""

from __future__ import annotations

import importlib
from typing import Any

from sidecar.plugin.engine import Engine
from sidecar.plugin.rooms import normal_address

USES = (
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver.disconnect_endpoint",
    "sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
)


def drop_stale(engine: Engine, bootstrap: str) -> dict[str, float]:
    """Every rank. A prefill worker keeps nothing about other prefill workers, so there it is done at once."""
    if not engine.is_decode:
        return {"dropped": 0.0}
    keeper: Any = engine.scheduler.disagg_decode_prealloc_queue.kv_manager
    wanted = normal_address(bootstrap)
    endpoints: set[str] = set()
    dropped = 0
    with keeper.connection_lock:
        for key in list(keeper.connection_pool):
            # A key is address_dprank_cprank_tprank; a mere prefix would also fit another port.
            if normal_address(key.rsplit("_", 3)[0]) == wanted:
                endpoints.update(_endpoints(keeper.connection_pool.pop(key)))
                dropped += 1
        for address in list(keeper.prefill_info_table):
            if normal_address(address) == wanted:
                del keeper.prefill_info_table[address]
                keeper.heartbeat_failures.pop(address, None)
                dropped += 1
    conn: Any = importlib.import_module("sglang.srt.disaggregation.common.conn")
    for endpoint in endpoints:
        conn.CommonKVReceiver.disconnect_endpoint(endpoint)
    return {"dropped": float(dropped)}


def _endpoints(infos: Any) -> set[str]:
    network: Any = importlib.import_module("sglang.srt.utils.network")
    return {
        network.NetworkAddress(info["rank_ip"], int(info["rank_port"])).to_tcp()
        for info in infos
        if info.get("rank_ip") and info.get("rank_port")
    }
