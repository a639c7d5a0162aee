"""The columns of a tile, and how they are shown."""

from typing import Any

COLUMNS = {
    "row": "number of the row in the kernel's table; its symbol has it",
    "head_dim": "head dim of the tile; smaller head dims are filled with zeros",
    "head_dim_v": "head dim of V and the output in the tile",
    "block_m": "query rows of a head in a tile; backward: of one step",
    "block_n": "keys of one step; backward: of a tile",
    "cluster": "thread blocks of a cluster, which share the tile's keys",
    "heads_per_tile": "heads of a tile, each with its own query rows, K and V",
    "key_parts": "consumers that have the same query rows and divide their keys",
    "consumers": "consumer warpgroups, 64 query rows each; backward: 64 keys, or some products",
    "warps": "warps of a thread block",
    "threads": "threads of a thread block",
    "q_stages": "buffers for Q; with 2, the next tile's Q is loaded ahead",
    "stages": "buffers for K, and as many for V; backward: for Q, and up to as many for dO",
    "scores_live": "S stays in registers through the softmax; if not, a new row max recomputes S",
    "q_in_registers": "Q stays in registers for the whole tile; if not, each step reads it again",
    "producer_registers": "registers of a thread of the producer warpgroup",
    "consumer_registers": "registers of a thread of a consumer warpgroup",
    "shared_bytes": "dynamic shared memory of a thread block, in bytes",
    "blocks_per_sm": "thread blocks resident on an SM",
    "min_queries": "serves calls with more queries than this",
    "max_queries": "serves calls with at most this many queries, unless causal",
    "max_queries_causal": "serves causal calls with at most this many queries",
    "long_queries": "serves only calls with as many queries, causal with four times as many",
    "step_time": "time of a step, in tenths of a microsecond; the tile of the least time serves",
    "tile_time": "time of the start and end of a tile, in tenths of a microsecond",
    "causal_time": "time that a causal mask adds to a call, in tenths of a microsecond",
    "serves_softcap": "serves calls with a softcap; if not, the next row does",
    "groups_heads": "serves calls whose heads of a group share a tile",
    "grouped_only": "serves no other calls",
    "reason": "why this tile: TFLOP/s, or speed over the best peer, on an H200",
}


def queries_served(tile: dict[str, Any]) -> str:
    """The numbers of queries whose calls a tile serves: "any", "65-128", "257+".

    "few tiles" and "grouped" if the number does not matter; "1024+, causal 4096+" for long calls.
    """
    if tile.get("grouped_only"):
        return "grouped"
    if long := tile.get("long_queries"):
        return f"{long}+, causal {4 * long}+"
    most, most_causal = tile.get("max_queries"), tile.get("max_queries_causal")
    least = tile.get("min_queries") or 0
    if most == most_causal == 0:
        return "few tiles"

    def bounds(most: int | None) -> str:
        if most is None:
            return f"{least + 1}+" if least else "any"
        return f"{least + 1}-{most}"

    return bounds(most) + (f", causal -{most_causal}" if most_causal != most else "")


def tile_size(tile: dict[str, Any]) -> str:
    """Query rows by keys. "2 x 128x64": two heads; "64x64x2": two consumers with 64 keys each."""
    size = f"{tile['block_m']}x{tile['block_n']}"
    size += f"x{tile['key_parts']}" if tile.get("key_parts", 1) > 1 else ""
    return size if tile.get("heads_per_tile", 1) == 1 else f"{tile['heads_per_tile']} x {size}"


def tile_head_dim(tile: dict[str, Any]) -> str:
    """The head dim of a tile; "192/128" where V has another."""
    head_dim = tile["head_dim"]
    of_v = tile.get("head_dim_v", head_dim)
    return str(head_dim) if of_v == head_dim else f"{head_dim}/{of_v}"
