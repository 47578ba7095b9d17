"""The commands of `shardmill`: one file each, a thin layer over the library. cli.py registers them."""
