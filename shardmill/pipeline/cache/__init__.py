"""The store: results of steps by their cache keys, on this machine and in a remote store."""
