"""How other libraries call attnscope."""
