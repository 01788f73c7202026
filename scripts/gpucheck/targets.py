"""What the engine is meant to reach on a GPU, held against the rows of one run."""

from typing import Any

Row = dict[str, Any]


def judge(parts: dict[str, dict[str, Any]]) -> list[Row]:
    """One line per target: met, missed, or not measured."""

    def rows(*names: str) -> list[Row]:
        return [row for name in names for row in parts.get(name, {"rows": []})["rows"]]

    engines = rows("engine_graphs", "engine_eager", "engine_fp8")
    large = [row["percent_of_copy_rate"] for row in rows("decode") if "measured_us" in row and row["kv_gb"] >= 1]
    products = [row["percent_of_matmul_rate"] for row in rows("prefill") if "measured_us" in row]
    overheads = [row["overhead"] for row in engines if row.get("overhead") and row["run"].endswith("graphs")]
    errors = [abs(row["error_percent"]) for row in engines if row.get("error_percent") is not None]
    return [
        _target("decode attention >= 80 % of the copy rate at >= 1 GB of KV", large, min, lambda x: x >= 80, "%"),
        _target("prefill attention >= 60 % of the bf16 matmul rate", products, min, lambda x: x >= 60, "%"),
        _target("a decode step of 64 < 1.2 x its kernels", overheads, max, lambda x: x < 1.2, " x"),
        _target("predicted KV tokens within 1.5 %", errors, max, lambda x: x <= 1.5, " % off"),
    ]


def _target(target: str, found: list[float], worst: Any, is_met: Any, unit: str) -> Row:
    if not found:
        return {"target": target, "verdict": "not measured", "found": "-"}
    value = worst(found)
    verdict = "met" if is_met(value) else "missed"
    return {"target": target, "verdict": verdict, "found": f"{value:g}{unit} at worst of {len(found)}"}
