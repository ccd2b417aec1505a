"""Build config/costs/h100_h200.json, the compact table the product reads, from the full fits in ../shared/data/costs.

python bench/build_cost_table.py [SOURCE.json] [TARGET.json]
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT.parent / "shared" / "data" / "costs" / "cost_models.json"
TARGET = ROOT / "config" / "costs" / "h100_h200.json"
KV_NAMES = {"fp8": "fp8", "bfloat16": "bfloat16"}


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else TARGET
    full = json.loads(source.read_text())
    bytes_per_token = full["kv"]["bytes_per_token"]
    models = {}
    for key, m in full["models"].items():
        gpu = m["gpu"].split("_")[0].upper()
        capacity = full["capacity"].get(f"{gpu}|{m['model']}|w={m['weights']}|kv={m['kv']}|tp={m['tp']}")
        if capacity is None:
            continue
        sizes = [v["kv_tokens"] for v in capacity.values() if isinstance(v.get("kv_tokens"), int) and v["kv_tokens"] > 0]
        if not sizes:
            continue
        unified = m["unified"]
        models[key] = {
            "tp": m["tp"],
            "g_rows": unified["G_table"]["n"],
            "g_ms": unified["G_table"]["ms"],
            "a_p": list(unified["A_p"].values()),
            "a_d": list(unified["A_d"].values()),
            "kv_bytes_per_token": bytes_per_token[f"{m['model']}_{'fp8' if m['kv'] == 'fp8' else 'fp16'}"],
            "kv_capacity_tokens": round(sum(sizes) / len(sizes)),
        }
    link = full["kv_transfer"]["nvlink_intra_node"]
    table = {
        "schema": "fluidpd-cost-table/1",
        "units": "ms, tokens, bytes; a_p = p0 ms, p1 ms/token, p2 ms/token^2; a_d = d0 ms, d1 ms/sequence, d2 ms/context token",
        "source": full["provenance"]["source"],
        "licence": "Apache-2.0 (AIConfigurator); KV transfer: MIT (Vidur). See NOTICE.",
        "engine_overhead_ms": full["engine_overhead_ms"]["default_per_step"],
        "kv_transfer": {"latency_ms": link["alpha_ms"], "gb_per_s": link["beta_GBps"]},
        "models": models,
    }
    target.write_text(json.dumps(table, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{target}: {len(models)} models, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
