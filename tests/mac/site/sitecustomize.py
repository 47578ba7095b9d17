"""Python runs this by itself before anything else: see simulated_mac."""

import os

if os.environ.get("SIMULATED_MAC"):
    import simulated_mac

    simulated_mac.pretend()
