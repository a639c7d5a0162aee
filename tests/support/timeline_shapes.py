"""Calls whose tiles are all those that a timeline can record."""

SHAPES = {
    "d64": {"batch": 4, "seqlen": 1500, "heads": 8, "head_dim": 64},
    "d64-causal": {"batch": 4, "seqlen": 512, "heads": 32, "head_dim": 64, "causal": True},
    "d64-pairs": {"batch": 64, "seqlen": 100, "heads": 9, "head_dim": 64, "causal": True},
    "d64-short": {"batch": 4, "seqlen": 100, "heads": 8, "head_dim": 64},
    "d128-short": {"batch": 5, "seqlen": 200, "heads": 16, "head_dim": 128},
    "d128-few": {"batch": 1, "seqlen": 1000, "heads": 8, "head_dim": 128, "causal": True},
    "d128": {"batch": 1, "seqlen": 4096, "heads": 16, "head_dim": 128},
    "d128-causal": {"batch": 3, "seqlen": 1000, "heads": 16, "head_dim": 128, "causal": True},
    "d128-chunk": {
        "seqlen_q": 65,
        "seqlen_k": 16384,
        "heads_q": 70,
        "heads_kv": 7,
        "head_dim": 128,
    },
    "d80": {"batch": 2, "seqlen": 700, "heads": 8, "head_dim": 72},
    "d96": {"batch": 2, "seqlen": 700, "heads": 8, "head_dim": 96},
    "d192-causal": {"batch": 2, "seqlen": 700, "heads": 8, "head_dim": 160, "causal": True},
    "d64-grouped": {
        "batch": 20,
        "seqlen_q": 50,
        "seqlen_k": 300,
        "heads_q": 8,
        "heads_kv": 2,
        "head_dim": 64,
        "causal": True,
    },
    "d256-gqa": {"batch": 1, "seqlen": 700, "heads_q": 8, "heads_kv": 2, "head_dim": 256},
    "one-tile": {"seqlen_q": 3, "seqlen_k": 70, "heads": 1, "head_dim": 128, "dtype": "float16"},
    "no-keys-seen": {"seqlen_q": 400, "seqlen_k": 100, "heads": 2, "head_dim": 64, "causal": True},
}
