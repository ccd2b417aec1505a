"""SGLang imports for eight seconds of CPU in each of its three processes, a fifth of it in search of garbage that is not there.

Python's own thresholds suit small programs: later versions of it raised them, too.
"""

import gc

gc.set_threshold(50_000, 20, 20)
