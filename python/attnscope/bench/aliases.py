"""Other names of impls, for commands that read results and run nothing."""

ALIASES = {
    "flash": "sdpa-flash",
    "math": "sdpa-math",
    "efficient": "sdpa-efficient",
    "cudnn": "sdpa-cudnn",
}
