"""Which lines of memory a decode step touches, by arithmetic: `places.py` addresses of layouts, `reads.py` in which order they
are read, `lru.py` what a cache makes of that, `copies.py` the same order on this machine's clock.

The model has a first and a second cache and a TLB, all of them least-recently-used, and knows no prefetching, no write and no
other process. So it counts what must be fetched, not how long that takes; `copies.py` is there for the time.
"""
