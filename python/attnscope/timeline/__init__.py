"""A timeline from inside the Hopper kernel: what each role does, and when.

`library` builds and calls an instrumented copy of the kernel, `recording` reads the marks that it
leaves, `analysis` measures overlap and cost, `trace` and `drawing` show it, `command` is
`attnscope timeline`.
"""
